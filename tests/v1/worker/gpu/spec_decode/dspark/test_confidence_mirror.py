# SPDX-License-Identifier: Apache-2.0
"""The two views of the draft confidences, against a model that uses plain loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.capacity_cases import DEVICE
from vllm.v1.worker.gpu.spec_decode.dspark import confidence_mirror as module
from vllm.v1.worker.gpu.spec_decode.dspark import host_copies
from vllm.v1.worker.gpu.spec_decode.dspark.confidence_mirror import ConfidenceMirror
from vllm.v1.worker.gpu.spec_decode.dspark.survival_history import (
    PRIOR_CONFIDENCE,
    PRIOR_DECAY,
    PRIOR_WEIGHT,
)

S, K = 4, 3  # request slots, logical depth
ALL = list(range(S))
CONFIDENCES = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])
START_PRIOR = [PRIOR_CONFIDENCE ** (k + 1) for k in range(K)]


def make_mirror():
    return ConfidenceMirror(S, K, DEVICE)


def publish(mirror, rows, slots=ALL, depth=K):
    """Publish ``rows`` (or one value for all) for ``slots``, padded as the runner's."""
    probs = torch.full((S + 2, K), -1.0, device=DEVICE)
    probs[: len(slots)] = torch.as_tensor(rows, dtype=torch.float32, device=DEVICE)
    where = torch.as_tensor(slots, dtype=torch.int64, device=DEVICE)
    mirror.publish(probs, where, np.asarray(slots), depth)


def seen(mirror, slots=ALL):
    return mirror.survival_probs(np.asarray(slots))


def test_host_sees_a_round_only_once_the_next_is_published():
    mirror = make_mirror()
    publish(mirror, 0.5)
    mirror.land()
    np.testing.assert_allclose(seen(mirror), [START_PRIOR] * S, rtol=1e-6)
    publish(mirror, 0.25)
    mirror.land()
    # The round in hand is 0.25; what is read is the one before.
    np.testing.assert_allclose(seen(mirror), [[0.5, 0.25, 0.125]] * S)
    assert torch.equal(mirror.probs, torch.full_like(mirror.probs, 0.25))


def test_request_that_a_step_left_out_keeps_its_drafts_unseen():
    mirror = make_mirror()
    publish(mirror, 0.5)
    for value in (0.25, 0.125, 0.75):
        publish(mirror, value, slots=[0, 2])
        mirror.land()
        # Its drafts of the first round are still in hand.
        np.testing.assert_allclose(seen(mirror)[1], START_PRIOR, rtol=1e-6)
    np.testing.assert_allclose(seen(mirror)[0], np.cumprod([0.125] * K))
    publish(mirror, 1.0, slots=[1])
    mirror.land()
    np.testing.assert_allclose(seen(mirror)[1], np.cumprod([0.5] * K))


def test_publishing_alone_shows_the_host_nothing_new():
    mirror = make_mirror()
    for value in (0.5, 0.25):
        publish(mirror, value)
    before = seen(mirror).copy()
    mirror.land()
    assert not np.array_equal(seen(mirror), before), "premise: a round was ready"
    np.testing.assert_allclose(before, [START_PRIOR] * S, rtol=1e-6)


def test_ring_that_is_full_lands_by_itself():
    mirror = make_mirror()
    for value in (0.5, 0.25, 0.75, 1.0, 0.125):
        publish(mirror, value)
    mirror.land()
    np.testing.assert_allclose(seen(mirror)[0], np.cumprod([1.0] * K))


def test_row_that_no_draft_wrote_is_zero_on_both_sides():
    mirror = make_mirror()
    publish(mirror, 0.5, slots=[2])
    publish(mirror, 0.5, slots=[2])
    mirror.land()
    for slot in (0, 1, 3):
        assert not seen(mirror)[slot].any()
        assert not mirror.probs[slot].any()
    assert seen(mirror)[2].all()


def test_reset_slot_is_zero_on_both_sides_while_publishing():
    mirror = make_mirror()
    for _ in range(2):
        publish(mirror, 0.5)
    mirror.land()
    mirror.reset_slot(1, publishing=True)
    assert not mirror.probs[1].any() and not seen(mirror)[1].any()
    assert mirror.probs[0].all() and seen(mirror)[0].all()
    assert mirror.all_fresh(np.asarray(ALL)), "a zero row is known to be zero"


