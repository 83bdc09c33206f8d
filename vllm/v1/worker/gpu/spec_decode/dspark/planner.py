# SPDX-License-Identifier: Apache-2.0
"""The per-step decision: survival estimates and step costs to a frozen plan.

Pure functions of their arguments (standard library and NumPy; NumPy's sort and
cumulative sum are sequential, so equal inputs give equal plans on every rank).

Survivals are *old*: one round for drafts in hand, priors for drafts to be made.
The confidences of the drafts being judged never come here, since a budget that
depends on them would bias the output (DSpark, arXiv 2607.05147). Rows must not
rise along positions. Callers replace unknown survivals (NaN) by 1.0; what still
arrives as NaN is handled the same way, row by row, and counted in the plan.

Invariants (pinned by tests/.../dspark/test_planner.py):
  * No other budget or enabled depth has a higher predicted rate, margins aside.
  * With a known ``decode_rate``, drafts beside prefill are admitted while they yield
    more than that rate: work on prompts does not make them cheaper.
  * The budget never exceeds the drafts in hand or the cap.
  * Flat costs verify everything; steeper costs never verify more.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm.v1.worker.gpu.spec_decode.dspark.cost_correction import CostCorrection
from vllm.v1.worker.gpu.spec_decode.dspark.knee import best_budget
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts

# Least predicted gain, relative, that is worth leaving the uniform graph or the
# present depth for. Above the few tenths of a per cent by which medians of repeated
# graph replays differ; a depth change also costs one step of mixed widths.
BUDGET_MARGIN = 0.01
DEPTH_MARGIN = 0.02


class PlanInputs(NamedTuple):
    """What one step's plan depends on.

    Attributes:
        survival_probs: P(draft k and all before it accepted) for the drafts in hand,
            one round old or priors. Shape [R, K], float32 or float64.
        scheduled_drafts: Drafts in hand per request, 0..K. Shape [R], int32.
        num_non_draft_tokens: Target tokens besides drafts (anchors and prefill).
        num_sampling_reqs: Requests that yield a token in this step whatever happens.
        max_draft_budget: Most drafts the sampler can verify in one step.
        current_depth: Draft depth in use.
        next_survival: Prior survival per position of the drafts to be made. Shape
            [K], or [R, K] for estimates per request, float64.
        depths: Enabled draft depths, ascending; subset of the cost tables' depths.
        context_tokens: Mean context of the requests.
        decode_rate: Tokens per millisecond of decode-only steps, by the tables; 0
            while unknown.
        width: ``scheduled_drafts`` of every request, where they are known to be
            equal.
    """

    survival_probs: np.ndarray
    scheduled_drafts: np.ndarray
    num_non_draft_tokens: int
    num_sampling_reqs: int
    max_draft_budget: int
    current_depth: int
    next_survival: np.ndarray
    depths: tuple[int, ...]
    context_tokens: float = 0.0
    decode_rate: float = 0.0
    width: int | None = None


class Plan(NamedTuple):
    """Decision of one step, with the prediction it rests on.

    Attributes:
        draft_budget: Drafts in hand to verify over the batch, bonus excluded.
        draft_depth: Depth of the drafts made in this step.
        expected_tokens: Predicted tokens of the step.
        step_ms: Predicted step time.
        fixed_expected_tokens: The same if every draft in hand were verified.
        fixed_step_ms: Step time if every draft in hand were verified.
        verify_all: Every draft in hand is verified.
        capped: ``max_draft_budget`` bound the choice.
        num_nan_rows: Rows with a NaN survival, taken as certain to be accepted.
    """

    draft_budget: int
    draft_depth: int
    expected_tokens: float
    step_ms: float
    fixed_expected_tokens: float
    fixed_step_ms: float
    verify_all: bool
    capped: bool
    num_nan_rows: int = 0


@dataclass(frozen=True, slots=True)
class DepthPlan:
    """Depth for the next drafts, with the rates behind the choice.

    Attributes:
        draft_depth: Chosen depth.
        draft_budget: Best verification budget at that depth.
        tokens_per_ms: Predicted steady rate at the chosen depth.
        current_tokens_per_ms: Predicted steady rate at the current depth.
    """

    draft_depth: int
    draft_budget: int
    tokens_per_ms: float
    current_tokens_per_ms: float


def _require_depth(depth: int, costs: StepCosts) -> None:
    if depth not in costs.draft_ms:
        raise ValueError(
            f"draft depth {depth} is not among the profiled depths {costs.depths}; "
            "profile it or take it out of dspark_draft_depths."
        )


def _require_fit(name: str, value: int, largest: int) -> None:
    if not 0 <= value <= largest:
        raise ValueError(
            f"{name} is {value}, but the cost tables cover 0..{largest}; build them "
            "for this engine's max_num_seqs and max_num_batched_tokens."
        )


def _sanitise(survival: np.ndarray, scheduled: np.ndarray) -> tuple[np.ndarray, int]:
    """Return survivals in 0..1 with every NaN row set to 1.0, and the row count."""
    valid = np.arange(survival.shape[1]) < scheduled[:, None]
    nan_rows = (np.isnan(survival) & valid).any(axis=1)
    clean = np.where(nan_rows[:, None], 1.0, survival)
    return np.clip(clean, 0.0, 1.0), int(np.count_nonzero(nan_rows))


def _rising_survivals(
    survival: np.ndarray, scheduled: np.ndarray, width: int
) -> np.ndarray:
    """Copy the scheduled slots' survivals, ascending. ``width`` >= 0 if equal rows."""
    if width >= 0:
        scores = survival[:, :width].flatten()
    else:
        scores = survival[np.arange(survival.shape[1]) < scheduled[:, None]]
    scores.sort()
    return scores


