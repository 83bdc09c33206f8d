# SPDX-License-Identifier: Apache-2.0
"""From a timeline to figures: throughput, latency, recovery after a change, growth.

Every figure is ``name -> (value, unit)``.
"""

import itertools
import statistics

import numpy as np

from benchmarks.sweep.driver import Timeline
from benchmarks.sweep.traffic import Traffic

Figures = dict[str, tuple[float, str]]
# After a change of load, the time in which throughput must have recovered.
RECOVERY_S = 2.0
PERCENTILES = (50, 90, 99)


def throughput(timeline: Timeline, start_s: float, end_s: float) -> float:
    """Return tokens per second of the steps that ended within a window."""
    tokens = sum(n for end, n, _ in timeline.steps if start_s < end <= end_s)
    return tokens / (end_s - start_s) if end_s > start_s else 0.0


def latency(timeline: Timeline) -> Figures:
    """Return percentiles of TTFT, TPOT and E2E over finished requests, ms."""
    done = [r for r in timeline.requests.values() if r.finished]
    samples = {
        "ttft": [r.first_s - r.arrival_s for r in done],
        "tpot": [
            (r.last_s - r.first_s) / (r.num_tokens - 1)
            for r in done
            if r.num_tokens > 1
        ],
        "e2e": [r.last_s - r.arrival_s for r in done],
    }
    return {
        f"{name} p{p}": (1e3 * float(np.percentile(values, p)), "ms")
        for name, values in samples.items()
        if values
        for p in PERCENTILES
    }


def step_gaps_ms(
    timeline: Timeline, start_s: float = 0.0, end_s: float = float("inf")
) -> list[float]:
    """Return the times between ends of consecutive steps within a window, ms."""
    ends = [end for end, *_ in timeline.steps if start_s <= end <= end_s]
    return [1e3 * (b - a) for a, b in itertools.pairwise(ends)]


def outlier(gaps_ms: list[float]) -> float:
    """Return the longest step over the median one; 0 without steps."""
    return max(gaps_ms) / statistics.median(gaps_ms) if gaps_ms else 0.0


def after_changes(timeline: Timeline, traffic: Traffic) -> Figures:
    """Return, for each phase of a step change, how it recovered.

    ``recovery``: throughput of the first ``RECOVERY_S`` over that of the rest of the
    phase. ``outlier``: longest over median time of a step. The first phase starts
    an idle engine.
    """
    figures: Figures = {}
    for phase, level in enumerate(traffic.levels):
        start, end = phase * traffic.seconds, (phase + 1) * traffic.seconds
        steady = throughput(timeline, start + RECOVERY_S, end)
        recovering = throughput(timeline, start, start + RECOVERY_S)
        name = f"phase {phase} (C={level})"
        figures[f"{name} steady"] = (steady, "tok/s")
        ratio = recovering / steady if steady else 0.0
        figures[f"{name} recovery"] = (ratio, "ratio")
        gaps = step_gaps_ms(timeline, start, end)
        figures[f"{name} outlier"] = (outlier(gaps), "ratio")
    return figures


def churn(
    timeline: Timeline, window: float, memory: list[tuple[float, float, float]]
) -> Figures:
    """Return throughput of the first and last window, and the growth between.

    Args:
        timeline: Of the load.
        window: Seconds after which the traffic repeats its levels.
        memory: ``(time, host MiB, device MiB)`` samples, ascending.
    """
    first = throughput(timeline, 0.0, window)
    begin = max(timeline.end_s // window - 1, 0) * window
    last = throughput(timeline, begin, begin + window)
    figures: Figures = {
        "first window": (first, "tok/s"),
        "last window": (last, "tok/s"),
        "window": (window, "s"),
        "longest step": (max(step_gaps_ms(timeline), default=0.0), "ms"),
        "aborted": (
            float(sum(r.aborted for r in timeline.requests.values())),
            "requests",
        ),
    }
    warm = next((m for m in memory if m[0] >= window), None)
    if warm is not None:
        figures["host growth"] = (memory[-1][1] - warm[1], "MiB")
        figures["device growth"] = (memory[-1][2] - warm[2], "MiB")
    return figures


def figures_of(
    timeline: Timeline,
    traffic: Traffic,
    memory: list[tuple[float, float, float]] | None = None,
) -> Figures:
    """Return all figures of a load; ``throughput`` is always among them."""
    rate = throughput(timeline, timeline.start_s, timeline.end_s)
    figures: Figures = {"throughput": (rate, "tok/s")}
    if traffic.kind == "open":
        figures |= latency(timeline)
    elif traffic.kind == "steady":
        gaps = step_gaps_ms(timeline, timeline.start_s)
        if gaps:
            figures["step p50"] = (statistics.median(gaps), "ms")
            figures["step p99"] = (float(np.percentile(gaps, 99)), "ms")
    elif traffic.kind == "change":
        figures |= after_changes(timeline, traffic)
    else:
        figures |= churn(timeline, traffic.window_s, memory or [])
    return figures
