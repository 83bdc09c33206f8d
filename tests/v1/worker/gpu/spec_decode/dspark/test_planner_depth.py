# SPDX-License-Identifier: Apache-2.0
"""The depth of the next drafts against a brute-force oracle (planner.plan_depth)."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.plan_cases import (
    DEPTHS,
    MAX_NUM_REQS,
    NO_CAP,
    NO_DEADLINE,
    RATE_TOLERANCE,
    SEEDS,
    K,
    linear_costs,
    make_inputs,
    random_costs,
    random_inputs,
)
from vllm.v1.worker.gpu.spec_decode.dspark.planner import plan_depth, plan_step


def oracle_depth_rates(survival, costs, depths, cap, context_tokens):
    """Best rate per depth for per-request estimates [R, K], with plain loops."""
    num_reqs, best = len(survival), {}
    for depth in depths:
        slots = sorted(
            (float(p) for row in survival for p in row[:depth]), reverse=True
        )
        best[depth] = 0.0
        for budget in range(min(len(slots), cap) + 1):
            verify_ms = costs.decode_varlen_ms(num_reqs)[budget]
            if budget == len(slots):
                verify_ms = costs.verify_uniform_ms[depth][num_reqs]
            step_ms = costs.draft_ms[depth][num_reqs] + verify_ms + costs.overhead_ms
            for prices in (costs.verify_context_ms, costs.draft_context_ms):
                step_ms += prices[depth][num_reqs] * context_tokens
            rate = (num_reqs + math.fsum(slots[:budget])) / step_ms
            best[depth] = max(best[depth], rate)
    return best


@NO_DEADLINE
@given(SEEDS, st.booleans(), st.sampled_from([2, NO_CAP]), st.sampled_from([0.0, 0.1]))
def test_depth_is_the_best_and_held_within_the_margin(seed, per_request, cap, margin):
    rng = np.random.default_rng(seed)
    costs, inputs = random_costs(rng), random_inputs(rng)
    num_reqs = inputs.num_sampling_reqs
    prior = np.cumprod(rng.random((num_reqs, K)), axis=1)
    rows = prior if per_request else np.tile(prior[0], (num_reqs, 1))
    inputs = inputs._replace(
        next_survival=prior if per_request else prior[0], max_draft_budget=cap
    )
    plan = plan_depth(inputs, costs, margin=margin)
    rates = oracle_depth_rates(rows, costs, DEPTHS, cap, inputs.context_tokens)
    current, best = rates[inputs.current_depth], max(rates.values())
    assert plan.current_tokens_per_ms == pytest.approx(current, rel=RATE_TOLERANCE)
    assert plan.tokens_per_ms == pytest.approx(
        rates[plan.draft_depth], rel=RATE_TOLERANCE
    )
    assert plan.draft_budget <= min(cap, num_reqs * plan.draft_depth)
    if abs(best / current - 1.0 - margin) < 1e-9:
        return  # on the margin, rounding decides
    if best > current * (1.0 + margin):
        assert plan.tokens_per_ms == pytest.approx(best, rel=RATE_TOLERANCE)
    else:
        assert plan.draft_depth == inputs.current_depth


@NO_DEADLINE
@given(SEEDS)
def test_single_depth_is_the_trivial_case(seed):
    rng = np.random.default_rng(seed)
    inputs = random_inputs(rng)._replace(current_depth=K, depths=(K,))
    assert plan_depth(inputs, random_costs(rng)).draft_depth == K
    assert plan_step(inputs, random_costs(rng)).draft_depth == K


def test_costly_drafting_lowers_the_depth_and_free_drafting_keeps_it():
    inputs = make_inputs(np.full((MAX_NUM_REQS, K), 0.5))
    depths = [
        plan_depth(inputs, linear_costs(0.0, draft_ms=ms)).draft_depth
        for ms in (0.0, 0.2, 100.0)
    ]
    assert depths == [K, 2, 0]


def test_depth_rises_again_when_costs_allow():
    inputs = make_inputs(np.full((1, K), 0.5), current_depth=1)
    assert plan_depth(inputs, linear_costs(0.0)).draft_depth == K


def test_prior_that_rises_is_taken_as_falling():
    rising = make_inputs(np.ones((4, K)), next_survival=np.array([0.2, 0.9, 0.9, 0.9]))
    falling = rising._replace(next_survival=np.full(K, 0.2))
    costs = linear_costs(0.1, draft_ms=0.1)
    assert plan_depth(rising, costs) == plan_depth(falling, costs)


@pytest.mark.parametrize("per_request", [False, True])
def test_unknown_prior_is_taken_as_certain(per_request):
    shape = (4, K) if per_request else (K,)
    unknown = make_inputs(np.ones((4, K)), next_survival=np.full(shape, math.nan))
    certain = unknown._replace(next_survival=np.ones(shape))
    costs = linear_costs(0.1, draft_ms=0.1)
    assert plan_depth(unknown, costs) == plan_depth(certain, costs)


def test_curve_of_whole_steps_takes_the_shallowest_depth_that_loses_nothing():
    prior = np.array([0.9, 0.8, 0.1, 0.05])
    inputs = make_inputs(np.ones((MAX_NUM_REQS, K)), next_survival=prior)
    split, whole = (linear_costs(1.0, whole_step=w) for w in (False, True))
    # Premise: both know that two positions pay, only one knows drafting is not free.
    assert plan_depth(inputs, whole).draft_budget == 2 * MAX_NUM_REQS
    assert plan_depth(inputs, split).draft_depth == K
    assert plan_depth(inputs, whole).draft_depth == 2
