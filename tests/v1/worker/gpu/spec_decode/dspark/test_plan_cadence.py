# SPDX-License-Identifier: Apache-2.0
"""When steps are planned and published, for any sequence of loads and plans."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.worker.gpu.spec_decode.dspark.plan_cadence import (
    CALM_PLANS,
    PERIOD,
    RELOAD,
    Load,
    PlanCadence,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_planner import (
    DEPTH_PLAN_INTERVAL,
    DEPTH_PLAN_RELOAD,
)

WIDTH = 5
STEADY = Load(64, 64, 64 * WIDTH)


def loads(num_reqs=STEADY.num_reqs, *, prefills=0, missing=0):
    """Return a load, with ``missing`` drafts less than everybody's."""
    return Load(num_reqs, num_reqs - prefills, num_reqs * WIDTH - missing)


def step(cadence, load=STEADY, *, is_calm=True, age=0):
    """Do one step; return whether it was planned and whether it is published."""
    planned = not cadence.is_quiet(load)
    if planned:
        cadence.planned(load, is_calm=is_calm, age=age)
    return planned, cadence.publishes


def rested(**options):
    """Return a cadence that has just planned and begins a quiet period."""
    cadence = PlanCadence(**options)
    for _ in range(CALM_PLANS):
        step(cadence)
    return cadence


def test_period_and_tolerance_are_those_of_the_depth_plan():
    assert (PERIOD, RELOAD) == (DEPTH_PLAN_INTERVAL, DEPTH_PLAN_RELOAD)


def test_a_steady_load_is_planned_once_a_period_and_published_twice_before():
    cadence = PlanCadence()
    steps = [step(cadence) for _ in range(CALM_PLANS + 3 * PERIOD)]
    assert steps[: CALM_PLANS - 1] == [(True, True)] * (CALM_PLANS - 1)
    unpublished, published = (False, False), (False, True)
    period = [(True, False), *[unpublished] * (PERIOD - 3), *[published] * 2]
    assert steps[CALM_PLANS - 1 :] == period * 3 + [(True, False)]


def test_switched_off_every_step_is_planned_and_published():
    cadence = PlanCadence(enabled=False)
    assert {step(cadence) for _ in range(5 * PERIOD)} == {(True, True)}


@pytest.mark.parametrize("age", range(PERIOD))
def test_the_first_period_ends_when_the_depth_plan_is_due(age):
    cadence = PlanCadence()
    for i in range(CALM_PLANS):
        step(cadence, age=age if i == CALM_PLANS - 1 else 0)
    steps = [step(cadence) for _ in range(PERIOD)]
    first_plan = [planned for planned, _ in steps].index(True)
    assert first_plan == PERIOD - 1 - age
    began = (True, age >= PERIOD - 2)
    before = [(True, True), began, *steps[:first_plan]]
    # The plan that began the period may be one of the two steps.
    assert all(published for _, published in before[-2:])


@pytest.mark.parametrize(
    "unusual",
    [
        loads(prefills=1),
        loads(missing=1),
        loads(76),
        loads(50),
        Load(64, 64, 64 * (WIDTH + 1)),
    ],
)
@pytest.mark.parametrize("num_quiet", range(PERIOD))
def test_another_load_is_planned_and_published_at_once(unusual, num_quiet):
    cadence = rested()
    for _ in range(num_quiet):
        assert not step(cadence)[0], "premise"
    assert not cadence.is_quiet(unusual)
    assert cadence.num_skipped == num_quiet
    cadence.planned(unusual, is_calm=True)
    assert cadence.publishes
    # And it takes as long as ever to come to rest again.
    steps = [step(cadence) for _ in range(CALM_PLANS)]
    assert steps[:-1] == [(True, True)] * (CALM_PLANS - 1)


@pytest.mark.parametrize("num_reqs", [56, 60, 72])
def test_a_load_within_the_tolerance_stays_quiet(num_reqs):
    cadence = rested()
    assert step(cadence, loads(num_reqs)) == (False, False)


def test_the_tolerance_is_of_the_load_at_the_first_calm_plan():
    """Else a load could creep away step by step."""
    cadence, planned = rested(), []
    for num_reqs in range(64, 90):
        planned.append(step(cadence, loads(num_reqs)) == (True, True))
    assert planned.index(True) == 72 + 1 - 64


def test_a_plan_that_is_not_calm_ends_the_rest():
    cadence = rested()
    for _ in range(PERIOD - 1):
        assert not step(cadence)[0], "premise"
    assert step(cadence, is_calm=False) == (True, True)
    assert step(cadence) == (True, True)


def test_reset_forgets_the_rest():
    cadence = rested()
    cadence.reset()
    assert [step(cadence) for _ in range(CALM_PLANS - 1)] == [(True, True)] * (
        CALM_PLANS - 1
    )


LOADS = st.sampled_from(
    [STEADY] * 12
    + [loads(60), loads(70), loads(80), loads(prefills=2), loads(missing=3)]
)
STEPS = st.lists(
    st.tuples(LOADS, st.sampled_from([True] * 12 + [False]), st.integers(0, 7)),
    max_size=120,
)


@settings(deadline=None)
@given(STEPS)
def test_rules_hold_for_any_sequence_of_loads_and_plans(steps):
    cadence = PlanCadence()
    calm, quiet, published = [], 0, []
    for load, is_calm, age in steps:
        was_due = quiet and load == STEADY
        planned, publishes = step(cadence, load, is_calm=is_calm, age=age)
        if planned:
            width = load.num_tokens / load.num_reqs
            is_calm = is_calm and load.num_decodes == load.num_reqs
            if not is_calm or calm and width != calm[0]:
                calm = []
            if is_calm:
                calm.append(width)
            if was_due and cadence._quiet:
                assert published[-2:] == [True, True]
            assert is_calm or publishes, "a step that may trim is not published"
            quiet = 0
        else:
            quiet += 1
            assert len(calm) >= CALM_PLANS, "rested although plans were not calm"
            assert load.num_tokens / load.num_reqs == calm[0]
            assert load.num_decodes == load.num_reqs
            assert quiet < PERIOD
        published.append(publishes)


@given(STEPS)
def test_equal_inputs_give_equal_steps_on_every_rank(steps):
    ranks = PlanCadence(), PlanCadence()
    for load, is_calm, age in steps:
        first, second = (step(r, load, is_calm=is_calm, age=age) for r in ranks)
        assert first == second
