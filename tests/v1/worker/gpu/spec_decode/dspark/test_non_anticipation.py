# SPDX-License-Identifier: Apache-2.0
"""No decision about a draft sees what depends on that draft: the output stays exact.

Two tokens. The draft proposes token 1 with 0.8 where the target wants 0.5, and the
confidence of draft 2 tells which token draft 1 is. A rule that trims draft 1 by
confidence 2 keeps the 1s and drops the 0s, so that the first token is 1 with

    P(judged) * min(1, 0.5 / 0.8) + P(not judged) * 0.5    by ranking (all judged
                                                          drafts are 1s), or
    0.8 * min(1, 0.5 / 0.8) + 0.2 * 0.5 = 0.6             by budget (all 1s judged)

instead of 0.5. Each sound rule is tested beside its broken twin, which has to show
just that figure, so the test is known to see what it claims to exclude.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats

from tests.helpers.capacity_cases import DEVICE
from vllm.v1.worker.gpu.spec_decode.dspark.capacity import assign_capacities
from vllm.v1.worker.gpu.spec_decode.dspark.confidence_mirror import ConfidenceMirror
from vllm.v1.worker.gpu.spec_decode.dspark.planner import PlanInputs, plan_budget
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts

DEPTH = 2
TARGET = np.array([0.5, 0.5])  # P(token) at position 1
DRAFT = np.array([0.2, 0.8])
# Position 2, by token at position 1.
NEXT_TARGET = np.array([[0.3, 0.7], [0.6, 0.4]])
NEXT_DRAFT = np.array([[0.9, 0.1], [0.5, 0.5]])
FIRST_CONFIDENCE = 0.6
NEXT_CONFIDENCE = np.array([0.1, 0.9])  # by token at position 1
ACCEPT = np.minimum(1.0, TARGET / DRAFT)
BIASED = DRAFT[1] * ACCEPT[1] + DRAFT[0] * TARGET[1]
# Two-sided; a sound rule fails with this probability, but the seeds are fixed.
LEAST_P_VALUE = 1e-3
FAULT_P_VALUE = 1e-9


@dataclass
class Round:
    """One round of independent requests. Arrays have one entry or row a request.

    Attributes:
        drafts: Token at positions 1 and 2. Shape [R, 2].
        confidences: Shape [R, 2], float32.
    """

    drafts: np.ndarray
    confidences: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, num_reqs: int) -> "Round":
        """Draft two positions and read their confidences."""
        first = (rng.random(num_reqs) < DRAFT[1]).astype(np.int64)
        second = (rng.random(num_reqs) < NEXT_DRAFT[first, 1]).astype(np.int64)
        confidences = np.full((num_reqs, DEPTH), FIRST_CONFIDENCE, dtype=np.float32)
        confidences[:, 1] = NEXT_CONFIDENCE[first]
        return cls(np.stack((first, second), axis=1), confidences)

    @property
    def survival(self) -> np.ndarray:
        """Running product of the confidences. Shape [R, 2], float32."""
        return np.cumprod(self.confidences, axis=1, dtype=np.float32)


def emit(rng, target, draft, token, is_judged):
    """Reject or accept one draft a request; return the tokens and which survived.

    A draft that is not judged is replaced by a draw from the target.
    """
    rows = np.arange(len(token))
    keep = rng.random(len(token)) * draft[rows, token] < target[rows, token]
    residual = np.maximum(target - draft, 0.0)
    residual = np.where(residual.sum(1, keepdims=True) > 0, residual, target)
    law = np.where(is_judged[:, None], residual, target)
    law = law / law.sum(axis=1, keepdims=True)
    redrawn = (rng.random(len(token)) < law[:, 1]).astype(np.int64)
    accepted = is_judged & keep
    return np.where(accepted, token, redrawn), accepted


class Counts:
    """Output tokens: the first of a round, and the second by the first."""

    def __init__(self):
        self.first = np.zeros(2, dtype=np.int64)
        self.second = np.zeros((2, 2), dtype=np.int64)

    def add(self, rng, made: Round, capacities: np.ndarray) -> None:
        """Verify a round's drafts, ``capacities`` of them each, and count."""
        num_reqs = len(capacities)
        token, accepted = emit(
            rng,
            np.tile(TARGET, (num_reqs, 1)),
            np.tile(DRAFT, (num_reqs, 1)),
            made.drafts[:, 0],
            capacities >= 1,
        )
        np.add.at(self.first, token, 1)
        # Where the first draft survived the round goes on behind it.
        first = made.drafts[accepted, 0]
        nexts, _ = emit(
            rng,
            NEXT_TARGET[first],
            NEXT_DRAFT[first],
            made.drafts[accepted, 1],
            capacities[accepted] >= 2,
        )
        np.add.at(self.second, (first, nexts), 1)

    def assert_unbiased(self) -> None:
        """Show that both tokens follow the target."""
        assert self.first.sum() >= 20_000 and self.second.sum(axis=1).min() > 1000
        assert p_value(self.first, TARGET) > LEAST_P_VALUE
        for counts, law in zip(self.second, NEXT_TARGET, strict=True):
            assert p_value(counts, law) > LEAST_P_VALUE

    def assert_first_is_one_with(self, probability: float) -> None:
        """Show that the bias is there, and that it is the one that was computed."""
        expected = np.array([1.0 - probability, probability])
        assert p_value(self.first, TARGET) < FAULT_P_VALUE
        assert p_value(self.first, expected) > LEAST_P_VALUE


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Return the p-value of counts under a law (chi-square)."""
    return float(stats.chisquare(counts, law * counts.sum()).pvalue)


# ---- ranking across rows ------------------------------------------------------

NUM_REQS = 1000
NUM_ROUNDS = 24
BUDGET = 600  # of 2000 slots; fewer than the rows whose first draft is a 1


def admit(confidences: np.ndarray) -> np.ndarray:
    """Rank one batch with the engine's rule. Returns capacities, shape [R]."""
    num_reqs = len(confidences)
    return (
        assign_capacities(
            torch.from_numpy(confidences).to(DEVICE),
            torch.arange(num_reqs, device=DEVICE),
            torch.full((num_reqs,), DEPTH, dtype=torch.int32, device=DEVICE),
            BUDGET,
        )
        .cpu()
        .numpy()
    )


