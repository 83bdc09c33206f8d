# SPDX-License-Identifier: Apache-2.0
"""Where trimming starts to pay."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vllm.v1.worker.gpu.spec_decode.dspark.knee import (
    best_budget,
    find_knee,
    knee_from_costs,
    knee_from_curve,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts

# local-inference-lab/vllm PR #107
LISTED_CURVE = (
    (6, 200.0),
    (12, 80.0),
    (24, 67.71),
    (48, 58.52),
    (96, 51.29),
    (192, 40.33),
    (384, 23.72),
)
# Timing says nothing here: machines that run tests are shared.
NO_DEADLINE = settings(deadline=None)
PRIOR = np.array([0.8, 0.6, 0.4, 0.2])


def drops_of(points):
    rates = np.minimum.accumulate([rate for _, rate in points])
    return 1.0 - rates[1:] / rates[:-1]


def test_knee_is_the_largest_drop_of_the_upper_half_only():
    # Premise: without the upper-half rule another interval would win.
    assert np.argmax(drops_of(LISTED_CURVE)) == 0
    knee = find_knee(LISTED_CURVE, 5)
    assert (knee.knee_tokens, knee.num_reqs, knee.draft_tokens) == (192, 32, 160)
    assert knee.relative_drop == pytest.approx(1 - 23.72 / 40.33)


def test_drop_inside_the_upper_half_wins_over_the_last_one():
    points = [(8, 100.0), (16, 99.0), (32, 98.0), (64, 50.0), (128, 49.0)]
    assert find_knee(points, 7).knee_tokens == 32


def test_equal_drops_take_the_smaller_load():
    points = [(8, 64.0), (16, 64.0), (32, 64.0), (64, 32.0), (128, 16.0)]
    assert find_knee(points, 7).knee_tokens == 32


def test_flat_curve_has_its_knee_at_the_last_point():
    knee = find_knee([(8, 10.0), (16, 10.0), (32, 10.0)], 7)
    assert (knee.knee_tokens, knee.relative_drop) == (32, 0.0)


def test_rate_that_rises_with_load_is_noise_not_a_drop():
    points = [(8, 10.0), (16, 10.0), (32, 5.0), (64, 9.0), (128, 4.9)]
    assert find_knee(points, 7).knee_tokens == 16 * 4
    assert find_knee(points, 7).relative_drop == pytest.approx(0.02)


def test_knee_needs_two_points():
    with pytest.raises(ValueError, match="at least 2 curve points"):
        find_knee([(8, 10.0)], 7)


def test_curve_of_whole_steps_has_its_knee_by_shape():
    assert knee_from_curve(LISTED_CURVE, 5, max_num_reqs=64) == 32
    # Beyond the engine's largest batch, and flat: capacity never acts.
    assert knee_from_curve(LISTED_CURVE, 5, max_num_reqs=16) == 17
    flat = [(8, 10.0), (16, 10.0), (32, 10.0)]
    assert knee_from_curve(flat, 7, max_num_reqs=64) == 65
    # Fewer tokens than one request's: from one request on.
    assert knee_from_curve([(1, 9.0), (2, 1.0)], 7, max_num_reqs=64) == 1


def test_overhead_can_move_the_knee_of_a_curve():
    points = [(8, 2000.0), (16, 1000.0), (32, 900.0), (64, 400.0), (128, 190.0)]
    # 1.1 to 2.5 ms is the largest drop of the upper half; with 10 ms of overhead
    # the step from 2.5 to 5.3 ms is.
    assert knee_from_curve(points, 7, max_num_reqs=64) == 4
    assert knee_from_curve(points, 7, max_num_reqs=64, overhead_ms=10.0) == 8


def make_costs(
    per_token_ms, *, depths=(0, 1, 2, 4), max_num_reqs=16, draft_ms=0.0, free_tokens=0
):
    reqs = np.arange(max_num_reqs + 1)

    def verify(tokens):
        return 10.0 + per_token_ms * np.maximum(tokens - free_tokens, 0)

    return StepCosts(
        {d: draft_ms * d * reqs for d in depths},
        {d: verify(reqs * (d + 1)) for d in depths},
        verify(np.arange(max_num_reqs * 5 + 1)),
    )


def test_flat_costs_have_no_knee():
    assert knee_from_costs(make_costs(0.0), 4, PRIOR, 0.01) == 17


def test_costs_that_rise_beyond_a_load_have_their_knee_beyond_it():
    costs = make_costs(1.0, free_tokens=40)
    # Up to 8 requests all 40 tokens are free, so verify-all is the best plan.
    knee = knee_from_costs(costs, 4, PRIOR, 0.01)
    assert 8 < knee <= costs.max_num_reqs


def brute_force_best_rate(costs, num_reqs, prior):
    best = 0.0
    for depth in costs.depths:
        slots = sorted(
            (p for p in prior[:depth] for _ in range(num_reqs)), reverse=True
        )
        for budget in range(len(slots) + 1):
            verify = (
                costs.verify_uniform_ms[depth][num_reqs]
                if budget == len(slots)
                else costs.decode_varlen_ms(num_reqs)[budget]
            )
            step_ms = costs.draft_ms[depth][num_reqs] + verify + costs.overhead_ms
            best = max(best, (num_reqs + sum(slots[:budget])) / step_ms)
    return best


@NO_DEADLINE
@given(
    st.floats(0.0, 2.0),
    st.floats(0.0, 0.3),
    st.integers(0, 60),
    st.sampled_from([0.0, 0.01, 0.2]),
)
def test_knee_is_the_first_load_from_which_some_plan_wins(
    per_token_ms, draft_ms, free_tokens, margin
):
    costs = make_costs(
        per_token_ms, draft_ms=draft_ms, free_tokens=free_tokens, max_num_reqs=9
    )

    def gains(num_reqs):
        fixed = num_reqs * (1 + PRIOR.sum()) / costs.uniform_step_ms(4, num_reqs)
        # Two orders of summation: a gain within rounding of the margin is open.
        return brute_force_best_rate(costs, num_reqs, PRIOR) / fixed / (1 + margin) - 1

    found = [gains(r) for r in range(1, 10)]
    assume(all(abs(gain) > 1e-12 for gain in found))
    expected = 10
    for r in reversed(range(1, 10)):
        if all(gain > 0 for gain in found[r - 1 : r - 1 + r // 4 + 3]):
            expected = r
    assert knee_from_costs(costs, 4, PRIOR, margin) == expected


def test_one_size_that_noise_favours_is_no_knee():
    # One step of the staircase, which the uniform table takes a batch early.
    stairs = np.where(np.arange(81) <= 20, 10.0, 10.4)
    full = stairs[np.arange(17) * 5]
    full[4] = 10.4
    costs = StepCosts({4: np.zeros(17)}, {4: full}, stairs)
    rate = 1 + PRIOR.sum()
    gaining = [
        r
        for r in range(1, 17)
        if brute_force_best_rate(costs, r, PRIOR) > 1.01 * r * rate / full[r]
    ]
    assert gaining == [4], "premise"
    assert knee_from_costs(costs, 4, PRIOR, 0.01) == 17


def test_margin_delays_the_knee():
    costs = make_costs(0.2, free_tokens=20)
    knees = [knee_from_costs(costs, 4, PRIOR, m) for m in (0.0, 0.2, 10.0)]
    assert knees == sorted(knees)
    assert knees[0] < knees[1] and knees[2] == 17


def test_a_shallower_depth_alone_can_make_the_knee():
    # Verifying is flat, so trimming gains nothing; drafting less does.
    costs = make_costs(0.0, draft_ms=1.0)
    assert knee_from_costs(costs, 4, PRIOR, 0.01) <= 16
    only_full = make_costs(0.0, draft_ms=1.0, depths=(4,))
    assert knee_from_costs(only_full, 4, PRIOR, 0.01) == 17


def test_full_depth_must_be_profiled():
    with pytest.raises(ValueError, match="num_speculative_tokens 5"):
        knee_from_costs(make_costs(0.0), 5, np.ones(5), 0.01)


def test_all_drafts_of_a_depth_are_priced_as_the_uniform_graph():
    costs = StepCosts({2: np.zeros(3)}, {2: [1.0, 1.0, 1.0]}, np.full(7, 50.0))
    assert best_budget(costs, 2, 2, np.arange(2.0, 7.0)) == (4, 6.0)
    # One draft fewer allowed: the uniform graph cannot be used.
    assert best_budget(costs, 2, 2, np.arange(2.0, 6.0)) == (3, 5.0 / 50.0)


def test_budget_never_leaves_the_varlen_table():
    costs = StepCosts({2: np.zeros(3)}, {2: [1.0, 1.0, 1.0]}, np.full(5, 50.0))
    assert best_budget(costs, 2, 2, np.arange(2.0, 7.0)) == (2, 4.0 / 50.0)


def test_equal_rates_take_the_larger_budget():
    costs = StepCosts({2: np.zeros(3)}, {2: [1.0, 1.0, 50.0]}, np.full(7, 50.0))
    # Only the first draft survives, so budgets 1..4 tie.
    assert best_budget(costs, 2, 2, np.array([2.0, 3.0, 3.0, 3.0, 3.0]))[0] == 4


def test_context_moves_the_knee_to_larger_batches():
    # Attention costs the same whatever is verified, so trimming gains less.
    attention = np.arange(17) * 1e-3
    costs = make_costs(0.2)
    costs = dataclasses.replace(
        costs, verify_context_ms=dict.fromkeys(costs.depths, attention)
    )
    knees = [knee_from_costs(costs, 4, PRIOR, 0.01, c) for c in (0.0, 1e3, 1e6)]
    assert knees[0] < knees[-1]
    assert knees == sorted(knees)


def test_context_is_part_of_every_budget_of_a_depth():
    context = {2: [0.0, 0.0, 0.5]}
    costs = StepCosts(
        {2: np.zeros(3)},
        {2: [1.0, 1.0, 1.0]},
        np.full(7, 50.0),
        verify_context_ms=context,
        draft_context_ms=context,
    )
    assert best_budget(costs, 2, 2, np.arange(2.0, 7.0), 9.0) == (4, 6.0 / 10.0)
    assert best_budget(costs, 2, 2, np.arange(2.0, 6.0), 10.0) == (3, 5.0 / 60.0)
