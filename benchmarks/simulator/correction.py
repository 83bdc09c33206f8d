# SPDX-License-Identifier: Apache-2.0
"""Cost tables corrected by the step times of a served sweep.

A profile times each shape for a moment; a served load keeps the GPU busy for
seconds, at lower clocks. The ratio of served to profiled step time, by target
tokens, carries one to the other.

Invariants (pinned by tests/benchmarks/simulator/test_correction.py):
  * Served steps that took what the tables say leave them as they are.
  * Between measured token counts the ratio is interpolated; beyond, held.
  * One noisy token count does not move the curve (a running median of three).
"""

from collections import defaultdict
from collections.abc import Iterable
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


def step_ratios(costs: StepCosts, served: Iterable[ServedStep]) -> dict[int, float]:
    """Return served / profiled step time by target tokens (median of equals).

    Steps at depths or loads that the tables do not hold are passed over.
    """
    found: defaultdict[int, list[float]] = defaultdict(list)
    for step in served:
        depth = step.width - 1
        if depth in costs.depths and step.num_reqs <= costs.max_num_reqs:
            profiled = costs.uniform_step_ms(depth, step.num_reqs)
            found[step.num_reqs * step.width].append(step.ms / profiled)
    return {tokens: float(np.median(r)) for tokens, r in sorted(found.items())}


def correct_costs(costs: StepCosts, served: Iterable[ServedStep]) -> StepCosts:
    """Scale every table by the ratio at its number of target tokens.

    Raises:
        ValueError: No served step fits the tables.
    """
    ratios = step_ratios(costs, served)
    if not ratios:
        raise ValueError(
            "no served step time fits the cost tables' depths and loads; record the "
            "sweep with fixed arms of those depths"
        )
    tokens = np.log2(list(ratios))
    padded = np.pad(list(ratios.values()), 1, mode="edge")
    values = np.median(np.lib.stride_tricks.sliding_window_view(padded, 3), axis=1)

    def ratio(sizes: np.ndarray) -> np.ndarray:
        return np.interp(np.log2(np.maximum(sizes, 1)), tokens, values)

    reqs = np.arange(costs.max_num_reqs + 1)
    all_tokens = np.arange(costs.max_num_tokens + 1)
    return StepCosts(
        {d: t * ratio(reqs * (d + 1)) for d, t in costs.draft_ms.items()},
        {d: t * ratio(reqs * (d + 1)) for d, t in costs.verify_uniform_ms.items()},
        costs.verify_varlen_ms * ratio(all_tokens),
        overhead_ms=costs.overhead_ms,
        whole_step=costs.whole_step,
    )