def rank(seed: int, confidences_of) -> Counts:
    rng, counts = np.random.default_rng(seed), Counts()
    for _ in range(NUM_ROUNDS):
        made = Round.draw(rng, NUM_REQS)
        # Rows differ in what is known before their drafts: half of them are better.
        made.confidences[::2, 0] = 0.95
        capacities = admit(confidences_of(made.confidences))
        assert capacities.sum() == BUDGET
        assert 0 < np.count_nonzero(capacities) < NUM_REQS, "premise: both kinds"
        counts.add(rng, made, capacities)
    return counts


def test_ranking_by_own_and_earlier_confidences_is_unbiased():
    rank(1, lambda confidences: confidences).assert_unbiased()


def with_next_confidence(confidences: np.ndarray) -> np.ndarray:
    """Broken rule: confidence 2 in place of 1, and nothing further is known."""
    seen = np.ones_like(confidences)
    seen[:, 0] = confidences[:, 1]
    return seen


def test_ranking_that_sees_the_next_confidence_is_biased():
    # Of equals the earlier position goes first, so the budget buys the first draft of
    # BUDGET rows, every one of them a 1.
    judged = BUDGET / NUM_REQS
    biased = judged * ACCEPT[1] + (1.0 - judged) * TARGET[1]
    rank(2, with_next_confidence).assert_first_is_one_with(biased)


# ---- budget -----------------------------------------------------------------------

NUM_SLOTS = 40  # independent requests, each with a budget of its own
NUM_STEPS = 500
# Milliseconds by target tokens. The second token costs a jump that draft 1 alone does
# not repay, but both drafts together do: a global search crosses such jumps.
SAW_TOOTH_MS = [1.0, 1.0, 1.8, 1.8]


