# SPDX-License-Identifier: Apache-2.0
"""Host time of what capacity adds to a step, part by part.

The parts are wrapped on their owners, so that the engine is the one that serves. Time
waiting for the device would be in it; there is none to wait for. Left out: the check
of ``plan.active`` and wrapping the output (a microsecond), and the clamp of draft ids
at a depth below K (one launch).

Invariants (pinned by tests/benchmarks/sweep/test_host_times.py):
  * Every call of a part is counted once, in the step that it belongs to.
  * Steps at or above the knee and steps below it are told apart.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

# Parts of the runner and of its capacity manager; none contains another.
RUNNER_PARTS = ("_start_report_copy", "_calibrate")
CAPACITY_PARTS = (
    "plan_step",
    "compact_batch",
    "reallocate_drafts",
    "invalid_drafts",
    "finish_step",
)
# Steps before the latest that are kept.
_MAX_STEPS = 100_000


class HostTimes:
    """Per step: the runner's ``execute_model`` must call ``begin_step`` first.

    Args:
        runner: The capacity runner of this rank.
    """

    def __init__(self, runner: Any):
        self._runner = runner
        self._steps: list[tuple[bool, dict[str, float]]] = []
        self._parts: dict[str, float] | None = None
        for owner, names in ((runner, RUNNER_PARTS), (runner.capacity, CAPACITY_PARTS)):
            for name in names:
                if (part := getattr(owner, name, None)) is not None:
                    setattr(owner, name, self._timed(name, part))

    def _timed(self, name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(part)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return part(*args, **kwargs)
            finally:
                if self._parts is not None:
                    took = 1e6 * (time.perf_counter() - start)
                    self._parts[name] = self._parts.get(name, 0.0) + took

        return timed

    def begin_step(self) -> None:
        """File the step before under what it was, and begin the next."""
        self._file()
        self._parts = {}

    def _file(self) -> None:
        if self._parts and len(self._steps) < _MAX_STEPS:
            self._steps.append((self._runner._step_plan.active, self._parts))
        self._parts = None

    def take(self) -> dict[str, dict[str, Any]]:
        """Return and forget the steps since the last call, microseconds.

        Returns:
            ``active`` (at or above the knee) and ``fixed`` (below), where there were
            such steps: how many, median and 99th percentile of the sum over the
            parts, and the median of each part where it ran.
        """
        self._file()
        steps, self._steps = self._steps, []
        groups = {"active": True, "fixed": False}
        return {
            name: _summary([parts for active, parts in steps if active == wanted])
            for name, wanted in groups.items()
            if any(active == wanted for active, _ in steps)
        }


def _summary(steps: list[dict[str, float]]) -> dict[str, Any]:
    sums = sorted(sum(parts.values()) for parts in steps)
    names = sorted({name for parts in steps for name in parts})
    return {
        "num_steps": len(steps),
        "p50": statistics.median(sums),
        "p99": sums[int(0.99 * (len(sums) - 1))],
        "parts": {
            name: statistics.median(parts[name] for parts in steps if name in parts)
            for name in names
        },
    }
