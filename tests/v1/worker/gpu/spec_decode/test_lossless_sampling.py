# SPDX-License-Identifier: Apache-2.0
"""Sampled output has the target's distribution at every depth and capacity.

Synthetic models with a known law (tests/helpers/lossless.py) through the real
admission and rejection kernels; about 20 000 draws in all in Triton's interpreter,
five times as many per case on a GPU. Engine runs: tests/v1/worker/gpu/
test_dspark_lossless.py.
"""

from collections.abc import Callable

import pytest
import torch

from tests.helpers.admission import DEVICE
from tests.helpers.fast_interpreter import fast_interpreter
from tests.helpers.lossless import (
    VOCAB_SIZE,
    Chains,
    Models,
    admit,
    admit_anticipating,
    chi_square_p_value,
)
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils
from vllm.v1.worker.gpu.spec_decode.dspark.planner import threshold_budget

# Three minutes of an idle core in all; a busy one needs patience.
pytestmark = pytest.mark.timeout(1200)

MODELS = Models.make(seed=0)
# Few chains, many tokens each: the admission ranks whole batches.
NUM_CHAINS = 50
# Tokens per chain: 4000 draws a case, five cases.
LENGTH = 80 if DEVICE.type == "cpu" else 2000
# A correct sampler fails a case with this probability; seeds are fixed.
LEAST_P_VALUE = 1e-3
# What a fault must be told from chance by.
FAULT_P_VALUE = 1e-9
THRESHOLD = 0.5


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Let the rejection kernels run in Triton's interpreter, and fast."""
    if DEVICE.type != "cpu":
        yield
        return
    from vllm.platforms.dspark_rehearsal.kernels import InterpreterLibdevice

    monkeypatch.setattr(rejection_sampler_utils, "tldevice", InterpreterLibdevice)
    with fast_interpreter():
        yield


def old_budget(chains: Chains, depth: int) -> int:
    """Return the budget that last round's confidences call for, as the planner does."""
    scheduled = torch.full((NUM_CHAINS,), depth, dtype=torch.int32).numpy()
    return threshold_budget(chains.survival, scheduled, THRESHOLD)


def decode(
    length: int,
    depth_of: Callable[[int], int],
    budget_of: Callable[[Chains, int], int | None],
    seed: int,
    rule: Callable = admit,
) -> Chains:
    """Decode until every chain has ``length`` tokens."""
    chains = Chains(MODELS, NUM_CHAINS, seed, rule)
    for step in range(10 * length):
        if min(len(tokens) for tokens in chains.tokens) > length:
            return chains
        depth = depth_of(step)
        chains.round(depth, budget_of(chains, depth))
    raise AssertionError("the chains do not advance")


def p_value_of(chains: Chains, length: int) -> float:
    counts = chains.transitions(length)
    assert counts.sum() == NUM_CHAINS * length
    assert (counts.sum(axis=1) > 50).all(), "premise: every token leads often"
    return chi_square_p_value(counts, MODELS.target_probs.numpy())


def all_drafts(chains: Chains, depth: int) -> None:
    return None


CASES = {
    "depth 1": (lambda step: 1, all_drafts),
    "depth 3": (lambda step: 3, all_drafts),
    "depth 7": (lambda step: 7, all_drafts),
    "depth 7 trimmed": (lambda step: 7, old_budget),
    "changing depth, trimmed": (lambda step: (3, 0, 7, 1)[step % 4], old_budget),
}


@pytest.mark.parametrize("case", CASES)
def test_frequencies_match_the_target(case):
    depth_of, budget_of = CASES[case]
    seed = 1 + list(CASES).index(case)
    chains = decode(LENGTH, depth_of, budget_of, seed)
    assert 0 < chains.num_accepted < chains.num_verified, "premise: both happen"
    trims = chains.num_verified < chains.num_drafts
    assert trims == (budget_of is old_budget), "premise"
    assert p_value_of(chains, LENGTH) > LEAST_P_VALUE


def test_the_draft_distribution_differs_so_that_accepting_all_would_be_noticed():
    counts = MODELS.draft_probs.numpy() * NUM_CHAINS * LENGTH / VOCAB_SIZE
    assert chi_square_p_value(counts, MODELS.target_probs.numpy()) < FAULT_P_VALUE


def test_frequencies_move_when_capacity_knows_the_draft_it_judges():
    def half(chains: Chains, depth: int) -> int:
        return NUM_CHAINS // 2

    length = 24
    broken = decode(length, lambda step: 1, half, 7, rule=admit_anticipating)
    assert p_value_of(broken, length) < FAULT_P_VALUE
    sound = decode(length, lambda step: 1, half, 7)
    assert p_value_of(sound, length) > LEAST_P_VALUE
