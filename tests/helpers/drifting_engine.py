# SPDX-License-Identifier: Apache-2.0
"""A simulated engine whose true step costs drift away from its tables.

The real planner, depth controller and correction serve a constant load; acceptance
is the survivals' expectation, so regret against the best plan at the true costs is
known exactly in every step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vllm.v1.worker.gpu.spec_decode.dspark.cost_correction import CostCorrection
from vllm.v1.worker.gpu.spec_decode.dspark.depth import DepthController
from vllm.v1.worker.gpu.spec_decode.dspark.planner import (
    PlanInputs,
    plan_budget,
    plan_depth,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts

K, DEPTHS, MAX_REQS = 7, (1, 2, 3, 5, 7), 64
# Roughly one H200 with Qwen3-8B dimensions, tokens twice as dear.
BASE_MS, TOKEN_MS, DRAFT_BASE_MS, DRAFT_TOKEN_MS = 6.0, 0.02, 1.0, 0.006
PLAN_INTERVAL = 8
# Depth, target tokens and whether the uniform graph ran, to true over tabled time.
Drift = Callable[[int, int, bool], float]


def make_tables() -> StepCosts:
    """Return linear tables whose uniform graphs cost the same as varlen ones."""
    reqs = np.arange(MAX_REQS + 1)
    return StepCosts(
        {d: DRAFT_BASE_MS + DRAFT_TOKEN_MS * d * reqs for d in DEPTHS},
        {d: BASE_MS + TOKEN_MS * reqs * (d + 1) for d in DEPTHS},
        BASE_MS + TOKEN_MS * np.arange(MAX_REQS * (K + 1) + 1),
    )


@dataclass
class DriftingEngine:
    """Serves ``MAX_REQS`` requests. Set ``drift``, then ``run``.

    Attributes:
        confidence: Mean of the drafts' confidences.
        noise: Standard deviation of a measured time, relative.
        stall_rate: Share of steps that take ten times as long.
        corrects: Whether measured times correct the tables.
        drift: True over tabled time.
    """

    confidence: float
    noise: float = 0.0
    stall_rate: float = 0.0
    corrects: bool = True
    drift: Drift = field(default=lambda depth, tokens, is_uniform: 1.0)

    def __post_init__(self) -> None:
        """Start at depth K with tables that are right."""
        self.tables = make_tables()
        self.correction = CostCorrection(DEPTHS, MAX_REQS, MAX_REQS * (K + 1))
        self._controller = DepthController(DEPTHS, window=8)
        self._random = np.random.default_rng(0)
        self._hand = self._depth = self._wish = K
        self._step = 0

    def run(self, num_steps: int) -> list[tuple[int, int]]:
        """Serve steps and return the (depth, budget) of each."""
        return [self._serve() for _ in range(num_steps)]

    def regret(self, num_steps: int) -> float:
        """Serve steps and return their mean loss against the best plans, relative."""
        losses = []
        for _ in range(num_steps):
            survival = self._draw()
            depth, budget = self._serve(survival)
            losses.append(1.0 - self._rate / self._best_rate(survival))
        return float(np.mean(losses))

    def _draw(self) -> np.ndarray:
        a, b = 6 * self.confidence, 6 * (1 - self.confidence)
        return np.cumprod(self._random.beta(a, b, (MAX_REQS, K)), axis=1)

    def _true_ms(self, depth: int, tokens: int, verify_ms: float, uniform: bool):
        tabled = float(self.tables.draft_ms[depth][MAX_REQS] + verify_ms)
        return tabled, tabled * self.drift(depth, tokens, uniform)

    def _serve(self, survival: np.ndarray | None = None) -> tuple[int, int]:
        survival = self._draw() if survival is None else survival
        correction = self.correction if self.corrects else None
        inputs = PlanInputs(
            survival_probs=survival,
            scheduled_drafts=np.full(MAX_REQS, self._hand, dtype=np.int32),
            num_non_draft_tokens=MAX_REQS,
            num_sampling_reqs=MAX_REQS,
            max_draft_budget=10**9,
            current_depth=self._controller.depth,
            next_survival=survival,
            depths=DEPTHS,
        )
        plan = plan_budget(
            inputs, self.tables, draft_depth=self._depth, correction=correction
        )
        if self._step % PLAN_INTERVAL == 0:
            wish = plan_depth(inputs, self.tables, correction=correction)
            self._wish = wish.draft_depth
        tokens = MAX_REQS + plan.draft_budget
        verify_ms = self.tables.decode_varlen_ms(MAX_REQS)[plan.draft_budget]
        tabled, true = self._true_ms(self._depth, tokens, verify_ms, plan.verify_all)
        self._rate = plan.expected_tokens / true
        if self.corrects and (not plan.verify_all or self._hand == self._depth):
            measured = true * (1.0 + self.noise * self._random.standard_normal())
            if self._random.random() < self.stall_rate:
                measured *= 10.0
            self.correction.observe(
                self._depth,
                tokens,
                is_uniform=plan.verify_all,
                tabled_ms=tabled,
                measured_ms=measured,
            )
        served = self._depth, plan.draft_budget
        self._hand = self._depth
        self._depth = self._controller.update(self._wish, MAX_REQS)
        self._step += 1
        return served

    def _best_rate(self, survival: np.ndarray) -> float:
        best = 0.0
        for depth in DEPTHS:
            rising = np.sort(survival[:, :depth], axis=None)[::-1]
            expected = MAX_REQS + np.concatenate(([0.0], np.cumsum(rising)))
            for budget, tokens in enumerate(expected):
                size = MAX_REQS + budget
                uniform = budget == len(rising)
                verify_ms = self.tables.decode_varlen_ms(MAX_REQS)[budget]
                _, true = self._true_ms(depth, size, verify_ms, uniform)
                best = max(best, tokens / true)
        return best