def _expected_tokens(base_tokens: int, rising: np.ndarray) -> np.ndarray:
    """Expected tokens by budget, float64 [len(rising) + 1]; entry 0 is the base."""
    expected = np.empty(len(rising) + 1)
    expected[0] = base_tokens
    expected[:0:-1] = rising
    return np.add.accumulate(expected, out=expected)


def _best_budget_up_to(largest: int, scores: np.ndarray, margin: float) -> int:
    """Index of the best score, the larger of equals; verify-all within the margin."""
    verify_all = len(scores) - 1
    if largest == verify_all:
        best = np.maximum.reduce(scores)
        if best <= scores[verify_all] * (1.0 + margin):
            return verify_all
    return largest - int(scores[largest::-1].argmax())


def plan_budget(
    inputs: PlanInputs,
    costs: StepCosts,
    *,
    margin: float = BUDGET_MARGIN,
    draft_depth: int | None = None,
    correction: CostCorrection | None = None,
) -> Plan:
    """Choose how many of the drafts in hand to verify.

    Maximises (sampling requests + sum of the b largest survivals) / step time over
    all b in 0..min(drafts in hand, cap). All drafts of a decode-only batch of equal
    widths are priced as the uniform graph, fewer by requests and tokens, a batch
    with prompts by tokens.

    Prompts must be worked through whatever is drafted, so their time says nothing
    about drafts, but the rate of a step that holds some is low, and by that rate
    poor drafts would pay. Where ``decode_rate`` is known, such a step maximises
    tokens - decode_rate * step time instead: a draft that is left out is made up for
    at that rate. (For a decode-only step at its best rate both are the same.)

    Args:
        inputs: This step's batch.
        costs: Cost tables.
        margin: Relative gain that leaving verify-all needs. Of equal rates,
            verify-all wins, then the larger budget.
        draft_depth: Depth of this step's drafter pass; None for the current depth.
        correction: What serving has learned about the tables, of decode-only batches.

    Returns:
        The plan, with ``draft_depth`` as given.

    Raises:
        ValueError: shapes disagree, or the tables do not cover the batch.

    Source: DSpark, arXiv 2607.05147 (theta = tau * SPS(B)); local-inference-lab/vllm
    PR #107 for the budget from survivals one round old.
    """
    survival, scheduled = inputs.survival_probs, inputs.scheduled_drafts
    depth = inputs.current_depth if draft_depth is None else draft_depth
    num_reqs = len(scheduled)
    if inputs.width is not None:
        low = high = inputs.width
    else:
        low = int(scheduled.min()) if num_reqs else 0
        high = int(scheduled.max()) if num_reqs else 0
    if survival.shape[0] != num_reqs or not 0 <= low <= high <= survival.shape[1]:
        raise ValueError(
            f"survival_probs has shape {survival.shape} for {num_reqs} requests with "
            f"{low}..{high} scheduled drafts; it must be [R, K] with 0..K drafts."
        )
    width = high if low == high else -1
    rising = _rising_survivals(survival, scheduled, width)
    num_nan_rows = 0
    # NaN sorts last, so the two ends show whether any value is out of range.
    if len(rising) and not (rising[0] >= 0.0 and rising[-1] <= 1.0):
        survival, num_nan_rows = _sanitise(survival, scheduled)
        rising = _rising_survivals(survival, scheduled, width)

    base, total = inputs.num_non_draft_tokens, len(rising)
    _require_depth(depth, costs)
    _require_fit("num_reqs", num_reqs, costs.max_num_reqs)
    _require_fit("num_target_tokens", base + total, costs.max_num_tokens)
    expected = _expected_tokens(inputs.num_sampling_reqs, rising)
    context_ms = costs.context_ms(width, depth, num_reqs, inputs.context_tokens)
    pass_ms = float(costs.draft_ms[depth][num_reqs]) + costs.overhead_ms + context_ms
    if base == num_reqs:
        step_ms = costs.decode_varlen_ms(num_reqs)[: total + 1] + pass_ms
    else:
        step_ms = costs.verify_varlen_ms[base : base + total + 1] + pass_ms
        correction = None
    if correction is not None:
        step_ms *= correction.varlen[depth][base : base + total + 1]
    if base == num_reqs and width in costs.verify_uniform_ms:
        whole_ms = float(costs.verify_uniform_ms[width][num_reqs]) + pass_ms
        if correction is not None:
            whole_ms *= float(correction.uniform[width][num_reqs])
        step_ms[-1] = whole_ms

    if base != num_reqs and inputs.decode_rate > 0.0:
        # Its layout is varlen at any budget: nothing is left that a margin protects.
        scores, margin = expected - inputs.decode_rate * step_ms, 0.0
    else:
        scores = expected / step_ms
    largest = min(total, max(inputs.max_draft_budget, 0))
    budget = _best_budget_up_to(largest, scores, margin)
    return Plan(
        draft_budget=budget,
        draft_depth=depth,
        expected_tokens=float(expected[budget]),
        step_ms=float(step_ms[budget]),
        fixed_expected_tokens=float(expected[total]),
        fixed_step_ms=float(step_ms[total]),
        verify_all=budget == total,
        capped=largest < total and _best_budget_up_to(total, scores, margin) > largest,
        num_nan_rows=num_nan_rows,
    )


