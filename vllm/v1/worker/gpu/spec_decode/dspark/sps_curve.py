# SPDX-License-Identifier: Apache-2.0
"""Cost curves: from profiled samples or a user's curve to cost tables.

Standard library and NumPy only, besides the equally pure :mod:`.step_costs` and
:mod:`.knee`, whose names are exported from here as well.

Invariants (pinned by tests/.../dspark/test_sps_curve.py):
  * Up to the largest captured size a size costs what its padded graph costs;
    beyond it the cost is continuous, and the jump between the two is kept.
  * One stalled repeat, or one stalled size, does not move a table.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from vllm.v1.worker.gpu.spec_decode.dspark.knee import (
    KneeResult,
    find_knee,
    knee_from_costs,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import (
    REPROFILE,
    Points,
    StepCosts,
    check_sps_points,
)

__all__ = [
    "CostSample",
    "GraphSizes",
    "KneeResult",
    "StepCosts",
    "check_sps_points",
    "costs_from_samples",
    "costs_from_sps_curve",
    "find_knee",
    "interpolate",
    "knee_from_costs",
    "median_points",
]

# A repeat this many times above its group was interrupted (compilation, another
# process), not slow: repeats of one graph replay differ by a few per cent.
STALL_FACTOR = 3.0

SampleKind = Literal["draft", "uniform", "varlen"]


@dataclass(frozen=True, slots=True)
class CostSample:
    """One timed pass.

    Attributes:
        kind: ``draft`` (drafter pass), ``uniform`` (target, every request
            ``depth + 1`` tokens wide) or ``varlen`` (target, any widths). Target
            times include logits and sampling.
        depth: Draft depth of the pass; ignored for ``varlen``.
        num_reqs: Requests in the pass.
        num_tokens: Target tokens in the pass; ignored for ``draft``.
        ms: Device time, milliseconds.
        full_cudagraph: The pass replayed a FULL graph (its size is captured).
        context_tokens: Context of every request.
    """

    kind: SampleKind
    depth: int
    num_reqs: int
    num_tokens: int
    ms: float
    full_cudagraph: bool = True
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Captured FULL graph sizes, where more are captured than were profiled.

    Attributes:
        varlen_tokens: Token counts of varlen target graphs.
        uniform_reqs: Per depth, request counts of uniform target graphs.
        draft_reqs: Per depth, request counts of drafter graphs.
    """

    varlen_tokens: Sequence[int] = ()
    uniform_reqs: Mapping[int, Sequence[int]] = field(default_factory=dict)
    draft_reqs: Mapping[int, Sequence[int]] = field(default_factory=dict)


