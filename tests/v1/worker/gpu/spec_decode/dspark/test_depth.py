# SPDX-License-Identifier: Apache-2.0
"""The depth controller: follows load at once and noise slowly, never gets stuck."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.worker.gpu.spec_decode.dspark.depth import (
    PROBE_INTERVAL,
    DepthController,
)

NO_DEADLINE = settings(deadline=None)
DEPTHS = (0, 1, 2, 3, 5, 7)
K = DEPTHS[-1]
LOAD = 40  # decode requests
WINDOW = 4


def make_controller(depths=DEPTHS, *, window=WINDOW):
    return DepthController(depths, window=window)


def fallen(depth=0, **options):
    """Return a controller that load has brought down to ``depth``."""
    controller = make_controller(**options)
    assert controller.update(depth, LOAD) == depth
    return controller


CASES = st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True).flatmap(
    lambda depths: st.tuples(
        st.just(tuple(sorted(depths))),
        st.integers(1, 12),
        st.lists(st.tuples(st.sampled_from(depths), st.integers(0, 60)), max_size=200),
    )
)


@NO_DEADLINE
@given(CASES)
def test_depth_is_always_an_enabled_one(case):
    depths, window, steps = case
    controller = make_controller(depths, window=window)
    usable = set(depths)
    for wish, num_reqs in steps:
        assert controller.update(wish, num_reqs) in usable
        assert controller.depth in usable


@pytest.mark.parametrize("wish, expected", [(0, 2), (2, 2), (3, 3), (6, 5), (9, 7)])
def test_clamp_takes_the_deepest_usable_depth_below(wish, expected):
    assert make_controller((2, 3, 5, 7)).clamp(wish) == expected


def test_falls_by_the_full_amount_once_a_whole_window_asked_for_less():
    controller = make_controller()
    controller.update(K, LOAD)
    for _ in range(WINDOW - 1):
        assert controller.update(2, LOAD) == K
    assert controller.update(1, LOAD) == 2, "the most that the window asked for"


def test_one_wish_for_k_in_the_window_is_enough_to_stay():
    controller = make_controller()
    controller.update(K, LOAD)
    for step in range(10 * WINDOW):
        wish = K if step % WINDOW == 0 else 1
        assert controller.update(wish, LOAD) == K


def test_falls_at_once_when_the_load_rose():
    controller = make_controller()
    controller.update(K, LOAD)
    assert controller.update(2, LOAD) == K, "premise: the wish alone is not enough"
    assert controller.update(2, int(LOAD * 1.25)) == 2


def test_churn_is_not_a_new_load():
    controller = make_controller()
    controller.update(K, LOAD)
    assert controller.update(2, int(LOAD * 1.1)) == K


def test_rises_one_depth_at_a_time_and_at_most_once_a_window():
    controller = fallen(0)
    outputs = [controller.update(K, LOAD) for _ in range(WINDOW * len(DEPTHS))]
    changes = [i for i in range(1, len(outputs)) if outputs[i] != outputs[i - 1]]
    assert outputs[-1] == K
    assert [outputs[i] for i in changes] == list(DEPTHS[1:])
    assert all(b - a >= WINDOW for a, b in zip(changes, changes[1:], strict=False))


def test_one_wish_for_less_in_the_window_keeps_it_from_rising():
    controller = fallen(2)
    for step in range(PROBE_INTERVAL - 1):
        wish = 2 if step % WINDOW == 0 else K
        assert controller.update(wish, LOAD) == 2


@NO_DEADLINE
@given(
    before=st.lists(st.sampled_from(DEPTHS), max_size=60),
    wish=st.sampled_from(DEPTHS),
    window=st.integers(1, 12),
)
def test_constant_wish_settles_and_only_probes_leave_it(before, wish, window):
    controller = make_controller(window=window)
    for depth in before:
        controller.update(depth, LOAD)
    # A window to forget, then one a step of the way up.
    settled = window * (len(DEPTHS) + 1)
    for _ in range(settled):
        controller.update(wish, LOAD)
    outputs = [controller.update(wish, LOAD) for _ in range(5 * PROBE_INTERVAL)]
    assert controller.depth == wish
    others = [i for i, depth in enumerate(outputs) if depth != wish]
    if wish == K:
        assert others == []
        return
    deeper = DEPTHS[DEPTHS.index(wish) + 1]
    assert {outputs[i] for i in others} == {deeper}
    # A probe lasts one step and comes back at its interval.
    assert {b - a for a, b in zip(others, others[1:], strict=False)} == {PROBE_INTERVAL}


@NO_DEADLINE
@given(
    wishes=st.lists(st.sampled_from(DEPTHS), min_size=1, max_size=150),
    window=st.integers(1, 12),
)
def test_at_constant_load_the_depth_changes_at_most_once_a_window(wishes, window):
    controller = make_controller(window=window)
    controller.update(wishes[0], LOAD)
    changes, last = [], controller.depth
    for step, wish in enumerate(wishes):
        controller.update(wish, LOAD)
        if controller.depth != last:
            changes.append(step)
            last = controller.depth
    assert all(b - a >= window for a, b in zip(changes, changes[1:], strict=False))


@NO_DEADLINE
@given(
    depths=st.sampled_from([(0, 7), (1, 3, 7), DEPTHS]),
    window=st.integers(1, 12),
    floor=st.integers(1, 60),
)
def test_recovers_k_within_a_window_a_depth_after_load_fell(depths, window, floor):
    controller = make_controller(depths, window=window)
    for _ in range(floor):
        controller.update(depths[0], LOAD)
    assert controller.depth == depths[0], "premise: at the floor"
    # A gentle fall of the load, which resets nothing.
    for _ in range(window * len(depths)):
        controller.update(K, int(LOAD * 0.8))
    assert controller.depth == K


@pytest.mark.parametrize("num_reqs", [0, int(LOAD * 0.75), 1])
def test_idle_and_a_much_smaller_batch_reset_to_k(num_reqs):
    controller = fallen(0)
    assert controller.update(K, num_reqs) == K


def test_slightly_smaller_batch_does_not_reset():
    assert fallen(0).update(K, int(LOAD * 0.8)) == 0


def test_reset_lets_the_first_wish_act_at_once():
    controller = fallen(0)
    assert controller.update(3, LOAD // 2) == 3
    controller.reset()
    assert controller.depth == K


def test_idle_step_does_not_fall():
    assert make_controller().update(0, 0) == K


@NO_DEADLINE
@given(window=st.integers(1, 12), luck=st.integers(1, len(DEPTHS) - 2))
def test_bad_luck_cannot_pin_the_depth(window, luck):
    """A planner that believes only what it saw, after a run of bad luck.

    Positions beyond the floor look hopeless until they are drafted once more.
    """
    controller = make_controller(window=window)
    hopeful = [True] * luck + [False] * (len(DEPTHS) - luck)
    steps = 0
    while controller.depth != K or steps == 0:
        wish = DEPTHS[max(i for i, good in enumerate(hopeful) if good)]
        drafted = controller.update(wish, LOAD)
        hopeful[DEPTHS.index(drafted)] = True
        steps += 1
        assert steps <= (PROBE_INTERVAL + window + 1) * len(DEPTHS)
    assert steps > PROBE_INTERVAL, "premise: it was pinned"


@NO_DEADLINE
@given(
    st.lists(st.tuples(st.sampled_from(DEPTHS), st.integers(0, 9)), max_size=40),
    st.integers(1, 12),
)
def test_held_steps_count_like_updates_whose_wish_is_granted(steps, window):
    """Probes aside: ``depth`` leaves them out."""
    held, asked = make_controller(window=window), make_controller(window=window)
    for controller in (held, asked):
        controller.update(K, LOAD)
    for wish, num_held in steps:
        held.hold(num_held)
        for _ in range(num_held):
            asked.update(asked.depth, LOAD)
        held.update(wish, LOAD)
        asked.update(wish, LOAD)
        assert held.depth == asked.depth
        assert list(held._wishes) == list(asked._wishes)


def test_a_probe_that_falls_due_while_held_comes_with_the_next_update():
    controller = fallen(2)
    controller.hold(PROBE_INTERVAL + 3)
    assert controller.depth == 2
    assert controller.update(2, LOAD) == 3
    assert controller.update(2, LOAD) == 2