def test_rows_drafted_while_publishing_was_off_are_not_fresh():
    mirror = make_mirror()
    assert not mirror.all_fresh(np.asarray([0]))
    mirror.restart()
    publish(mirror, 0.5, slots=[0, 1])
    assert mirror.all_fresh(np.asarray([0, 1]))
    assert not mirror.all_fresh(np.asarray([0, 2]))
    mirror.restart()
    assert not mirror.all_fresh(np.asarray([0]))
    mirror.reset_slot(3, publishing=False)
    assert not mirror.all_fresh(np.asarray([3]))


def test_drafts_of_a_step_that_was_skipped_are_not_fresh():
    mirror = make_mirror()
    for _ in range(2):
        publish(mirror, 0.5)
    mirror.land()
    before = seen(mirror).copy()
    mirror.skip_step()
    assert not mirror.all_fresh(np.asarray([0]))
    publish(mirror, 0.25, slots=[0, 1])
    assert mirror.all_fresh(np.asarray([0, 1]))
    assert not mirror.all_fresh(np.asarray([0, 2])), "drafted before the gap"
    # What had landed stays, and what was in flight is over: its drafts were judged.
    np.testing.assert_array_equal(seen(mirror), before)
    publish(mirror, 0.25, slots=[0, 1])
    mirror.land()
    np.testing.assert_allclose(seen(mirror)[0], np.cumprod([0.25] * K))


def test_a_gap_needs_no_more_buffers_than_there_are():
    """Two rounds a period, and the last one of the period before."""
    mirror = make_mirror()
    publish(mirror, 0.5)
    for value in (0.25, 0.75, 1.0):
        mirror.land()
        for _ in range(6):
            mirror.skip_step()
        publish(mirror, value)
        assert mirror._free, "publishing would have to wait"
        publish(mirror, value / 2)
    mirror.land()
    np.testing.assert_allclose(seen(mirror)[0], np.cumprod([1.0] * K))


@pytest.mark.parametrize(
    "leave",
    [
        lambda mirror: mirror.reset_slot(1, publishing=True),
        # The same slots are published again at once.
        lambda mirror: mirror.drop_slots([1]),
    ],
    ids=["slot was given away", "request ended"],
)
def test_copy_that_lands_too_late_is_dropped(leave):
    mirror = make_mirror()
    publish(mirror, 0.5)
    leave(mirror)
    publish(mirror, 0.25)
    mirror.land()
    # The new owner has one round, which is in hand; the round before is not its own.
    np.testing.assert_allclose(seen(mirror)[1], START_PRIOR, rtol=1e-6)
    np.testing.assert_allclose(seen(mirror)[0], [0.5, 0.25, 0.125])


def test_a_request_that_ended_holds_back_nobody_else():
    mirror = make_mirror()
    for value in (0.5, 0.25):
        publish(mirror, value)
    mirror.drop_slots([1])
    mirror.land()
    np.testing.assert_allclose(seen(mirror)[0], [0.5, 0.25, 0.125])
    np.testing.assert_allclose(seen(mirror)[1], START_PRIOR, rtol=1e-6)


def test_one_tensor_of_the_drafter_serves_batches_of_any_size():
    mirror, probs = make_mirror(), torch.zeros(S, K, device=DEVICE)
    for value, slots in ((0.5, ALL), (0.25, [2, 0]), (0.75, [1, 2, 3])):
        probs.fill_(value)
        where = torch.as_tensor(slots, dtype=torch.int64, device=DEVICE)
        mirror.publish(probs, where, np.asarray(slots), K)
    assert mirror.probs[:, 0].tolist() == [0.25, 0.75, 0.75, 0.75]


def test_restart_forgets_rows_that_were_held():
    mirror = make_mirror()
    publish(mirror, 0.5)
    publish(mirror, 0.5, slots=[0])
    mirror.land()  # the other slots' rows are held
    mirror.restart()
    prior = mirror.prior.copy()
    publish(mirror, 0.25)
    mirror.land()
    np.testing.assert_array_equal(seen(mirror)[1], prior)


def test_positions_beyond_the_depth_carry_the_prior_not_leftovers():
    mirror = make_mirror()
    publish(mirror, 0.5, depth=K)
    publish(mirror, [[0.5, 0.9, 0.9]] * S, depth=1)
    publish(mirror, 0.5, depth=K)
    mirror.land()
    first, second, third = seen(mirror)[0]
    assert first == 0.5
    # Position 1 learned from one deep round of 0.5; position 0.9 was never drafted.
    learned = (PRIOR_WEIGHT * PRIOR_CONFIDENCE * PRIOR_DECAY + 0.5 * 0.5) / (
        PRIOR_WEIGHT * PRIOR_DECAY + 0.5
    )
    assert second / first == pytest.approx(learned, rel=1e-5)
    assert third / second != pytest.approx(0.9, abs=0.05)