def median_points(samples: Iterable[tuple[int, float]]) -> tuple[Points, int]:
    """Reduce ``(size, ms)`` repeats to one point per size, without the stalled ones.

    Two rules, both with ``STALL_FACTOR``: a repeat far above the lower median of its
    size is dropped; a size far above any larger size was stalled in every repeat (a
    larger batch is never that much cheaper) and is dropped whole, since the running
    maximum would spread it over all larger sizes.

    Returns:
        Ascending points, and the number of samples dropped.
    """
    grouped: defaultdict[int, list[float]] = defaultdict(list)
    for size, ms in samples:
        if not (math.isfinite(ms) and ms >= 0.0):
            raise ValueError(f"sample of size {size} took {ms} ms; {REPROFILE}.")
        grouped[size].append(ms)
    points: Points = []
    num_stalled = 0
    cheapest_larger = math.inf
    for size in sorted(grouped, reverse=True):
        repeats = sorted(grouped[size])
        # The lower median: of two repeats, the stalled one must not set the scale.
        limit = STALL_FACTOR * repeats[(len(repeats) - 1) // 2]
        kept = [ms for ms in repeats if ms <= limit]
        ms = float(np.median(kept))
        num_stalled += len(repeats) - len(kept)
        if ms > STALL_FACTOR * cheapest_larger:
            num_stalled += len(kept)
            continue
        cheapest_larger = min(cheapest_larger, ms)
        points.append((size, ms))
    return points[::-1], num_stalled


def interpolate(sizes: np.ndarray, points: Points) -> np.ndarray:
    """Linear between points, flat before the first, last slope beyond the end."""
    xs, ys = np.asarray(points, dtype=np.float64).T
    ys = np.maximum.accumulate(ys)
    values = np.interp(sizes, xs, ys)
    if len(xs) > 1:
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
        values += slope * np.maximum(sizes - xs[-1], 0.0)
    return values


def _staircase(
    max_size: int, graph: Points, eager: Points, captured: Sequence[int]
) -> np.ndarray:
    """Cost by size: padded to the next captured size, continuous above the last."""
    sizes = np.arange(max_size + 1, dtype=np.float64)
    captured = sorted({*captured, *(x for x, _ in graph)}) if graph else ()
    steps = np.array(captured, dtype=np.float64)
    limit = steps[-1] if len(steps) else -1.0
    eager = [(x, y) for x, y in eager if x > limit]
    # Leaving the graphs is a real jump: the first eager point is not blended with
    # the last graph. Without eager points the graphs' slope is all there is.
    values = interpolate(sizes, eager or graph)
    if graph:
        inside = sizes <= limit
        padded = steps[np.searchsorted(steps, sizes[inside])]
        values[inside] = interpolate(padded, graph)
    return values


def costs_from_samples(
    samples: Sequence[CostSample],
    *,
    depths: Sequence[int],
    max_num_reqs: int,
    max_num_tokens: int,
    graph_sizes: GraphSizes | None = None,
    overhead_ms: float = 0.0,
) -> StepCosts:
    """Build cost tables from profiled samples.

    Depth 0 needs no samples of its own: without them its drafter pass is free and
    its verify is the varlen table at one token per request.

    Args:
        samples: Timed passes without context, any order, repeats welcome.
        depths: Enabled draft depths.
        max_num_reqs: Largest request count to cover.
        max_num_tokens: Largest target token count to cover.
        graph_sizes: Captured sizes beyond those that were profiled as graphs.
        overhead_ms: Fixed cost of every step.

    Raises:
        ValueError: a curve that is needed has no samples, or a sample is not a time.
    """
    sizes = graph_sizes or GraphSizes()
    num_stalled = 0

    def curve(kind: SampleKind, depth: int, captured: Sequence[int]) -> np.ndarray:
        nonlocal num_stalled
        varlen = kind == "varlen"
        points = []
        for in_graph in (True, False):
            reduced, stalled = median_points(
                (s.num_tokens if varlen else s.num_reqs, s.ms)
                for s in samples
                if s.kind == kind
                and (varlen or s.depth == depth)
                and s.full_cudagraph == in_graph
            )
            points.append(reduced)
            num_stalled += stalled
        if not any(points):
            raise ValueError(
                f"no {kind!r} cost samples{'' if varlen else f' for depth {depth}'} "
                f"among {len(samples)}; profile it, or take the depth out of "
                "dspark_draft_depths, or give dspark_sps_curve as a list."
            )
        return _staircase(max_num_tokens if varlen else max_num_reqs, *points, captured)

    profiled = {(s.kind, s.depth) for s in samples}
    varlen_ms = curve("varlen", 0, sizes.varlen_tokens)
    draft_ms, uniform_ms = {}, {}
    for depth in sorted(set(depths)):
        if depth == 0 and ("draft", 0) not in profiled:
            draft_ms[0] = np.zeros(max_num_reqs + 1)
        else:
            draft_ms[depth] = curve("draft", depth, sizes.draft_reqs.get(depth, ()))
        if depth == 0 and ("uniform", 0) not in profiled:
            uniform_ms[0] = varlen_ms[
                np.minimum(np.arange(max_num_reqs + 1), max_num_tokens)
            ]
        else:
            reqs = sizes.uniform_reqs.get(depth, ())
            uniform_ms[depth] = curve("uniform", depth, reqs)
    return StepCosts(
        draft_ms,
        uniform_ms,
        varlen_ms,
        overhead_ms=overhead_ms,
        num_stalled_samples=num_stalled,
    )


def costs_from_sps_curve(
    points: Sequence[Sequence[float]],
    *,
    depths: Sequence[int],
    max_num_reqs: int,
    max_num_tokens: int,
    overhead_ms: float = 0.0,
) -> StepCosts:
    """Build cost tables from ``[[tokens, steps_per_s], ...]`` of whole steps.

    Linear in milliseconds between points, flat before the first, the slope of the
    last two beyond the end. The curve cannot separate drafting, so draft costs are
    0 and ``whole_step`` is set.

    Raises:
        ValueError: see :func:`check_sps_points` and :class:`StepCosts`.
    """
    curve = check_sps_points(points)
    reqs = np.arange(max_num_reqs + 1, dtype=np.float64)
    ordered = sorted(set(depths))
    return StepCosts(
        {d: np.zeros(max_num_reqs + 1) for d in ordered},
        {d: interpolate(reqs * (d + 1), curve) for d in ordered},
        interpolate(np.arange(max_num_tokens + 1, dtype=np.float64), curve),
        overhead_ms=overhead_ms,
        whole_step=True,
    )