def plan_depth(
    inputs: PlanInputs,
    costs: StepCosts,
    *,
    margin: float = DEPTH_MARGIN,
    correction: CostCorrection | None = None,
) -> DepthPlan:
    """Choose the depth of the next drafts together with their budget.

    Maximises the steady rate of a decode-only batch, (R + sum of the b largest
    survivals within d) / (draft time at d + verify time), over the enabled depths
    and all b up to the cap. R is the rows of a 2-D ``next_survival``, else the
    sampling requests. Prefill tokens of this step are not expected in the next.

    Tables of whole steps hide the draft time, so there the shallowest depth that
    loses nothing is taken.

    Args:
        inputs: This step's batch.
        costs: Cost tables.
        margin: Relative gain that leaving the current depth needs.
        correction: What serving has learned about the tables.

    Raises:
        ValueError: a depth is not in the tables, or they do not cover the batch.
    """
    prior = inputs.next_survival
    num_reqs = inputs.num_sampling_reqs if prior.ndim == 1 else len(prior)
    for depth in (inputs.current_depth, *inputs.depths):
        _require_depth(depth, costs)
    if inputs.current_depth not in inputs.depths:
        raise ValueError(
            f"current_depth {inputs.current_depth} is not among the enabled depths "
            f"{inputs.depths}."
        )
    if prior.shape[-1] < max(inputs.depths):
        raise ValueError(
            f"next_survival has shape {prior.shape}; the last axis must cover depth "
            f"{max(inputs.depths)}."
        )
    _require_fit("num_reqs", num_reqs, costs.max_num_reqs)
    # Per-request estimates are sorted per depth; a prior is one curve for all.
    expected = _expected_by_depth(prior, num_reqs, inputs.depths)
    largest = max(inputs.max_draft_budget, 0)
    choices = {
        d: best_budget(
            costs,
            d,
            num_reqs,
            tokens[: largest + 1],
            inputs.context_tokens,
            correction,
        )
        for d, tokens in expected.items()
    }
    current = choices[inputs.current_depth][1]
    best = max(rate for _, rate in choices.values())
    chosen = inputs.current_depth
    if best > current * (1.0 + margin):
        chosen = max(d for d in inputs.depths if choices[d][1] == best)
    if costs.whole_step and num_reqs:
        held = choices[chosen][1]
        chosen = min(d for d in inputs.depths if choices[d][1] >= held)
    budget, rate = choices[chosen]
    return DepthPlan(chosen, budget, rate, current)


