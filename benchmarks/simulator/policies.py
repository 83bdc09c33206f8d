# SPDX-License-Identifier: Apache-2.0
"""What an arm decides: draft depth and verification budget, step by step.

A policy sees what its engine would see: the confidences of the drafts in hand only
to rank them, older ones to choose a budget. :class:`OraclePolicy` alone sees the
truth. The policies of vLLM as it is (none, fixed depth, upstream's rule) are here;
ours, which runs the product's own planner, is in :mod:`.ours`.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class Batch:
    """One scheduled step, requests with drafts first.

    Attributes:
        slots: Request slots. Shape [R], intp.
        drafts: Drafts in hand. Shape [R], int32.
        non_drafts: Other target tokens (anchor, prompt). Shape [R], int32.
        sampling: Rows that yield a token whatever happens. Shape [R], bool.
        prefilling: Rows that are a part of their prompt. Shape [R], bool.
        true_logits: Of the drafts in hand. Shape [R, K], float64.
    """

    slots: np.ndarray
    drafts: np.ndarray
    non_drafts: np.ndarray
    sampling: np.ndarray
    prefilling: np.ndarray
    true_logits: np.ndarray

    @property
    def num_drafts(self) -> int:
        """Drafts in hand over the batch."""
        return int(self.drafts.sum())


@dataclass(frozen=True, slots=True)
class Drafting:
    """The drafter's pass at the end of a step.

    Attributes:
        slots: Requests that drafted. Shape [R], intp.
        true_logits: Of the drafts just made. Shape [R, K], float64.
        confidence_logits: What the confidence head reports. Shape [R, K], float64.
        depth: Positions drafted.
    """

    slots: np.ndarray
    true_logits: np.ndarray
    confidence_logits: np.ndarray
    depth: int


class Policy(Protocol):
    """Decides one engine's steps. Per load: ``start``; per step: ``schedule``,
    ``budget``, ``rank``, ``judged``, ``next_depth``, ``drafted``, ``took``.

    Arms inherit from it: what one need not know, it ignores.

    Attributes:
        uniform_graphs: Untrimmed decode batches of one width run uniform graphs.
    """

    uniform_graphs: bool

    @property
    def max_depth(self) -> int:
        """Deepest draft that the arm makes."""

    def start(self, num_slots: int) -> None:
        """Forget everything before a new load."""

    def replaced(self, slots: np.ndarray) -> None:
        """Forget slots that were given to new requests."""

    def schedule(self, num_reqs: int) -> int:
        """Return the depth of the drafts that this step makes."""

    def next_depth(self, depth: int, drafting: Drafting, num_reqs: int) -> int:
        """Return the depth really drafted; only the oracle changes it so late."""
        return depth

    def budget(self, batch: Batch) -> int:
        """Return how many of the drafts in hand to verify."""

    def rank(self, batch: Batch) -> np.ndarray:
        """Return the survivals that rank the drafts in hand. Shape [R, K]."""

    def drafted(self, drafting: Drafting) -> None:
        """Take in the confidences of the drafts just made."""

    def judged(
        self, batch: Batch, capacities: np.ndarray, accepted: np.ndarray
    ) -> None:
        """Take in what the target made of the drafts. Both shape [R], int64."""

    def took(self, ms: float) -> None:
        """Take in what the whole step took, milliseconds."""


@dataclass
class FixedPolicy(Policy):
    """vLLM at a fixed ``num_speculative_tokens``; 0 is no speculation."""

    depth: int
    uniform_graphs: bool = True

    @property
    def max_depth(self) -> int:
        """See ``Policy``."""
        return self.depth

    def schedule(self, num_reqs: int) -> int:
        """Always the fixed depth."""
        return self.depth

    def budget(self, batch: Batch) -> int:
        """Verify everything."""
        return batch.num_drafts

    def rank(self, batch: Batch) -> np.ndarray:
        """Not used: nothing is trimmed."""
        return np.ones_like(batch.true_logits)


def best_rate(expected: np.ndarray, step_ms: np.ndarray) -> tuple[int, float]:
    """Return the index and the value of the first highest tokens per ms."""
    rates = expected / step_ms
    best = int(np.argmax(rates))
    return best, float(rates[best])


def expected_tokens(base: int, survival: np.ndarray, largest: int) -> np.ndarray:
    """Return expected tokens by budget 0..largest, the best drafts first.

    Args:
        base: Tokens without any draft.
        survival: Of the drafts that may be verified, any order. Shape [D].
        largest: Largest budget.
    """
    falling = np.sort(survival)[::-1][:largest]
    return base + np.concatenate(([0.0], np.cumsum(falling)))


def survivals(logits: np.ndarray) -> np.ndarray:
    """Return running products of sigmoid(logits) along the last axis."""
    return np.cumprod(0.5 * (1.0 + np.tanh(0.5 * logits)), axis=-1)


@dataclass
class UpstreamPolicy(Policy):
    """vLLM's adaptive verification: always K drafts, the budget by argmax.

    Priced by tokens, as its profile does, but logits and sampling included, which
    flatters it. Its varlen graphs replace the uniform ones.

    Source: shared description of vLLM 0.33's adaptive verification: argmax over b of
    (sampling requests + sum of the b best survivals that are one round old) /
    (draft_ms + verify_ms); a request without an older round counts as certain.
    """

    costs: StepCosts
    depth: int
    max_total_logits: int
    uniform_graphs: bool = False
    _stale: np.ndarray = field(init=False, repr=False)
    _current: np.ndarray = field(init=False, repr=False)

    @property
    def max_depth(self) -> int:
        """See ``Policy``."""
        return self.depth

    def start(self, num_slots: int) -> None:
        """Every request starts as certain to be accepted."""
        self._stale = np.ones((num_slots, self.depth))
        self._current = np.ones((num_slots, self.depth))

    def replaced(self, slots: np.ndarray) -> None:
        """A new request counts as certain to be accepted."""
        self._stale[slots] = self._current[slots] = 1.0

    def schedule(self, num_reqs: int) -> int:
        """Always K."""
        return self.depth

    def budget(self, batch: Batch) -> int:
        """The first argmax of expected tokens over step time."""
        valid = np.arange(self.depth) < batch.drafts[:, None]
        num_reqs = len(batch.slots)
        cap = max(self.max_total_logits - num_reqs, 0)
        expected = expected_tokens(
            int(batch.sampling.sum()),
            self._stale[batch.slots][valid],
            min(batch.num_drafts, cap),
        )
        base = int(batch.non_drafts.sum())
        step_ms = (
            self.costs.draft_ms[self.depth][num_reqs]
            + self.costs.verify_varlen_ms[base : base + len(expected)]
        )
        return best_rate(expected, step_ms)[0]

    def rank(self, batch: Batch) -> np.ndarray:
        """By current confidence."""
        return self._current[batch.slots]

    def drafted(self, drafting: Drafting) -> None:
        """Keep the last round for ranking, the one before it for budgets."""
        slots = drafting.slots
        self._stale[slots] = self._current[slots]
        self._current[slots] = survivals(drafting.confidence_logits[:, : self.depth])


@dataclass
class OraclePolicy(Policy):
    """Knows the true probabilities and the costs, and decides without delay.

    Depth and budget of a round are chosen together, when the drafts are made, for
    the most expected tokens per ms of that round. It does not know which will be
    accepted, nor weigh one round against later ones: where prompts take much of the
    time, that is up to 2 % short of the best.
    """

    costs: StepCosts
    depths: tuple[int, ...]
    max_total_logits: int
    uniform_graphs: bool = True
    _draft_ms: float = field(init=False, default=0.0)

    @property
    def max_depth(self) -> int:
        """See ``Policy``."""
        return self.depths[-1]

    def start(self, num_slots: int) -> None:
        """No drafter pass yet."""
        self._draft_ms = 0.0

    def schedule(self, num_reqs: int) -> int:
        """The deepest; :meth:`next_depth` decides."""
        return self.depths[-1]

    def next_depth(self, depth: int, drafting: Drafting, num_reqs: int) -> int:
        """The depth whose best budget promises the most tokens per ms."""
        num_drafting = len(drafting.slots)
        truth = survivals(drafting.true_logits)
        rates = {}
        for d in self.depths:
            expected, step_ms = self._decode_round(
                d, truth[:, :d].ravel(), num_drafting
            )
            step_ms = step_ms + self.costs.draft_ms[d][num_drafting]
            rates[d] = (best_rate(expected, step_ms)[1], d)
        chosen = max(rates, key=rates.__getitem__)
        self._draft_ms = float(self.costs.draft_ms[chosen][num_drafting])
        return chosen

    def _decode_round(
        self, depth: int, survival: np.ndarray, num_reqs: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Expected tokens and verify time by budget of a decode-only batch."""
        costs = self.costs
        num_drafts = num_reqs * depth
        largest = min(num_drafts, max(self.max_total_logits - num_reqs, 0))
        expected = expected_tokens(num_reqs, survival, num_drafts)
        step_ms = costs.decode_varlen_ms(num_reqs)[: num_drafts + 1].copy()
        step_ms[largest + 1 :] = np.inf
        step_ms[-1] = costs.verify_uniform_ms[depth][num_reqs]
        return expected, step_ms + costs.overhead_ms

    def budget(self, batch: Batch) -> int:
        """The best budget, by the true survivals of the drafts in hand."""
        valid = np.arange(batch.true_logits.shape[1]) < batch.drafts[:, None]
        truth = survivals(batch.true_logits)[valid]
        total, num_reqs = batch.num_drafts, len(batch.slots)
        width = int(batch.drafts.max(initial=0))
        base = int(batch.non_drafts.sum())
        if total and total == num_reqs * width and base == num_reqs:
            expected, step_ms = self._decode_round(width, truth, num_reqs)
        else:
            expected = expected_tokens(int(batch.sampling.sum()), truth, total)
            step_ms = self.costs.verify_varlen_ms[base : base + total + 1].copy()
            step_ms[max(self.max_total_logits - num_reqs, 0) + 1 : -1] = np.inf
        return best_rate(expected, step_ms + self._draft_ms)[0]

    def rank(self, batch: Batch) -> np.ndarray:
        """By true survival."""
        return survivals(batch.true_logits)