def test_prior_follows_what_landed_and_weighs_by_reach():
    mirror = make_mirror()
    for _ in range(1000):
        publish(mirror, [[0.9, 0.1, 0.0]] * S)
        mirror.land()
    np.testing.assert_allclose(mirror.prior, [0.9, 0.09, 0.0], atol=2e-3)
    # Positions that are never reached keep what was assumed.
    mirror = make_mirror()
    for _ in range(1000):
        publish(mirror, [[0.0, 0.1, 0.1]] * S)
        mirror.land()
    assert mirror._prior.confidence[1] == pytest.approx(PRIOR_CONFIDENCE, abs=1e-3)


def test_nan_counts_as_certain_and_is_reported(monkeypatch):
    warnings = []
    monkeypatch.setattr(
        module.logger, "warning_once", lambda text, *_: warnings.append(text)
    )
    mirror = make_mirror()
    publish(mirror, [[float("nan"), 0.5, 0.5]] + [[0.5] * K] * (S - 1))
    publish(mirror, 0.5)
    mirror.land()
    np.testing.assert_allclose(seen(mirror)[0], [1.0, 0.5, 0.25])
    assert mirror.num_nan_rows == 1
    assert "confidence_head" in warnings[0]


def test_nan_beyond_the_depth_is_nobodys(monkeypatch):
    monkeypatch.setattr(module.logger, "warning_once", pytest.fail)
    mirror = make_mirror()
    publish(mirror, [[0.5, float("nan"), float("nan")]] * S, depth=1)
    publish(mirror, 0.5)
    mirror.land()
    assert np.isfinite(seen(mirror)).all()


