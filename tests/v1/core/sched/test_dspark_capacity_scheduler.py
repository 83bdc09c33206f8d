# SPDX-License-Identifier: Apache-2.0
"""Truthful draft counts and the draft depth, around upstream's own methods."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.dspark_capacity_scheduler import (
    SAME_LOAD,
    DSparkCapacityAsyncScheduler,
    DSparkCapacityScheduler,
    _CapacityScheduling,
    depth_lookup,
    trimmed_drafts,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.dspark_capacity_metrics import CapacitySpecDecodingStats
from vllm.v1.spec_decode.dspark_capacity_report import (
    REPORT_ATTRIBUTE,
    CapacityReport,
)

K, MAX_NUM_REQS = 4, 16
NO_DEADLINE = settings(deadline=None)


class Upstream:
    """Stands in for a scheduler: records what the mixin hands on."""

    make_spec_decoding_stats = Scheduler.make_spec_decoding_stats

    def __init__(self, *, log_stats=True):
        self.num_spec_tokens, self.log_stats = K, log_stats
        self.dynamic_sd_lookup = "untouched"
        self.running, self.waiting = [], []

    def schedule(self, *args, **kwargs):
        return self.dynamic_sd_lookup

    def update_from_output(self, scheduler_output, model_runner_output):
        """Account for the drafts as upstream does, one request after the other."""
        stats = None
        for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            stats = self.make_spec_decoding_stats(
                stats,
                num_draft_tokens=len(drafts),
                num_accepted_tokens=model_runner_output.accepted[req_id],
                num_invalid_spec_tokens=scheduler_output.num_invalid_spec_tokens,
                request_id=req_id,
            )
        return stats


class CapacityScheduler(_CapacityScheduling, Upstream):
    pass


def verify(drafts, accepted, report, *, invalid=None, scheduler=None):
    """Account for one step; returns the figures and the scheduler's output."""
    output = SimpleNamespace(
        scheduled_spec_decode_tokens={r: [0] * n for r, n in drafts.items()},
        num_invalid_spec_tokens=invalid,
    )
    result = SimpleNamespace(req_ids=list(drafts), accepted=accepted)
    if report is not None:
        setattr(result, REPORT_ATTRIBUTE, report)
    scheduler = scheduler or CapacityScheduler()
    return scheduler.update_from_output(output, result), output


def test_classes_put_the_mixin_before_upstreams_schedulers():
    for cls, base in (
        (DSparkCapacityScheduler, Scheduler),
        (DSparkCapacityAsyncScheduler, AsyncScheduler),
    ):
        order = cls.__mro__
        assert order.index(_CapacityScheduling) < order.index(base)
        assert cls.schedule is _CapacityScheduling.schedule


def test_trimmed_drafts_are_not_counted_as_rejected():
    stats, _ = verify({"a": K, "b": K}, {"a": 2, "b": 0}, CapacityReport(True, [3, 0]))
    assert stats.num_draft_tokens == 3, "judged"
    assert stats.num_accepted_tokens == 2
    assert stats.num_drafted_tokens == 2 * K, "in hand"
    assert stats.num_draft_tokens_per_pos == [1, 1, 1, 0]


def test_without_trimming_every_scheduled_draft_was_judged():
    stats, _ = verify({"a": K, "b": 2}, {"a": 1, "b": 2}, CapacityReport(True))
    assert stats.num_draft_tokens == stats.num_drafted_tokens == K + 2


@pytest.mark.parametrize(
    "verified, invalid, judged", [(3, 1, 3), (1, 2, 1), (4, 3, 1), (0, 4, 0)]
)
def test_overlap_of_trimmed_and_invalid_counts_once(verified, invalid, judged):
    # Both cut the tail: the draft that the grammar ruled out may be trimmed as well.
    stats, _ = verify(
        {"a": K}, {"a": 0}, CapacityReport(True, [verified]), invalid={"a": invalid}
    )
    assert stats.num_draft_tokens == judged


@NO_DEADLINE
@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.tuples(st.integers(0, K), st.integers(0, K), st.integers(0, K)),
    )
)
def test_excluded_drafts_are_the_longer_of_both_tails(requests):
    scheduled = {r: [0] * max(n, v, i) for r, (n, v, i) in requests.items()}
    invalid = {r: i for r, (_, _, i) in requests.items() if i}
    report = CapacityReport(True, [v for _, v, _ in requests.values()])
    before = dict(invalid)
    excluded = trimmed_drafts(scheduled, list(requests), report, invalid)
    for req_id, (_, verified, num_invalid) in requests.items():
        tail = len(scheduled[req_id]) - verified
        assert excluded.get(req_id, 0) == max(tail, num_invalid)
    assert invalid == before, "the caller's mapping is not changed"


def test_request_without_drafts_excludes_nothing():
    report = CapacityReport(True, [0, 2])
    assert trimmed_drafts({"b": [0] * 3}, ["a", "b"], report, None) == {"a": 0, "b": 1}


