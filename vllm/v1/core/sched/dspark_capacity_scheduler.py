# SPDX-License-Identifier: Apache-2.0
"""Schedulers that know how deep to draft and how many drafts were really verified.

The worker reports both with each step's output: the depth it wants from the next
scheduled step on (rank 0's wish, so that every rank drafts alike), and the drafts
that the target judged. Upstream counts every scheduled draft as judged; a draft that
capacity trimmed was not, so counting it as rejected would deflate every acceptance
figure.
"""

import sys
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.dspark_capacity_metrics import CapacitySpecDecodingStats
from vllm.v1.spec_decode.dspark_capacity_report import (
    REPORT_ATTRIBUTE,
    CapacityReport,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.spec_decode.metrics import SpecDecodingStats


def trimmed_drafts(
    scheduled: dict[str, list[int]],
    req_ids: list[str],
    report: CapacityReport,
    invalid: dict[str, int] | None,
) -> dict[str, int]:
    """Return, per request, the scheduled drafts that were not judged.

    Args:
        scheduled: Scheduled draft tokens by request.
        req_ids: Requests in the order of the report.
        report: The worker's report of the round.
        invalid: Drafts that the grammar had ruled out already, by request.

    Returns:
        Drafts to leave out of the acceptance figures: those ruled out by the
        grammar and those beyond the capacity, each counted once.
    """
    excluded = dict(invalid or {})
    if report.verified_drafts is None:
        return excluded
    for req_id, verified in zip(req_ids, report.verified_drafts, strict=True):
        num_scheduled = len(scheduled.get(req_id, ()))
        excluded[req_id] = max(excluded.get(req_id, 0), num_scheduled - verified)
    return excluded


# A wish holds for loads that differ from its own by at most this fraction.
SAME_LOAD = 0.125


def depth_lookup(
    depth_of_load: tuple[int, ...], next_depth: int | None, num_reqs: int
) -> list[int] | None:
    """Return the draft depth by number of scheduled requests.

    Args:
        depth_of_load: Depth to begin with at each load; empty where depth is fixed.
        next_depth: The worker's latest wish, None without one.
        num_reqs: Decode requests that the wish was made for.

    Returns:
        Shape [max_num_reqs + 1]; None where every entry would be K.
    """
    if not depth_of_load:
        return None
    table = list(depth_of_load)
    full_depth = table[0]
    if next_depth is not None:
        for n, depth in enumerate(table):
            near = abs(n - num_reqs) <= SAME_LOAD * num_reqs
            if depth != full_depth and near:
                table[n] = next_depth
        if num_reqs < len(table):
            table[num_reqs] = next_depth
    return table


class _CapacityScheduling:
    """Mixin over a scheduler: draft depth, truthful counts and capacity figures.

    Lifecycle per step: ``schedule`` at the depth last reported, then
    ``update_from_output`` with the worker's next report.
    """

    _report: CapacityReport | None = None
    _depth_of_load: tuple[int, ...] = ()
    # What ``_lookup`` was built from, and the smallest load that it takes off K.
    _wish: tuple[int | None, int] = (None, 0)
    _lookup: list[int] | None = None
    _first_shallow_load: int = sys.maxsize

    def schedule(self, *args: Any, **kwargs: Any) -> "SchedulerOutput":
        """Schedule one step; its drafts are as deep as capacity wants at its load."""
        # Upstream's table of depth by number of scheduled requests. None, its off
        # state, also pads new decodes to the width of fixed K, so it stays None
        # where nothing that this step can schedule leaves K.
        load = len(self.running) + len(self.waiting)
        shallow = load >= self._first_shallow_load
        self.dynamic_sd_lookup = self._lookup if shallow else None
        return super().schedule(*args, **kwargs)

    def _take_report(self, report: CapacityReport) -> None:
        """Remember a report; rebuild the table of depths only if it changes one."""
        self._report = report
        wish = report.next_depth, report.num_reqs
        if report.depth_of_load is not None:
            self._depth_of_load = report.depth_of_load
        elif wish == self._wish:
            return
        self._wish = wish
        table = self._lookup = depth_lookup(self._depth_of_load, *wish)
        full_depth = self.num_spec_tokens
        # A load beyond the table has the depth of its last entry.
        self._first_shallow_load = next(
            (load for load, d in enumerate(table or ()) if d != full_depth),
            sys.maxsize,
        )

    def update_from_output(
        self,
        scheduler_output: "SchedulerOutput",
        model_runner_output: "ModelRunnerOutput",
    ) -> Any:
        """Account for one step's output; trimmed drafts are not counted as judged."""
        report = getattr(model_runner_output, REPORT_ATTRIBUTE, None)
        if report is not None:
            self._take_report(report)
            scheduler_output.num_invalid_spec_tokens = trimmed_drafts(
                scheduler_output.scheduled_spec_decode_tokens,
                model_runner_output.req_ids,
                report,
                scheduler_output.num_invalid_spec_tokens,
            )
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: "SpecDecodingStats | None",
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> "SpecDecodingStats | None":
        """Add one request's round to the step's figures."""
        if spec_decoding_stats is None and self.log_stats and num_draft_tokens:
            spec_decoding_stats = CapacitySpecDecodingStats.new(self.num_spec_tokens)
            active = self._report is not None and self._report.active
            spec_decoding_stats.num_active_steps = int(active)
            spec_decoding_stats.num_fixed_steps = int(not active)
            spec_decoding_stats.draft_depth_sum = num_draft_tokens
        stats = super().make_spec_decoding_stats(
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )
        if stats is not None:
            stats.num_drafted_tokens += num_draft_tokens
        return stats


class DSparkCapacityScheduler(_CapacityScheduling, Scheduler):
    """Synchronous scheduler with draft depth and capacity accounting."""


class DSparkCapacityAsyncScheduler(_CapacityScheduling, AsyncScheduler):
    """Asynchronous scheduler with draft depth and capacity accounting."""