@pytest.mark.skipif(DEVICE.type != "cpu", reason="counts placeholders of CUDA events")
def test_landing_waits_on_events_and_never_polls(monkeypatch):
    log = []

    class Event:
        def __init__(self, **options):
            assert options["blocking"], "a waiting host must not spin"

        def record(self):
            log.append(("record", self))

        def synchronize(self):
            log.append(("wait", self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    mirror = make_mirror()
    publish(mirror, 0.5)
    mirror.land()
    ((_, first),) = log
    publish(mirror, 0.5)
    mirror.land()
    assert log[2:] == [("wait", first)]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="replaces CUDA streams")
def test_everything_is_queued_on_the_main_stream(monkeypatch):
    """Order then keeps a later write, the next round's or a zeroed slot's, behind the
    copy. Else ranks would see different rows of the last round, each in its own way.
    """
    for name in ("Stream", "set_stream", "current_stream", "stream"):
        monkeypatch.setattr(
            torch.cuda, name, lambda *_, name=name, **__: pytest.fail(name)
        )
    mirror = make_mirror()
    for value in (0.5, 0.25, 0.75):
        publish(mirror, value)
        mirror.reset_slot(1, publishing=True)
        mirror.land()
    np.testing.assert_allclose(seen(mirror)[0], np.cumprod([0.25] * K))


def test_a_round_that_is_held_outlives_its_buffer():
    mirror = make_mirror()
    publish(mirror, [[0.5] * K] * 2, slots=[0, 1])
    for value in (0.25, 0.125, 0.75, 1.0):
        publish(mirror, [[value] * K] * 2, slots=[2, 3])
        mirror.land()
    publish(mirror, 1.0, slots=[1, 0])
    mirror.land()
    np.testing.assert_allclose(seen(mirror)[:2], [np.cumprod([0.5] * K)] * 2)


def test_a_round_of_other_requests_releases_only_those_it_redrafts():
    """Also right behind rounds of equal requests, which share their bookkeeping."""
    mirror = make_mirror()
    for value in (0.5, 0.25, 0.75):
        publish(mirror, value)
        mirror.land()
    publish(mirror, 1.0, slots=[0])
    mirror.land()
    np.testing.assert_allclose(seen(mirror)[0], np.cumprod([0.75] * K))
    np.testing.assert_allclose(seen(mirror)[1], np.cumprod([0.25] * K))
    publish(mirror, 1.0, slots=[1])
    mirror.land()
    np.testing.assert_allclose(seen(mirror)[1], np.cumprod([0.75] * K))


def test_nothing_is_held_for_requests_that_have_ended():
    """A load that falls must leave no row behind in every slot it no longer uses."""
    mirror = make_mirror()
    publish(mirror, 0.5)
    for num_left in range(S - 1, 0, -1):
        mirror.land()
        mirror.drop_slots([num_left])
        publish(mirror, 0.5, slots=ALL[:num_left])
    for _ in range(2):
        publish(mirror, 0.5, slots=[0])
        mirror.land()
    assert mirror._held == []


def test_the_last_drafts_of_a_request_still_teach_the_prior():
    mirror, other = make_mirror(), make_mirror()
    for one, values in ((mirror, [0.5, 0.25]), (other, [0.5, 0.5])):
        publish(one, [[v] * K for v in values], slots=[0, 1])
        one.drop_slots([1])
        publish(one, 0.5, slots=[0])
        one.land()
    assert mirror.prior[0] < other.prior[0] < START_PRIOR[0]


class Model:
    """The same behaviour in loops over slots and positions, without buffers."""

    def __init__(self):
        self.probs = [[0.0] * K for _ in range(S)]
        self.survival = [[0.0] * K for _ in range(S)]
        self.fresh, self.drafted = [False] * S, [False] * S
        self.skipped = 0
        self.owner = [0] * S
        self.weight = [PRIOR_WEIGHT] * K
        self.total = [PRIOR_WEIGHT * PRIOR_CONFIDENCE] * K
        self.rounds, self.held = [], []
        self.last_round, self.num_rounds = [0] * S, 0

    def prior(self):
        result, product = [], 1.0
        for weight, total in zip(self.weight, self.total, strict=True):
            product *= total / weight
            result.append(product)
        return result

    def publish(self, rows, slots, depth):
        if len(self.rounds) == host_copies._RING_SIZE:
            self.land()
        num_steps = 1 + self.skipped
        if self.skipped:
            self.fresh, self.skipped = [False] * S, 0
        self.num_rounds += 1
        for row, slot in zip(rows, slots, strict=True):
            self.probs[slot], self.fresh[slot] = list(row), True
            self.last_round[slot] = self.num_rounds
            if not self.drafted[slot]:
                self.survival[slot], self.drafted[slot] = self.prior(), True
        drafts = [(row, s, self.owner[s]) for row, s in zip(rows, slots, strict=True)]
        self.rounds.append([self.num_rounds, drafts, len(drafts) / num_steps, depth])

    def land(self):
        while len(self.rounds) > 1:
            self.held.append(self.rounds.pop(0))
        for held in self.held:
            number, drafts, size, depth = held
            waiting = [
                (row, slot, owner)
                for row, slot, owner in drafts
                if self.owner[slot] == owner and self.last_round[slot] == number
            ]
            self.take([d for d in drafts if d not in waiting], size, depth)
            held[1] = waiting

    def take(self, drafts, size, depth):
        # Beyond the depth stands the prior as it was before these rows.
        beyond = [t / w for w, t in zip(self.weight, self.total, strict=True)]
        decay = PRIOR_DECAY ** (len(drafts) / size)
        sums = [[0.0, 0.0] for _ in range(K)]
        for row, slot, owner in drafts:
            product, survival = 1.0, []
            for k in range(K):
                confidence = row[k] if k < depth else beyond[k]
                if k < depth:
                    sums[k][0] += product
                    sums[k][1] += product * confidence
                product *= confidence
                survival.append(product)
            if self.owner[slot] == owner:
                self.survival[slot] = survival
        for k in range(depth):
            self.weight[k] = decay * self.weight[k] + sums[k][0] / size
            self.total[k] = decay * self.total[k] + sums[k][1] / size

    def reset_slot(self, slot, *, publishing):
        self.owner[slot] += 1
        self.drafted[slot], self.fresh[slot] = False, publishing
        self.survival[slot] = [0.0] * K
        if publishing:
            self.probs[slot] = [0.0] * K

    def drop_slots(self, slots):
        for slot in slots:
            self.owner[slot] += 1

    def skip_step(self):
        self.skipped += 1

    def restart(self):
        self.skipped = 0
        self.rounds.clear()
        self.held.clear()
        self.fresh, self.drafted = [False] * S, [True] * S
        self.survival = [self.prior() for _ in range(S)]


ROUNDS = st.lists(st.sampled_from(ALL), min_size=1, unique=True).flatmap(
    lambda slots: st.tuples(
        st.just("publish"),
        st.lists(
            st.lists(CONFIDENCES, min_size=K, max_size=K),
            min_size=len(slots),
            max_size=len(slots),
        ),
        st.just(slots),
        st.integers(1, K),
    )
)
STEPS = st.one_of(
    ROUNDS,
    st.tuples(st.just("land")),
    st.tuples(st.just("skip")),
    st.tuples(st.just("reset"), st.sampled_from(ALL), st.booleans()),
    st.tuples(st.just("drop"), st.lists(st.sampled_from(ALL), unique=True)),
    st.tuples(st.just("restart")),
)


@settings(deadline=None, max_examples=150)
@given(steps=st.lists(STEPS, max_size=25))
def test_any_sequence_of_steps_agrees_with_the_model(steps):
    mirror, model = make_mirror(), Model()
    for kind, *args in steps:
        if kind == "publish":
            publish(mirror, *args)
            model.publish(*args)
        elif kind == "land":
            mirror.land()
            model.land()
        elif kind == "skip":
            mirror.skip_step()
            model.skip_step()
        elif kind == "restart":
            mirror.restart()
            model.restart()
        elif kind == "drop":
            mirror.drop_slots(*args)
            model.drop_slots(*args)
        else:
            mirror.reset_slot(args[0], publishing=args[1])
            model.reset_slot(args[0], publishing=args[1])
        np.testing.assert_allclose(seen(mirror), model.survival, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(mirror.prior, model.prior(), rtol=1e-4)
        np.testing.assert_array_equal(mirror.probs.cpu(), np.float32(model.probs))
        for slot in ALL:
            is_fresh = model.fresh[slot] and not model.skipped
            assert mirror.all_fresh(np.asarray([slot])) == is_fresh


# ---- step times --------------------------------------------------------------


class ClockedEvent:
    """An event that notes a clock which every recording advances by 1 ms."""

    now = 0.0

    def __init__(self, **_):
        self.ms = None

    def record(self, *_):
        ClockedEvent.now += 1.0
        self.ms = ClockedEvent.now

    def wait(self, *_):
        pass

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.ms - self.ms


@pytest.fixture
def timed(monkeypatch):
    """A mirror that reports step times by a clock, and what it reported."""
    monkeypatch.setattr(torch.cuda, "Event", ClockedEvent)
    mirror, times = make_mirror(), []
    mirror.on_step_time = lambda serial, ms: times.append((serial, ms))
    return mirror, times


@pytest.mark.skipif(DEVICE.type != "cpu", reason="replaces CUDA events by a clock")
def test_time_of_a_round_is_from_the_end_of_the_last(timed):
    mirror, times = timed
    for step in range(6):
        mirror.land()
        ClockedEvent.now += step  # what the step takes besides
        publish(mirror, 0.5)
    # Serials 1..6; the first has no predecessor and the last has not landed.
    assert times == [(2, 2.0), (3, 3.0), (4, 4.0)]
    mirror.land()
    assert times[-1] == (5, 5.0)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="replaces CUDA events by a clock")
def test_a_pause_in_publishing_is_no_step(monkeypatch, timed):
    # So many that the last end is not overwritten by then.
    monkeypatch.setattr(host_copies, "_RING_SIZE", 9)
    mirror, times = make_mirror(), timed[1]
    mirror.on_step_time = timed[0].on_step_time
    for _ in range(3):
        mirror.land()
        publish(mirror, 0.5)
    times.clear()
    ClockedEvent.now += 1e6
    mirror.restart()
    for _ in range(4):
        mirror.land()
        publish(mirror, 0.5)
    assert [ms for _, ms in times] == [1.0] * len(times) and times
    assert times[0][0] == 5, "the first round after the pause has no time"


@pytest.mark.skipif(DEVICE.type != "cpu", reason="replaces CUDA events by a clock")
def test_time_over_a_skipped_step_is_no_step_time(timed):
    mirror, times = timed
    for _ in range(4):
        mirror.land()
        for _ in range(6):
            mirror.skip_step()
        ClockedEvent.now += 1e6
        for _ in range(2):
            publish(mirror, 0.5)
    mirror.land()
    # The second of each pair alone; the last has not landed.
    assert times == [(2, 1.0), (4, 1.0), (6, 1.0)]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="replaces CUDA events by a clock")
def test_an_end_whose_event_was_reused_gives_no_time(timed):
    mirror, times = timed
    for _ in range(2):
        mirror.land()
        publish(mirror, 0.5)
    for _ in range(20):
        # Not landed in between: every event comes into use again.
        for _ in range(host_copies._RING_SIZE):
            publish(mirror, 0.5)
        mirror.land()
    assert all(ms == 1.0 for _, ms in times)
    serials = [serial for serial, _ in times]
    assert serials == sorted(set(serials))