def test_report_for_other_requests_is_an_error():
    with pytest.raises(ValueError, match="shorter"):
        trimmed_drafts({"a": [0]}, ["a", "b"], CapacityReport(True, [1]), None)


def test_step_of_stock_worker_is_left_alone():
    stats, output = verify({"a": K}, {"a": 1}, None, invalid={"a": 1})
    assert output.num_invalid_spec_tokens == {"a": 1}
    assert stats.num_draft_tokens == K - 1


def test_step_counts_once_by_whether_capacity_was_active():
    active, _ = verify({"a": K, "b": K}, {"a": 0, "b": 0}, CapacityReport(True))
    fixed, _ = verify({"a": K, "b": K}, {"a": 0, "b": 0}, CapacityReport(False))
    assert isinstance(active, CapacitySpecDecodingStats)
    assert (active.num_active_steps, active.num_fixed_steps) == (1, 0)
    assert (fixed.num_active_steps, fixed.num_fixed_steps) == (0, 1)


def test_draft_depth_is_added_once_a_step():
    stats, _ = verify({"a": 3, "b": 3}, {"a": 0, "b": 0}, CapacityReport(True))
    assert stats.draft_depth_sum == 3
    assert stats.num_drafts == 2


def test_step_without_drafts_has_no_figures():
    assert verify({"a": 0}, {"a": 0}, CapacityReport(True))[0] is None


def test_switched_off_statistics_stay_off():
    scheduler = CapacityScheduler(log_stats=False)
    report = CapacityReport(True, [1])
    assert verify({"a": K}, {"a": 1}, report, scheduler=scheduler)[0] is None


BELOW = (K,) * 8 + (2,) * (MAX_NUM_REQS + 1 - 8)  # the knee is at 8 requests


def schedule(report, *, running=0, waiting=0):
    scheduler = CapacityScheduler()
    if report is not None:
        scheduler._take_report(report)
    scheduler.running, scheduler.waiting = [0] * running, [0] * waiting
    return scheduler.schedule()


def test_before_any_report_the_depth_is_upstreams_off_state():
    assert schedule(None, running=9) is None


def test_fixed_depth_is_upstreams_off_state():
    assert schedule(CapacityReport(True), running=9) is None


def test_wish_of_the_report_sets_the_depth_of_its_load():
    report = CapacityReport(True, None, 1, 10, BELOW)
    assert schedule(report, running=10)[10] == 1


def test_wish_for_k_is_obeyed_at_its_load():
    report = CapacityReport(True, None, K, 10, BELOW)
    assert schedule(report, running=16)[10] == K


def test_step_that_can_only_draft_k_is_exactly_fixed_k():
    # None, not a table of K: upstream also pads new decodes only then.
    report = CapacityReport(False, None, None, 0, BELOW)
    assert schedule(report, running=4, waiting=3) is None
    assert schedule(report, running=4, waiting=4) is not None


def test_load_beyond_the_table_is_its_last_entry():
    report = CapacityReport(False, None, None, 0, BELOW)
    assert schedule(report, running=MAX_NUM_REQS, waiting=100)[-1] == 2


def test_report_replaces_the_one_before():
    scheduler = CapacityScheduler()
    scheduler.running = [0] * 10
    for depth in (1, 3):
        report = CapacityReport(True, None, depth, 10, BELOW)
        verify({"a": K}, {"a": 0}, report, scheduler=scheduler)
        assert scheduler.schedule()[10] == depth
    verify({"a": K}, {"a": 0}, None, scheduler=scheduler)
    assert scheduler.schedule()[10] == 3, "a step without a report changes nothing"


def test_table_without_news_stays_and_is_not_built_again(monkeypatch):
    scheduler = CapacityScheduler()
    scheduler.running = [0] * 10
    scheduler._take_report(CapacityReport(True, None, 1, 10, BELOW))
    table = scheduler._lookup
    scheduler._take_report(CapacityReport(True, None, 1, 10))
    assert scheduler._lookup is table
    scheduler._take_report(CapacityReport(True, None, 3, 10))
    assert scheduler.schedule()[10] == 3, "the table came with an older report"
    scheduler._take_report(CapacityReport(False, None, None, 0, ()))
    assert scheduler.schedule() is None, "an empty table is news"


@NO_DEADLINE
@given(
    knee=st.integers(1, MAX_NUM_REQS),
    wish=st.sampled_from([None, 0, 1, 3, K]),
    num_reqs=st.integers(0, MAX_NUM_REQS),
)
def test_wish_reaches_similar_loads_above_the_knee_only(knee, wish, num_reqs):
    base = (K,) * knee + (2,) * (MAX_NUM_REQS + 1 - knee)
    table = depth_lookup(base, wish, num_reqs)
    assert len(table) == MAX_NUM_REQS + 1
    for load, (before, after) in enumerate(zip(base, table, strict=True)):
        similar = abs(load - num_reqs) <= SAME_LOAD * num_reqs
        if wish is not None and (load == num_reqs or (load >= knee and similar)):
            assert after == wish
        else:
            assert after == before


def test_no_depths_by_load_mean_no_table():
    assert depth_lookup((), 2, 3) is None
