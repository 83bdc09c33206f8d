# SPDX-License-Identifier: Apache-2.0
"""From timings or a user's curve to cost tables."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.worker.gpu.spec_decode.dspark.sps_curve import (
    CostSample,
    GraphSizes,
    costs_from_samples,
    costs_from_sps_curve,
    median_points,
)

# Timing says nothing here: machines that run tests are shared.
NO_DEADLINE = settings(deadline=None)


def varlen(tokens, ms, *, graph=True):
    return CostSample("varlen", 0, tokens, tokens, ms, graph)


def uniform(depth, reqs, ms, *, graph=True):
    return CostSample("uniform", depth, reqs, reqs * (depth + 1), ms, graph)


def draft(depth, reqs, ms, *, graph=True):
    return CostSample("draft", depth, reqs, 0, ms, graph)


SAMPLES = [
    *(varlen(t, ms) for t, ms in ((4, 1.0), (8, 2.0), (16, 3.0))),
    *(varlen(t, ms, graph=False) for t, ms in ((24, 10.0), (32, 12.0))),
    *(uniform(2, r, ms) for r, ms in ((1, 1.0), (2, 1.5), (4, 2.5))),
    *(draft(2, r, ms) for r, ms in ((1, 0.5), (2, 0.6), (4, 0.9))),
]


def build(samples=SAMPLES, **changes):
    options = {"depths": (2,), "max_num_reqs": 6, "max_num_tokens": 40}
    return costs_from_samples(samples, **{**options, **changes})


def test_captured_sizes_cost_what_the_next_graph_costs():
    verify_ms = build().verify_varlen_ms
    assert list(verify_ms[:17]) == [1.0] * 5 + [2.0] * 4 + [3.0] * 8


def test_leaving_the_graphs_is_a_jump_that_is_not_blended():
    verify_ms = build().verify_varlen_ms
    assert verify_ms[16] == 3.0
    # Between the last graph (16) and the first eager size (24): the eager cost.
    assert set(verify_ms[17:25]) == {10.0}


def test_eager_costs_are_continuous_and_keep_their_slope():
    verify_ms = build().verify_varlen_ms
    np.testing.assert_allclose(np.diff(verify_ms[24:]), 0.25)


def test_eager_sample_at_a_captured_size_is_not_what_is_served():
    costs = build([*SAMPLES, varlen(8, 9.0, graph=False)])
    assert costs.verify_varlen_ms[8] == 2.0
    assert costs.verify_varlen_ms[17] == 10.0


def test_captured_sizes_that_were_not_profiled_are_steps_too():
    sizes = GraphSizes(varlen_tokens=(4, 8, 12, 16))
    verify_ms = build(graph_sizes=sizes).verify_varlen_ms
    assert list(verify_ms[9:17]) == [2.5] * 4 + [3.0] * 4


def test_request_tables_step_at_their_own_graphs():
    costs = build(
        graph_sizes=GraphSizes(uniform_reqs={2: (1, 2, 3, 4)}, draft_reqs={2: (4,)})
    )
    assert list(costs.verify_uniform_ms[2][:5]) == [1.0, 1.0, 1.5, 2.0, 2.5]
    assert list(costs.draft_ms[2][:5]) == [0.5, 0.5, 0.6, 0.9, 0.9]


def test_without_eager_samples_the_graphs_slope_goes_on():
    np.testing.assert_allclose(build().verify_uniform_ms[2][5:], [3.0, 3.5])


def test_costs_never_fall_with_size():
    costs = build([*SAMPLES, varlen(12, 1.9)])
    assert costs.verify_varlen_ms[12] == 2.0


def test_depth_zero_defaults_to_plain_decoding():
    costs = build(depths=(0, 2))
    assert not costs.draft_ms[0].any()
    np.testing.assert_array_equal(
        costs.verify_uniform_ms[0], costs.verify_varlen_ms[:7]
    )


def test_depth_zero_takes_its_own_samples():
    costs = build([*SAMPLES, draft(0, 6, 0.2), uniform(0, 6, 0.9)], depths=(0, 2))
    assert set(costs.draft_ms[0]) == {0.2}
    assert set(costs.verify_uniform_ms[0]) == {0.9}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("draft", "no 'draft' cost samples for depth 2"),
        ("uniform", "no 'uniform' cost samples for depth 2"),
        ("varlen", "no 'varlen' cost samples among"),
    ],
)
def test_missing_curve_is_named(kind, message):
    with pytest.raises(ValueError, match=message):
        build([s for s in SAMPLES if s.kind != kind])


@pytest.mark.parametrize("ms", [math.nan, math.inf, -1.0])
def test_sample_that_is_no_time_is_refused(ms):
    with pytest.raises(ValueError, match="sample of size 8"):
        build([*SAMPLES, varlen(8, ms)])


def test_stalled_repeat_does_not_move_the_median():
    points, num_stalled = median_points([(8, 1.0), (8, 500.0), (8, 1.2), (8, 600.0)])
    assert points == [(8, 1.1)]
    assert num_stalled == 2


def test_stalled_repeat_of_two_is_the_slow_one():
    assert median_points([(8, 500.0), (8, 1.0)]) == ([(8, 1.0)], 1)


def test_size_that_stalled_every_time_does_not_spread_upwards():
    points, num_stalled = median_points([(8, 600.0), (8, 601.0), (16, 2.0), (4, 1.0)])
    assert points == [(4, 1.0), (16, 2.0)]
    assert num_stalled == 2


def test_stalls_are_counted_in_the_tables():
    assert build().num_stalled_samples == 0
    assert build([*SAMPLES, varlen(8, 2.0), varlen(8, 99.0)]).num_stalled_samples == 1


@NO_DEADLINE
@given(st.lists(st.floats(0.1, 0.29), min_size=1, max_size=9))
def test_ordinary_noise_is_the_plain_median(repeats):
    points, num_stalled = median_points((8, ms) for ms in repeats)
    # Premise: no repeat is more than 3 times another.
    assert max(repeats) <= 3.0 * min(repeats)
    assert points == [(8, float(np.median(repeats)))]
    assert num_stalled == 0


CURVE = [[8, 200.0], [16, 100.0], [32, 50.0]]


def build_from_curve(points=CURVE, **changes):
    options = {"depths": (0, 3), "max_num_reqs": 4, "max_num_tokens": 48}
    return costs_from_sps_curve(points, **{**options, **changes})


def test_user_curve_is_linear_in_milliseconds_between_points():
    costs = build_from_curve()
    assert costs.verify_varlen_ms[12] == pytest.approx((5.0 + 10.0) / 2)


def test_user_curve_is_flat_before_its_first_point():
    assert set(build_from_curve().verify_varlen_ms[:9]) == {5.0}


def test_user_curve_keeps_its_last_slope():
    slope = (20.0 - 10.0) / 16
    assert build_from_curve().verify_varlen_ms[48] == pytest.approx(20.0 + 16 * slope)


def test_user_curve_of_one_point_is_flat():
    assert set(build_from_curve([[8, 200.0]]).verify_varlen_ms) == {5.0}


def test_user_curve_prices_whole_steps():
    costs = build_from_curve(overhead_ms=1.5)
    assert costs.whole_step and not build().whole_step
    assert not any(costs.draft_ms[d].any() for d in costs.depths)
    # 4 requests of 1 + 3 tokens are 16 target tokens.
    assert costs.verify_uniform_ms[3][4] == costs.verify_varlen_ms[16] == 10.0
    assert costs.uniform_step_ms(3, 4) == 11.5
