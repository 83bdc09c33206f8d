# SPDX-License-Identifier: Apache-2.0
"""The budget of a step against a brute-force oracle over all budgets."""

import dataclasses
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
from vllm.v1.worker.gpu.spec_decode.dspark.cost_correction import CostCorrection
from vllm.v1.worker.gpu.spec_decode.dspark.knee import knee_from_costs
from vllm.v1.worker.gpu.spec_decode.dspark.planner import (
    fraction_budget,
    plan_budget,
    plan_depth,
    plan_step,
    threshold_budget,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts


def oracle_rates(inputs, costs, depth):
    """Rate of every budget, capped or not, with plain loops."""
    slots = []
    for row, drafts in zip(inputs.survival_probs, inputs.scheduled_drafts, strict=True):
        slots += [float(row[k]) for k in range(drafts)]
    slots.sort(reverse=True)
    widths = {int(drafts) for drafts in inputs.scheduled_drafts}
    num_reqs = len(inputs.scheduled_drafts)
    # A batch of mixed widths is priced as the deepest.
    width = next(iter(widths)) if len(widths) == 1 else -1
    width = width if width in costs.depths else costs.depths[-1]
    per_token = costs.verify_context_ms[width][num_reqs]
    per_token += costs.draft_context_ms[depth][num_reqs]
    context_ms = per_token * inputs.context_tokens
    rates = []
    for budget in range(len(slots) + 1):
        verify_ms = costs.verify_varlen_ms[inputs.num_non_draft_tokens + budget]
        decode_only = inputs.num_non_draft_tokens == num_reqs
        if decode_only:
            verify_ms = costs.decode_varlen_ms(num_reqs)[budget]
        all_alike = len(widths) == 1 and widths <= set(costs.depths)
        if budget == len(slots) and decode_only and all_alike:
            verify_ms = costs.verify_uniform_ms[widths.pop()][num_reqs]
        step_ms = costs.draft_ms[depth][num_reqs] + verify_ms + costs.overhead_ms
        step_ms += context_ms
        rates.append((inputs.num_sampling_reqs + math.fsum(slots[:budget])) / step_ms)
    return rates


@NO_DEADLINE
@given(SEEDS, st.booleans(), st.sampled_from([np.float32, np.float64]))
def test_budget_is_the_best_of_all_within_the_cap(seed, quantised, dtype):
    rng = np.random.default_rng(seed)
    costs, inputs = (
        random_costs(rng),
        random_inputs(rng, quantised=quantised, dtype=dtype),
    )
    plan = plan_budget(inputs, costs, margin=0.0)
    rates = oracle_rates(inputs, costs, inputs.current_depth)
    allowed = rates[: inputs.max_draft_budget + 1]
    assert 0 <= plan.draft_budget < len(allowed)
    assert plan.expected_tokens / plan.step_ms == pytest.approx(
        max(allowed), rel=RATE_TOLERANCE
    )
    assert rates[plan.draft_budget] == pytest.approx(max(allowed), rel=RATE_TOLERANCE)


@NO_DEADLINE
@given(SEEDS, st.sampled_from([0.0, 0.02, 0.3]))
def test_verify_all_is_left_only_for_more_than_the_margin(seed, margin):
    rng = np.random.default_rng(seed)
    costs, inputs = random_costs(rng), random_inputs(rng)
    inputs = inputs._replace(max_draft_budget=NO_CAP)
    plan = plan_budget(inputs, costs, margin=margin)
    rates = oracle_rates(inputs, costs, inputs.current_depth)
    gain = max(rates) / rates[-1] - 1.0
    if abs(gain - margin) > 1e-9:
        assert plan.verify_all == (gain <= margin)
    assert plan.verify_all == (plan.draft_budget == len(rates) - 1)
    fixed = plan.fixed_expected_tokens / plan.fixed_step_ms
    assert fixed == pytest.approx(rates[-1], rel=RATE_TOLERANCE)


@NO_DEADLINE
@given(SEEDS)
def test_cap_is_hard_and_reported_exactly_when_it_binds(seed):
    rng = np.random.default_rng(seed)
    costs, inputs = random_costs(rng), random_inputs(rng)
    plan = plan_budget(inputs, costs)
    free = plan_budget(inputs._replace(max_draft_budget=NO_CAP), costs)
    assert plan.draft_budget <= inputs.max_draft_budget
    assert plan.capped == (free.draft_budget > inputs.max_draft_budget)
    assert not free.capped


def test_negative_cap_admits_nothing():
    inputs = make_inputs(np.ones((2, K)), max_draft_budget=-5)
    plan = plan_budget(inputs, linear_costs(0.0))
    assert (plan.draft_budget, plan.capped) == (0, True)


@NO_DEADLINE
@given(SEEDS)
def test_flat_costs_verify_everything(seed):
    inputs = random_inputs(np.random.default_rng(seed))
    inputs = inputs._replace(max_draft_budget=NO_CAP)
    assert plan_budget(inputs, linear_costs(0.0), margin=0.0).verify_all


@NO_DEADLINE
@given(SEEDS)
def test_steeper_costs_never_verify_more(seed):
    inputs = random_inputs(np.random.default_rng(seed))
    budgets = [
        plan_budget(inputs, linear_costs(slope), margin=0.0).draft_budget
        for slope in (0.0, 0.5, 1.0, 2.0, 5.0, 50.0)
    ]
    assert budgets == sorted(budgets, reverse=True)


def test_steep_costs_verify_only_what_pays():
    # 2 sampled tokens in 5 + 2 * 1 ms; a draft pays above 2 / 7.
    survival = [[0.9, 0.5, 0.1, 0.0], [0.35, 0.2, 0.0, 0.0]]
    plan = plan_budget(make_inputs(survival), linear_costs(1.0))
    assert plan.draft_budget == 2
    assert plan.expected_tokens == pytest.approx(2 + 0.9 + 0.5)
    assert plan.step_ms == pytest.approx(5 + 2 + 2)


def test_equal_rates_take_the_larger_budget():
    costs = linear_costs(0.0)
    varlen_ms = np.where(np.arange(len(costs.verify_varlen_ms)) <= 6, 5.0, 500.0)
    uniform_ms = {
        d: np.where(np.arange(len(table)) * (d + 1) <= 6, 5.0, 500.0)
        for d, table in costs.verify_uniform_ms.items()
    }
    costs = dataclasses.replace(
        costs, verify_varlen_ms=varlen_ms, verify_uniform_ms=uniform_ms
    )
    # Past position 1 nothing survives, so budgets 2..4 tie (2 + 4 = 6 tokens).
    inputs = make_inputs([[1.0, 0.0, 0.0, 0.0]] * 2, [4, 3])
    assert plan_budget(inputs, costs).draft_budget == 4


def test_uniform_graph_prices_equal_widths_without_prefill_only():
    costs = StepCosts(
        {d: np.zeros(3) for d in DEPTHS},
        {d: np.full(3, 1.0) for d in DEPTHS},
        np.full(60, 7.0),
    )
    survival = np.full((2, K), 0.5)

    def fixed_ms(scheduled, **changes):
        inputs = make_inputs(survival, scheduled, **changes)
        return plan_budget(inputs, costs).fixed_step_ms

    assert fixed_ms([K, K]) == fixed_ms([2, 2]) == fixed_ms([0, 0]) == 1.0
    assert fixed_ms([K, K - 1]) == 7.0
    assert fixed_ms([3, 3]) == 7.0, "no graph of a depth that is not enabled"
    assert fixed_ms([K, K], num_non_draft_tokens=30) == 7.0


def test_slots_beyond_the_scheduled_ones_are_never_counted():
    survival = [[0.5, 0.4, 1.0, 1.0], [0.3, 1.0, 1.0, 1.0]]
    plan = plan_budget(make_inputs(survival, [2, 1]), linear_costs(0.0))
    assert plan.draft_budget == 3
    assert plan.expected_tokens == pytest.approx(2 + 0.5 + 0.4 + 0.3)


@pytest.mark.parametrize("scheduled", [[K, K, K], [K, K, 1]])
def test_nan_row_counts_as_certain_and_is_reported(scheduled):
    rows = [[0.5, 0.2, 0.1, 0.05], [0.4, math.nan, 0.1, 0.0], [0.3, 0.2, 0.1, 0.0]]
    clean = np.array([rows[0], [1.0] * K, rows[2]])
    plan = plan_budget(make_inputs(rows, scheduled), linear_costs(0.7))
    expected = plan_budget(make_inputs(clean, scheduled), linear_costs(0.7))
    assert plan.num_nan_rows == 1
    assert plan._replace(num_nan_rows=0) == expected


def test_nan_that_is_not_scheduled_does_not_count():
    rows = [[math.nan, 0.2, 0.1, 0.0], [0.4, math.nan, 0.1, 0.0]]
    plan = plan_budget(make_inputs(rows, [K, 1]), linear_costs(0.0))
    assert plan.num_nan_rows == 1
    assert plan.expected_tokens == pytest.approx(2 + K + 0.4)


def test_survivals_out_of_range_are_clipped():
    wild = make_inputs([[7.0, 0.5, -2.0, -math.inf], [math.inf, 0.1, 0.0, 0.0]])
    tame = make_inputs([[1.0, 0.5, 0.0, 0.0], [1.0, 0.1, 0.0, 0.0]])
    assert plan_budget(wild, linear_costs(0.7)) == plan_budget(tame, linear_costs(0.7))


@NO_DEADLINE
@given(SEEDS)
def test_inputs_are_left_as_they_were_and_row_order_is_irrelevant(seed):
    rng = np.random.default_rng(seed)
    costs, inputs = random_costs(rng), random_inputs(rng)
    before = inputs.survival_probs.copy()
    plan = plan_step(inputs, costs)
    np.testing.assert_array_equal(inputs.survival_probs, before)
    order = rng.permutation(len(before))
    shuffled = inputs._replace(
        survival_probs=before[order],
        scheduled_drafts=inputs.scheduled_drafts[order],
    )
    assert plan_step(shuffled, costs) == plan


def test_empty_batch_has_an_empty_plan():
    inputs = make_inputs(np.zeros((0, K)))
    plan = plan_step(inputs, linear_costs(1.0, whole_step=True))
    assert (plan.draft_budget, plan.draft_depth, plan.verify_all) == (0, K, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduled_drafts": np.array([K + 1, 0])}, "4.* scheduled drafts"),
        ({"scheduled_drafts": np.array([-1, 0])}, "scheduled drafts"),
        ({"scheduled_drafts": np.array([1])}, "survival_probs has shape"),
        ({"num_non_draft_tokens": 10**4}, "num_target_tokens is 10008"),
        ({"current_depth": 3}, "draft depth 3"),
        ({"depths": (3, K)}, "draft depth 3"),
        ({"depths": (0, 2)}, "current_depth 4 is not among the enabled"),
        ({"next_survival": np.ones(2)}, "next_survival has shape"),
        ({"num_sampling_reqs": 99}, "num_reqs is 99"),
    ],
)
def test_bad_inputs_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        plan_step(make_inputs(np.ones((2, K)), **changes), linear_costs(1.0))


