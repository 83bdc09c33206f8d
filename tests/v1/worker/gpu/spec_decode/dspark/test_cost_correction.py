# SPDX-License-Identifier: Apache-2.0
"""Measured step times correct the plans, and noise does not move them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.drifting_engine import DriftingEngine
from vllm.v1.worker.gpu.spec_decode.dspark.cost_correction import (
    BOUNDS,
    STALE_STEPS,
    CostCorrection,
)

DEPTHS = (1, 4)
MAX_REQS, MAX_TOKENS = 32, 160
LEARN_STEPS, JUDGED_STEPS = 500, 16
ALLOWED_REGRET = 0.03

DRIFTS = {
    "all": lambda depth, tokens, is_uniform: 2.0,
    "all, halved": lambda depth, tokens, is_uniform: 0.5,
    "uniform graphs": lambda depth, tokens, is_uniform: 2.0 if is_uniform else 1.0,
    "varlen graphs": lambda depth, tokens, is_uniform: 1.0 if is_uniform else 2.0,
    "large batches": lambda depth, tokens, is_uniform: 2.0 if tokens >= 256 else 1.0,
    "small batches": lambda depth, tokens, is_uniform: 2.0 if tokens < 256 else 1.0,
    "deep drafts": lambda depth, tokens, is_uniform: 2.0 if depth >= 3 else 1.0,
    "shallow drafts": lambda depth, tokens, is_uniform: 2.0 if depth <= 3 else 1.0,
}
# Without correction these lose a lot, so that they show what correction does.
HARMFUL = [
    ("uniform graphs", 0.6),
    ("varlen graphs", 0.85),
    ("large batches", 0.75),
    ("small batches", 0.6),
    ("deep drafts", 0.85),
    ("shallow drafts", 0.6),
]


def make(**options):
    return CostCorrection(DEPTHS, MAX_REQS, MAX_TOKENS, **options)


def observe(correction, ratio, *, times=1, depth=4, tokens=80, is_uniform=False):
    for _ in range(times):
        correction.observe(
            depth,
            tokens,
            is_uniform=is_uniform,
            tabled_ms=10.0,
            measured_ms=10.0 * ratio,
        )


def all_factors(correction):
    rows = [*correction.uniform.values(), *correction.varlen.values()]
    return np.concatenate(rows)


def test_without_observations_every_factor_is_one():
    assert (all_factors(make()) == 1.0).all()


@pytest.mark.parametrize("confidence", [0.6, 0.85])
@pytest.mark.parametrize("name", DRIFTS)
def test_regret_falls_under_3_per_cent_within_500_steps(name, confidence):
    engine = DriftingEngine(confidence, noise=0.03)
    engine.run(100)
    engine.drift = DRIFTS[name]
    engine.run(LEARN_STEPS)
    assert engine.regret(JUDGED_STEPS) < ALLOWED_REGRET


@pytest.mark.parametrize(("name", "confidence"), HARMFUL)
def test_without_correction_such_a_drift_costs_far_more(name, confidence):
    engine = DriftingEngine(confidence, corrects=False)
    engine.run(100)
    engine.drift = DRIFTS[name]
    engine.run(50)
    assert engine.regret(JUDGED_STEPS) > 2 * ALLOWED_REGRET


def test_noise_and_stalls_do_not_move_the_plan():
    disturbed = DriftingEngine(0.75, noise=0.04, stall_rate=0.01)
    quiet = DriftingEngine(0.75)
    assert disturbed.stall_rate * 600 > 3, "premise: several stalls"
    disturbed.run(600)
    quiet.run(600)
    np.testing.assert_array_equal(all_factors(disturbed.correction), 1.0)
    assert abs(disturbed.correction.common_ratio - 1.0) < 0.03
    # The same survivals from here on: the same plans.
    disturbed._random = np.random.default_rng(1)
    quiet._random = np.random.default_rng(1)
    disturbed.corrects = quiet.corrects = False
    assert disturbed.run(20) == quiet.run(20)


def test_one_stalled_step_changes_no_factor():
    correction = make()
    observe(correction, 1.0, times=5)
    observe(correction, 50.0)
    observe(correction, 1.0, times=5)
    assert (all_factors(correction) == 1.0).all()
    observe(correction, 50.0, times=3)
    assert all_factors(correction).max() == BOUNDS[1], "premise: three are a regime"


def test_a_regime_is_believed_after_three_visits_and_given_up_after_three():
    correction = make()
    observe(correction, 1.6, times=3)
    assert correction.varlen[4][80] == pytest.approx(1.6)
    observe(correction, 1.0, times=3)
    assert correction.varlen[4][80] == pytest.approx(1.0)


def test_small_differences_are_approached_slowly_and_shown_beyond_the_dead_band():
    correction = make()
    observe(correction, 1.1, times=5)
    assert correction.varlen[4][80] == 1.0
    observe(correction, 1.1, times=60)
    assert correction.varlen[4][80] == pytest.approx(1.1, rel=0.03)
    observe(correction, 1.12, times=200)
    assert correction.varlen[4][80] == pytest.approx(1.1, rel=0.03)


def test_a_bucket_is_a_depth_a_layout_and_a_range_of_tokens():
    correction = make()
    observe(correction, 1.5, times=3, depth=4, tokens=80)
    changed = np.flatnonzero(correction.varlen[4] != 1.0)
    assert 80 in changed and changed[-1] / changed[0] < 2**0.25
    assert (np.diff(changed) == 1).all()
    assert (correction.varlen[1] == 1.0).all()
    assert all((row == 1.0).all() for row in correction.uniform.values())
    observe(correction, 1.5, times=3, depth=1, tokens=40, is_uniform=True)
    # 20 requests of two tokens.
    assert correction.uniform[1][20] == pytest.approx(1.5)
    assert correction.uniform[1][10] == 1.0 and (correction.varlen[1] == 1.0).all()


def test_an_unvisited_bucket_follows_the_others_down_but_never_up():
    up, down = make(), make()
    observe(up, 2.0, times=300)
    observe(down, 0.5, times=300)
    assert up.varlen[4][80] == 2.0 and up.varlen[1][80] == 1.0
    assert down.varlen[4][80] == 0.5
    assert down.varlen[1][80] == pytest.approx(0.5, rel=0.05)


def test_a_visited_bucket_keeps_its_say_until_it_is_stale():
    correction = make()
    observe(correction, 1.0, times=5, depth=1)
    observe(correction, 0.5, times=300)
    assert correction.varlen[1][80] == 1.0
    observe(correction, 0.5, times=STALE_STEPS)
    assert correction.varlen[1][80] == pytest.approx(0.5, rel=0.05)


def test_nonsense_times_are_dropped():
    correction = make()
    for ms in (float("nan"), float("inf"), 0.0, -1.0):
        for _ in range(5):
            correction.observe(4, 80, is_uniform=False, tabled_ms=1.0, measured_ms=ms)
    assert (all_factors(correction) == 1.0).all()


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(DEPTHS),
            st.integers(0, MAX_TOKENS),
            st.booleans(),
            st.floats(1e-3, 1e3),
        ),
        max_size=200,
    )
)
def test_factors_stay_within_bounds_and_equal_steps_give_equal_factors(steps):
    corrections = make(), make()
    for depth, tokens, is_uniform, ratio in steps:
        for correction in corrections:
            observe(
                correction, ratio, depth=depth, tokens=tokens, is_uniform=is_uniform
            )
    factors = all_factors(corrections[0])
    assert factors.min() >= BOUNDS[0] - 1e-12
    assert factors.max() <= BOUNDS[1] + 1e-12
    np.testing.assert_array_equal(factors, all_factors(corrections[1]))