def budget_for(survival: np.ndarray) -> int:
    """Return the planner's budget for one request with two drafts. ``[1, 2]``."""
    costs = StepCosts(
        {DEPTH: np.zeros(2)}, {DEPTH: np.full(2, SAW_TOOTH_MS[-1])}, SAW_TOOTH_MS
    )
    inputs = PlanInputs(
        survival_probs=survival,
        scheduled_drafts=np.full(1, DEPTH, dtype=np.int32),
        num_non_draft_tokens=1,
        num_sampling_reqs=1,
        max_draft_budget=DEPTH,
        current_depth=DEPTH,
        next_survival=survival,
        depths=(DEPTH,),
    )
    return plan_budget(inputs, costs).draft_budget


BUDGET_OF_FIRST_TOKEN = np.array(
    [
        budget_for(np.array([[FIRST_CONFIDENCE, FIRST_CONFIDENCE * c]]))
        for c in NEXT_CONFIDENCE
    ]
)


class Requests:
    """Requests beside another one, whose rounds go through the real mirror."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.mirror = ConfidenceMirror(NUM_SLOTS + 1, DEPTH, DEVICE)
        self.counts = Counts()
        self.budgets: set[int] = set()
        self.draft(with_us=True)

    def draft(self, *, with_us: bool) -> None:
        """Draft for all requests, or for the other one alone."""
        slots = np.array([NUM_SLOTS])
        probs = np.zeros((1, DEPTH), dtype=np.float32)
        if with_us:
            self.made = Round.draw(self.rng, NUM_SLOTS)
            slots = np.arange(NUM_SLOTS + 1)
            probs = np.concatenate((self.made.confidences, probs))
        device_slots = torch.from_numpy(slots).to(DEVICE)
        device_probs = torch.from_numpy(probs).to(DEVICE)
        self.mirror.publish(device_probs, device_slots, slots, DEPTH)

    def verify(self, survival: np.ndarray) -> None:
        """Judge our drafts in hand with the budgets that ``survival`` calls for."""
        # The planner is a pure function: two inputs, two budgets, computed once.
        budgets = BUDGET_OF_FIRST_TOKEN[(survival[:, 1] > 0.3).astype(int)]
        self.budgets.update(budgets.tolist())
        self.counts.add(self.rng, self.made, budgets)

    def landed_survival(self) -> np.ndarray:
        """Return what the host may plan with now. Shape [NUM_SLOTS, 2]."""
        self.mirror.land()
        return self.mirror.survival_probs(np.arange(NUM_SLOTS))


def test_premise_the_planner_trims_exactly_the_rounds_that_begin_with_a_zero():
    assert BUDGET_OF_FIRST_TOKEN.tolist() == [0, DEPTH]
    assert pytest.approx(0.6) == BIASED


def test_budget_from_old_confidences_is_unbiased():
    requests = Requests(seed=3)
    for _ in range(NUM_STEPS):
        requests.verify(requests.landed_survival())
        requests.draft(with_us=True)
    assert requests.budgets == {0, DEPTH}, "premise: some rounds are trimmed"
    requests.counts.assert_unbiased()


def test_budget_from_the_confidences_of_the_drafts_in_hand_is_biased():
    requests = Requests(seed=4)
    for _ in range(NUM_STEPS):
        requests.verify(requests.made.survival)
        requests.draft(with_us=True)
    requests.counts.assert_first_is_one_with(BIASED)


def left_out_every_other_step(seed: int, *, is_held: bool) -> Requests:
    """A step without our request passes between drafting and judging."""
    requests = Requests(seed)
    for _ in range(NUM_STEPS):
        requests.draft(with_us=False)
        if not is_held:
            # The broken rule: a round counts as old as soon as another one follows.
            requests.mirror._last_serial[:] = np.iinfo(np.int64).max
        requests.verify(requests.landed_survival())
        requests.draft(with_us=True)
    return requests


def test_budget_is_unbiased_for_a_request_that_a_step_left_out():
    requests = left_out_every_other_step(5, is_held=True)
    assert requests.budgets == {0, DEPTH}, "premise: some rounds are trimmed"
    requests.counts.assert_unbiased()


def test_budget_is_biased_if_a_left_out_round_counts_as_old():
    requests = left_out_every_other_step(6, is_held=False)
    requests.counts.assert_first_is_one_with(BIASED)