@NO_DEADLINE
@given(SEEDS)
def test_step_plan_is_the_depth_then_the_budget_beside_it(seed):
    rng = np.random.default_rng(seed)
    costs, inputs = random_costs(rng), random_inputs(rng)
    depth = plan_depth(inputs, costs).draft_depth
    assert plan_step(inputs, costs) == plan_budget(inputs, costs, draft_depth=depth)


def test_draft_pass_is_priced_at_the_depth_of_this_step():
    inputs = make_inputs(np.full((2, K), 0.5))
    costs = linear_costs(0.0, draft_ms=1.0)
    shallow, deep = (plan_budget(inputs, costs, draft_depth=d) for d in (1, K))
    assert (deep.step_ms - shallow.step_ms) == pytest.approx(2 * (K - 1))


@NO_DEADLINE
@given(SEEDS, st.sampled_from([0.0, 0.01, 0.1]))
def test_knee_is_where_plans_start_to_differ_from_fixed(seed, margin):
    rng = np.random.default_rng(seed)
    costs = random_costs(rng)
    prior = np.sort(rng.random(K))[::-1]

    def differs(num_reqs):
        inputs = make_inputs(np.tile(prior, (num_reqs, 1)), next_survival=prior)
        depth_gain = plan_depth(inputs, costs, margin=margin).draft_depth != K
        return depth_gain or not plan_budget(inputs, costs, margin=margin).verify_all

    # A knee must gain over a quarter of itself and two sizes more.
    differing = [differs(r) for r in range(1, MAX_NUM_REQS + 1)]
    windows = (
        (r, differing[r - 1 : r + r // 4 + 2]) for r in range(1, MAX_NUM_REQS + 1)
    )
    expected = next((r for r, window in windows if all(window)), MAX_NUM_REQS + 1)
    assert knee_from_costs(costs, K, prior, margin) <= expected


@pytest.mark.parametrize(
    ("num_reqs", "frac", "scheduled", "expected"),
    [
        (10, 0.0, 99, 0),
        (10, 1.0, 99, 40),
        (10, 0.51, 99, 21),
        (10, 0.5, 7, 7),
        (25, 0.07, 99, 7),  # 25 * 4 * 0.07 is 7.000000000000001
        (0, 0.5, 0, 0),
    ],
)
def test_fraction_budget_is_the_ceiling_capped_by_what_is_scheduled(
    num_reqs, frac, scheduled, expected
):
    assert fraction_budget(num_reqs, K, frac, scheduled) == expected


@pytest.mark.parametrize("frac", [-0.1, 1.1, math.nan, math.inf])
def test_bad_fraction_is_named(frac):
    with pytest.raises(ValueError, match="dspark_budget_frac"):
        fraction_budget(4, K, frac, 9)


def test_threshold_counts_scheduled_survivals_that_reach_it():
    survival = np.array([[0.9, 0.5, 0.5, 0.1], [0.5, 0.4, 0.9, 0.9]])
    assert threshold_budget(survival, np.array([3, 2]), 0.5) == 4


def test_threshold_compares_in_the_dtype_of_the_survivals():
    assert float(np.float32(0.7)) < 0.7
    survival = np.array([[0.7]], dtype=np.float32)
    assert threshold_budget(survival, np.array([1]), 0.7) == 1


def test_threshold_admits_unknown_survivals():
    survival = np.array([[math.nan, 0.1]])
    assert threshold_budget(survival, np.array([2]), 0.5) == 1


@pytest.mark.parametrize("threshold", [0.0, -0.1, 1.1, math.nan])
def test_bad_threshold_is_named(threshold):
    with pytest.raises(ValueError, match="dspark_confidence_threshold"):
        threshold_budget(np.ones((1, 1)), np.array([1]), threshold)


# ---- corrected costs ---------------------------------------------------------


def random_correction(rng):
    """Factors as serving could have learned them, unlike each other."""
    correction = CostCorrection(DEPTHS, MAX_NUM_REQS, MAX_NUM_REQS * (K + 1))
    for row in (*correction.uniform.values(), *correction.varlen.values()):
        row[:] = rng.uniform(0.5, 2.0, len(row))
    return correction


@NO_DEADLINE
@given(SEEDS)
def test_corrected_costs_price_every_budget_of_a_decode_batch(seed):
    rng = np.random.default_rng(seed)
    costs, correction = random_costs(rng), random_correction(rng)
    inputs = random_inputs(rng)
    num_reqs = len(inputs.scheduled_drafts)
    inputs = inputs._replace(num_non_draft_tokens=num_reqs)
    depth, width = inputs.current_depth, int(inputs.scheduled_drafts[0])
    rates = oracle_rates(inputs, costs, depth)
    factors = correction.varlen[depth][num_reqs : num_reqs + len(rates)].copy()
    if len(set(inputs.scheduled_drafts)) == 1 and width in costs.depths:
        factors[-1] = correction.uniform[width][num_reqs]
    rates = np.asarray(rates) / factors
    plan = plan_budget(inputs, costs, margin=0.0, correction=correction)
    allowed = rates[: inputs.max_draft_budget + 1]
    assert plan.expected_tokens / plan.step_ms == pytest.approx(
        max(allowed), rel=RATE_TOLERANCE
    )


def test_batch_with_prefill_is_priced_by_the_tables_alone():
    rng = np.random.default_rng(0)
    costs, correction = random_costs(rng), random_correction(rng)
    inputs = make_inputs(np.full((3, K), 0.5), num_non_draft_tokens=3 + 20)
    corrected = plan_budget(inputs, costs, correction=correction)
    assert corrected == plan_budget(inputs, costs)


@NO_DEADLINE
@given(SEEDS, st.floats(0.01, 5.0))
def test_beside_prefill_drafts_pay_by_the_decode_rate(seed, decode_rate):
    rng = np.random.default_rng(seed)
    costs, inputs = random_costs(rng), random_inputs(rng)
    num_reqs = len(inputs.scheduled_drafts)
    inputs = inputs._replace(
        num_non_draft_tokens=num_reqs + int(rng.integers(1, 20)),
        decode_rate=decode_rate,
    )
    rates = oracle_rates(inputs, costs, inputs.current_depth)
    slots = np.sort(
        np.concatenate(
            [
                row[:drafts]
                for row, drafts in zip(
                    inputs.survival_probs, inputs.scheduled_drafts, strict=True
                )
            ]
        )
    )[::-1]
    tokens = inputs.num_sampling_reqs + np.concatenate(([0.0], np.cumsum(slots)))
    gains = tokens - decode_rate * tokens / rates
    plan = plan_budget(inputs, costs)
    allowed = gains[: max(inputs.max_draft_budget, 0) + 1]
    assert gains[plan.draft_budget] == pytest.approx(max(allowed), abs=1e-9)


def test_prefill_beside_them_makes_drafts_no_cheaper():
    """Linear costs: each draft has one price, whatever else the step works on."""
    costs = linear_costs(0.3, base_ms=1.0)
    survival = np.cumprod(np.full((4, K), 0.6), axis=1)
    decode_only = plan_budget(make_inputs(survival), costs, margin=0.0)
    assert 0 < decode_only.draft_budget < 4 * K, "premise"
    rate = decode_only.expected_tokens / decode_only.step_ms
    mixed = make_inputs(survival, num_non_draft_tokens=4 + 20)
    assert plan_budget(mixed, costs).draft_budget > decode_only.draft_budget, "control"
    known = mixed._replace(decode_rate=rate)
    assert plan_budget(known, costs).draft_budget == decode_only.draft_budget
