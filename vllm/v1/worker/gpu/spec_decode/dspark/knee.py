# SPDX-License-Identifier: Apache-2.0
"""The load at which trimming starts to pay: by the curve's shape, or by its plans.

Standard library and NumPy only (besides the equally pure modules beside it).

Invariants (pinned by tests/.../dspark/test_knee.py):
  * ``find_knee`` looks at the upper half of the curve only: the largest drop of
    all is the one from one to a few requests, where speculation still pays.
  * Curves of whole steps have their knee by shape, costs by part theirs by gain.
  * ``knee_from_costs`` is the first batch size from which, over a quarter of it and
    two sizes more, some enabled plan beats verifying everything at full depth by
    the margin.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm.v1.worker.gpu.spec_decode.dspark.cost_correction import CostCorrection
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import (
    StepCosts,
    check_sps_points,
)

# Relative throughput that capacity must promise before a batch size activates it.
KNEE_MARGIN = 0.01
# Batch sizes above a knee that must gain as well, besides a quarter of it.
_MORE_SIZES = 2


@dataclass(frozen=True, slots=True)
class KneeResult:
    """Where a steps-per-second curve starts to fall fast.

    Attributes:
        knee_tokens: Last profiled target token count before the drop.
        num_reqs: Requests that fill it at ``num_speculative_tokens + 1`` each.
        draft_tokens: Draft tokens of those requests.
        relative_drop: Loss of steps/s over that interval, 0..1; 0 for a flat curve,
            whose knee is its last point.
    """

    knee_tokens: int
    num_reqs: int
    draft_tokens: int
    relative_drop: float


def find_knee(
    points: Sequence[Sequence[float]], num_speculative_tokens: int
) -> KneeResult:
    """Find the largest relative drop in the upper half of a curve.

    Of equal drops the one at fewer tokens counts.

    Args:
        points: ``[[tokens, steps_per_s], ...]``, at least two.
        num_speculative_tokens: Logical depth K, >= 1.

    Raises:
        ValueError: fewer than two points, or a bad point.

    Source: local-inference-lab/vllm PR #107.
    """
    curve = check_sps_points(points)
    if len(curve) < 2:
        raise ValueError(
            f"a knee needs at least 2 curve points, got {curve}; add points, or set "
            "VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE > 0."
        )
    tokens = [t for t, _ in curve]
    ms = np.maximum.accumulate([m for _, m in curve])
    drops = 1.0 - ms[:-1] / ms[1:]
    first = len(drops) // 2
    knee = first + int(np.argmax(drops[first:]))
    drop = float(drops[knee])
    knee_tokens = tokens[knee] if drop > 0.0 else tokens[-1]
    num_reqs = knee_tokens // (num_speculative_tokens + 1)
    return KneeResult(knee_tokens, num_reqs, num_reqs * num_speculative_tokens, drop)


def knee_from_curve(
    points: Sequence[Sequence[float]],
    num_speculative_tokens: int,
    *,
    max_num_reqs: int,
    overhead_ms: float = 0.0,
) -> int:
    """Smallest batch at which capacity acts, from a curve of whole steps alone.

    Such a curve was measured at K drafts a request, so its time holds the drafting of
    as many requests as its tokens make. A plan's predicted gain would count the
    drafting of every draft that is not verified as saved, which it is not, and act
    far too early; hence the curve's shape decides (:func:`find_knee`).

    Args:
        points: ``[[tokens, steps_per_s], ...]``, at least two.
        num_speculative_tokens: Logical depth K, >= 1.
        max_num_reqs: Largest batch.
        overhead_ms: Fixed cost of every step; it flattens the curve.

    Returns:
        Requests R in 1..max_num_reqs, or max_num_reqs + 1 for a flat curve or a
        knee beyond.
    """
    with_overhead = [
        (tokens, 1000.0 / (ms + overhead_ms)) for tokens, ms in check_sps_points(points)
    ]
    knee = find_knee(with_overhead, num_speculative_tokens)
    if knee.relative_drop <= 0.0:
        return max_num_reqs + 1
    return min(max(knee.num_reqs, 1), max_num_reqs + 1)


def best_budget(
    costs: StepCosts,
    depth: int,
    num_reqs: int,
    expected_tokens: np.ndarray,
    context_tokens: float = 0.0,
    correction: CostCorrection | None = None,
) -> tuple[int, float]:
    """Best verification budget of a decode-only batch at one depth.

    Args:
        costs: Cost tables.
        depth: Enabled depth d.
        num_reqs: Requests R.
        expected_tokens: Tokens the step yields by budget, at least the first
            ``min(R * d, what is allowed) + 1`` entries, float64.
        context_tokens: Mean context of the requests.
        correction: What serving has learned about the tables.

    Returns:
        ``(draft_budget, tokens per ms)``. All ``R * d`` drafts use the uniform
        graph. Of equal rates the larger budget.
    """
    num_drafts = num_reqs * depth
    varlen_ms = costs.decode_varlen_ms(num_reqs)[: num_drafts + 1]
    size = min(len(expected_tokens), len(varlen_ms))
    context_ms = costs.context_ms(depth, depth, num_reqs, context_tokens)
    pass_ms = costs.draft_ms[depth][num_reqs] + costs.overhead_ms + context_ms
    step_ms = varlen_ms[:size] + pass_ms
    if correction is not None:
        step_ms *= correction.varlen[depth][num_reqs : num_reqs + size]
    if size == num_drafts + 1:
        step_ms[-1] = costs.verify_uniform_ms[depth][num_reqs] + pass_ms
        if correction is not None:
            step_ms[-1] *= correction.uniform[depth][num_reqs]
    rates = expected_tokens[:size] / step_ms
    budget = size - 1 - int(np.argmax(rates[::-1]))
    return budget, float(rates[budget])


def knee_from_costs(
    costs: StepCosts,
    num_speculative_tokens: int,
    prior_survival: np.ndarray,
    margin: float,
    context_tokens: float = 0.0,
) -> int:
    """Smallest batch from which the best plan beats fixed K by ``margin``.

    It must do so at every size up to a quarter larger, and at two more at least:
    small batches are bound by the host, and their timings scatter by more than the
    margin, so a single size that seems to gain says nothing. Every request is taken
    to have the prior survivals. Runs once at start.

    Args:
        costs: Cost tables; K must be an enabled depth.
        num_speculative_tokens: Logical depth K.
        prior_survival: P(first k drafts all accepted). Shape [K], float64.
        margin: Relative throughput gain that is required, >= 0.
        context_tokens: Mean context that the requests are taken to have.

    Returns:
        Requests R in 1..max_num_reqs, or max_num_reqs + 1 if no batch gains.

    Raises:
        ValueError: K is not among the depths of the tables.
    """
    if num_speculative_tokens not in costs.depths:
        raise ValueError(
            f"num_speculative_tokens {num_speculative_tokens} is not among the "
            f"profiled depths {costs.depths}; add it to dspark_draft_depths."
        )
    prior = np.minimum.accumulate(np.asarray(prior_survival, dtype=np.float64))
    prior = prior[:num_speculative_tokens]
    gains = [
        _best_gain(costs, num_speculative_tokens, num_reqs, prior, context_tokens)
        > margin
        for num_reqs in range(1, costs.max_num_reqs + 1)
    ]
    for num_reqs in range(1, costs.max_num_reqs + 1):
        window = num_reqs // 4 + 1 + _MORE_SIZES
        if all(gains[num_reqs - 1 : num_reqs - 1 + window]):
            return num_reqs
    return costs.max_num_reqs + 1


def _best_gain(
    costs: StepCosts,
    num_speculative_tokens: int,
    num_reqs: int,
    prior: np.ndarray,
    context_tokens: float,
) -> float:
    """Relative gain of the best plan of one batch size over fixed K."""
    # Rows are alike, so the best b drafts are whole positions, then a part.
    tokens = np.repeat(
        np.concatenate(([num_reqs], prior)), [1] + [num_reqs] * len(prior)
    )
    expected_tokens = np.cumsum(tokens)
    fixed_ms = costs.uniform_step_ms(num_speculative_tokens, num_reqs, context_tokens)
    fixed_rate = num_reqs * (1.0 + float(prior.sum())) / fixed_ms
    best = max(
        best_budget(costs, d, num_reqs, expected_tokens, context_tokens)[1]
        for d in costs.depths
    )
    return best / fixed_rate - 1.0