def _expected_by_depth(
    next_survival: np.ndarray, num_reqs: int, depths: tuple[int, ...]
) -> dict[int, np.ndarray]:
    """Expected tokens by budget for drafts of each depth, each float64 [>= R*d + 1]."""
    clean = np.nan_to_num(next_survival, nan=1.0).clip(0.0, 1.0)
    if clean.ndim == 1:
        # Priors of positions are estimated apart, so noise can make them rise.
        falling = np.minimum.accumulate(clean[: max(depths)])
        tokens = _expected_tokens(num_reqs, np.repeat(falling[::-1], num_reqs))
        return {d: tokens[: num_reqs * d + 1] for d in depths}
    return {
        d: _expected_tokens(num_reqs, np.sort(clean[:, :d], axis=None)) for d in depths
    }


def plan_step(
    inputs: PlanInputs,
    costs: StepCosts,
    *,
    budget_margin: float = BUDGET_MARGIN,
    depth_margin: float = DEPTH_MARGIN,
    correction: CostCorrection | None = None,
) -> Plan:
    """Choose the next depth, then the budget of the drafts in hand beside it.

    Args and errors: see :func:`plan_depth` and :func:`plan_budget`.
    """
    depth = plan_depth(
        inputs, costs, margin=depth_margin, correction=correction
    ).draft_depth
    return plan_budget(
        inputs,
        costs,
        margin=budget_margin,
        draft_depth=depth,
        correction=correction,
    )


def fraction_budget(
    num_reqs: int, num_speculative_tokens: int, frac: float, num_scheduled_drafts: int
) -> int:
    """Budget of fraction mode: ``ceil(R * K * frac)``, at most what is scheduled.

    Raises:
        ValueError: ``frac`` outside 0..1 (NaN included).
    """
    if not 0.0 <= frac <= 1.0:
        raise ValueError(
            f"dspark_budget_frac is {frac}; it must be within 0..1 (1 = verify all)."
        )
    # 100 * 0.07 is a rounding error above 7; it must not cost an eighth draft.
    slots = math.ceil(num_reqs * num_speculative_tokens * frac - 1e-9)
    return min(max(slots, 0), num_scheduled_drafts)


def threshold_budget(
    survival_probs: np.ndarray, scheduled_drafts: np.ndarray, threshold: float
) -> int:
    """Budget of threshold mode: scheduled drafts whose survival reaches it.

    The comparison is in the dtype of the survivals; a NaN counts as 1.0.

    Args:
        survival_probs: Shape [R, K], float32 or float64.
        scheduled_drafts: Shape [R], int32.
        threshold: Least survival, in (0, 1].

    Raises:
        ValueError: ``threshold`` outside (0, 1] (NaN included).
    """
    if not 0.0 < threshold <= 1.0:
        raise ValueError(
            f"dspark_confidence_threshold is {threshold}; threshold mode needs a value "
            "in (0, 1] (0 = off)."
        )
    valid = np.arange(survival_probs.shape[1]) < scheduled_drafts[:, None]
    # Not "below" rather than ">=": the comparison with NaN is then an admission.
    return int(np.count_nonzero(valid & ~(survival_probs < threshold)))
