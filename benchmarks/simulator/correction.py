# SPDX-License-Identifier: Apache-2.0
"""Cost tables corrected by the step times of a served sweep.

A profile times each shape for a moment; a served load keeps the GPU busy for
seconds, at lower clocks. The ratio of served to profiled step time carries one to
the other: of a depth by its requests where two loads of it were served, else of all
depths by target tokens (as many tokens of few requests and of many differ by up to
8 % in it).

Invariants (pinned by tests/benchmarks/simulator/test_correction.py):
  * Served steps that took what the tables say leave them as they are.
  * Between measured sizes the ratio is interpolated; beyond, held.
  * One noisy size does not move the curve (a running median of three).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class ServedStep:
    """Median time of a full batch's steps.

    Attributes:
        num_reqs: Requests.
        width: Target tokens per request, depth + 1.
        ms: Milliseconds between two step starts.
    """

    num_reqs: int
    width: int
    ms: float


def _median_ratios(
    costs: StepCosts, served: Iterable[ServedStep], size_of: Callable[[ServedStep], int]
) -> dict[int, float]:
    """Return served / profiled step time by size (median of equals), ascending.

    Steps at depths or loads that the tables do not hold are passed over.
    """
    found: defaultdict[int, list[float]] = defaultdict(list)
    for step in served:
        depth = step.width - 1
        if depth in costs.depths and step.num_reqs <= costs.max_num_reqs:
            profiled = costs.uniform_step_ms(depth, step.num_reqs)
            found[size_of(step)].append(step.ms / profiled)
    return {size: float(np.median(r)) for size, r in sorted(found.items())}


def step_ratios(costs: StepCosts, served: Iterable[ServedStep]) -> dict[int, float]:
    """Return served / profiled step time by target tokens, of all depths."""
    return _median_ratios(costs, served, lambda s: s.num_reqs * s.width)


def _interpolated(ratios: dict[int, float], sizes: np.ndarray) -> np.ndarray:
    """Return the smoothed ratio at every size; by the logarithm of the size."""
    padded = np.pad(list(ratios.values()), 1, mode="edge")
    values = np.median(np.lib.stride_tricks.sliding_window_view(padded, 3), axis=1)
    return np.interp(np.log2(np.maximum(sizes, 1)), np.log2(list(ratios)), values)


def correct_costs(costs: StepCosts, served: Iterable[ServedStep]) -> StepCosts:
    """Scale every table by the ratio at its size.

    Raises:
        ValueError: No served step fits the tables.
    """
    served = list(served)
    by_tokens = step_ratios(costs, served)
    if not by_tokens:
        raise ValueError(
            "no served step time fits the cost tables' depths and loads; record the "
            "sweep with fixed arms of those depths"
        )
    reqs = np.arange(costs.max_num_reqs + 1)

    def ratio(depth: int) -> np.ndarray:
        own = [s for s in served if s.width == depth + 1]
        by_reqs = _median_ratios(costs, own, lambda s: s.num_reqs)
        if len(by_reqs) > 1:
            return _interpolated(by_reqs, reqs)
        return _interpolated(by_tokens, reqs * (depth + 1))

    ratios = {depth: ratio(depth) for depth in costs.depths}
    tokens = np.arange(costs.max_num_tokens + 1)
    return StepCosts(
        {d: t * ratios[d] for d, t in costs.draft_ms.items()},
        {d: t * ratios[d] for d, t in costs.verify_uniform_ms.items()},
        costs.verify_varlen_ms * _interpolated(by_tokens, tokens),
        overhead_ms=costs.overhead_ms,
        whole_step=costs.whole_step,
    )
