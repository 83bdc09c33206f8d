# SPDX-License-Identifier: Apache-2.0
"""The three kernels of confidence calibration: apply, observe, fit.

``calibrate_confidences`` runs inside the captured draft graph; ``observe_drafts``
once per active step; ``fit_confidences`` once per many. All run on the main stream,
so what a draft graph reads is settled by stream order alone.

Invariants (pinned by tests/.../dspark/test_sts_kernels.py and test_kernel_registry.py):
  * Each kernel equals its reference (:mod:`.sts_reference`); no atomics, so equal
    inputs give equal bits.
  * Batch size, depth and step counters never cause a compilation after the first.
  * NaN passes through ``calibrate_confidences`` and never enters the ring.
"""

import math

import torch
import triton
import triton.language as tl

from vllm.v1.worker.gpu.spec_decode.dspark import sts_fit, sts_reference
from vllm.v1.worker.gpu.spec_decode.dspark.sts_reference import (
    DEPTH_BITS,
    MAX_STS_STEPS,
    NO_CAPACITY,
    RING_ROWS,
    DraftRing,
    JudgedDrafts,
)

_APPLY_ROWS = 32
_FIT_WARPS = 16
_LOG2_DECAY = math.log2(sts_fit.DECAY)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(
    do_not_specialize=("slot_stride", "probs_stride", "num_reqs", "num_steps"),
    do_not_specialize_on_alignment=("slots_ptr", "probs_ptr"),
)
def _calibrate_confidences_kernel(
    slots_ptr,  # [num_reqs] strided
    temperature_ptr,  # [num_slots]
    calibration_ptr,  # [2, 2, max_steps]
    probs_ptr,  # [num_reqs, num_steps] strided, in place
    logits_ptr,  # [>= num_reqs, max_steps], written
    slot_stride,
    probs_stride,
    num_slots,
    num_reqs,
    num_steps,
    max_steps,
    ROW_BLOCK: tl.constexpr,
    STEP_BLOCK: tl.constexpr,
    MAX_LOGIT: tl.constexpr,
):
    """Replace sigmoid(z) by sigmoid(scale * z + bias) and keep z.

    Grid: (row blocks,).
    """
    rows = tl.program_id(0) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    steps = tl.arange(0, STEP_BLOCK)
    is_row = rows < num_reqs
    slots = tl.load(slots_ptr + rows * slot_stride, mask=is_row, other=-1)
    # Rows that only pad a graph have no slot; what they get is never read.
    has_slot = (slots >= 0) & (slots < num_slots)
    temperature = tl.load(temperature_ptr + slots, mask=has_slot, other=0.0)
    table = tl.where(temperature > 0.0, 2, 0) * max_steps
    mask = is_row[:, None] & (steps < num_steps)[None, :]
    at = probs_ptr + rows[:, None] * probs_stride + steps[None, :]
    probs = tl.load(at, mask=mask, other=0.5)
    clipped = tl.minimum(tl.maximum(probs, 1e-6), 1.0 - 1e-6)
    logits = tl.log(clipped) - tl.log(1.0 - clipped)
    logits = tl.minimum(tl.maximum(logits, -MAX_LOGIT), MAX_LOGIT)
    logits = tl.where(probs == probs, logits, probs)
    cells = calibration_ptr + table[:, None] + steps[None, :]
    scale = tl.load(cells, mask=mask, other=1.0)
    bias = tl.load(cells + max_steps, mask=mask, other=0.0)
    tl.store(at, _sigmoid(scale * logits + bias), mask=mask)
    tl.store(logits_ptr + rows[:, None] * max_steps + steps[None, :], logits, mask=mask)


def calibrate_confidences(
    slots: torch.Tensor,
    temperature: torch.Tensor,
    calibration: torch.Tensor,
    *,
    probs_out: torch.Tensor,
    logits_out: torch.Tensor,
) -> None:
    """Calibrate confidences in place and note their raw logits, in one launch.

    Safe to capture in a graph: every argument is a persistent buffer.

    Args:
        slots: Batch row to request slot, -1 for padding; may be strided. Shape [R],
            int64.
        temperature: Sampling temperature by slot; 0 is greedy. Shape [S], float32.
        calibration: By class (greedy, sampled): scales, then biases. Shape
            [2, 2, K], float32, contiguous.
        probs_out: Confidences as the head gives them; calibrated on return. NaN
            stays NaN. Shape [R, d <= K], float32, rows may be strided.
        logits_out: Their logits before calibration, clipped to +-13.8. Shape
            [>= R, K], float32, contiguous; only [:R, :d] is written.
    """
    if not runs_sts_kernels(probs_out.device):
        sts_reference.calibrate_confidences_reference(
            slots, temperature, calibration, probs_out=probs_out, logits_out=logits_out
        )
        return
    num_reqs, num_steps = probs_out.shape
    _calibrate_confidences_kernel[(triton.cdiv(num_reqs, _APPLY_ROWS),)](
        slots,
        temperature,
        calibration,
        probs_out,
        logits_out,
        slots.stride(0),
        probs_out.stride(0),
        temperature.shape[0],
        num_reqs,
        num_steps,
        calibration.shape[2],
        ROW_BLOCK=_APPLY_ROWS,
        STEP_BLOCK=_step_block(calibration.shape[2]),
        MAX_LOGIT=sts_fit.MAX_LOGIT,
    )


_OBSERVE_INTS = (
    "has_capacities",
    "has_excluded",
    "num_reqs",
    "stamp",
    "draft_depth",
    "sample_stride",
    "sample_offset",
)


@triton.jit(
    do_not_specialize=_OBSERVE_INTS,
    do_not_specialize_on_alignment=(
        "slots_ptr",
        "num_sampled_ptr",
        "num_rejected_ptr",
        "capacities_ptr",
        "excluded_ptr",
    ),
)
def _observe_drafts_kernel(
    slots_ptr,  # [num_reqs]
    num_sampled_ptr,  # [num_reqs]
    num_rejected_ptr,  # [num_reqs]
    capacities_ptr,  # [num_reqs], read if has_capacities
    excluded_ptr,  # [num_reqs], read if has_excluded
    temperature_ptr,  # [num_slots]
    new_logits_ptr,  # [>= num_reqs, num_steps]
    slot_logits_ptr,  # [num_slots, num_steps], read, then written
    slot_stamp_ptr,  # [num_slots], read, then written
    ring_logits_ptr,  # [2, RING, num_steps], written
    ring_accepted_ptr,  # [2, RING], written
    ring_verified_ptr,  # [2, RING], written
    num_rows_ptr,  # [2], read, then written
    has_capacities,
    has_excluded,
    num_reqs,
    stamp,
    draft_depth,
    sample_stride,
    sample_offset,
    num_steps,
    ROW_BLOCK: tl.constexpr,
    RING: tl.constexpr,
    DEPTH_BITS: tl.constexpr,
    NO_CAPACITY: tl.constexpr,
):
    """Grade the drafts just judged into the ring; note the new ones by slot.

    Grid: (1,): the place in the ring is a prefix sum over the batch.
    """
    rows = tl.arange(0, ROW_BLOCK)
    is_row = rows < num_reqs
    slots = tl.load(slots_ptr + rows, mask=is_row, other=0).to(tl.int64)
    accepted = tl.load(num_sampled_ptr + rows, mask=is_row, other=0) - 1
    verified = accepted + tl.load(num_rejected_ptr + rows, mask=is_row, other=0)
    capacity = tl.load(
        capacities_ptr + rows, mask=is_row & (has_capacities != 0), other=NO_CAPACITY
    )
    excluded = tl.load(excluded_ptr + rows, mask=is_row & (has_excluded != 0), other=0)
    old_stamp = tl.load(slot_stamp_ptr + slots, mask=is_row, other=0)
    temperature = tl.load(temperature_ptr + slots, mask=is_row, other=0.0)
    depth = (old_stamp & ((1 << DEPTH_BITS) - 1)).to(tl.int32)
    fresh = (old_stamp >> DEPTH_BITS) == stamp
    verified = tl.minimum(tl.minimum(verified, capacity), depth).to(tl.int32)
    for step in range(num_steps):
        is_read = is_row & fresh & (step < verified)
        logit = tl.load(
            slot_logits_ptr + slots * num_steps + step, mask=is_read, other=0.0
        )
        verified = tl.where(logit == logit, verified, step)
    accepted = tl.minimum(accepted, verified).to(tl.int32)
    is_sampled = (rows + sample_offset) % sample_stride == 0
    graded = is_row & is_sampled & fresh & (excluded == 0) & (verified > 0)

    is_random = temperature > 0.0
    greedy_rows = (graded & (temperature <= 0.0)).to(tl.int32)
    random_rows = (graded & is_random).to(tl.int32)
    num_greedy = tl.load(num_rows_ptr)
    num_random = tl.load(num_rows_ptr + 1)
    rank = tl.where(
        is_random,
        num_random + tl.cumsum(random_rows, axis=0) - random_rows,
        num_greedy + tl.cumsum(greedy_rows, axis=0) - greedy_rows,
    )
    cell = tl.where(is_random, RING, 0) + (rank & (RING - 1))
    tl.store(ring_accepted_ptr + cell, accepted, mask=graded)
    tl.store(ring_verified_ptr + cell, verified, mask=graded)
    for step in range(num_steps):
        at = slot_logits_ptr + slots * num_steps + step
        old = tl.load(at, mask=graded & (step < verified), other=0.0)
        tl.store(ring_logits_ptr + cell * num_steps + step, old, mask=graded)
        is_new = is_row & (step < draft_depth)
        new = tl.load(new_logits_ptr + rows * num_steps + step, mask=is_new, other=0.0)
        tl.store(at, new, mask=is_new)
    new_stamp = stamp * (1 << DEPTH_BITS) + draft_depth
    stamps = tl.zeros([ROW_BLOCK], tl.int64) + new_stamp
    tl.store(slot_stamp_ptr + slots, stamps, mask=is_row)
    tl.store(num_rows_ptr, num_greedy + tl.sum(greedy_rows, axis=0))
    tl.store(num_rows_ptr + 1, num_random + tl.sum(random_rows, axis=0))


def observe_drafts(
    judged: JudgedDrafts,
    new_logits: torch.Tensor,
    temperature: torch.Tensor,
    ring_out: DraftRing,
    *,
    stamp: int,
    draft_depth: int,
    sample_stride: int = 1,
    sample_offset: int = 0,
) -> None:
    """Grade the drafts that a step judged, then note those that it made.

    One launch, no allocation, no host synchronisation.

    Args:
        judged: What the step verified, R requests.
        new_logits: Raw logits of the step's own drafts, batch order. Shape
            [>= R, K], float32, contiguous.
        temperature: Sampling temperature by slot. Shape [S], float32.
        ring_out: State, updated in place.
        stamp: Number of the present run of publishing steps, >= 1; logits noted
            under another stamp are stale.
        draft_depth: Positions that the step drafted, 0 to K.
        sample_stride: Grade every so many rows, >= 1.
        sample_offset: Which of them, in [0, sample_stride).
    """
    if not runs_sts_kernels(new_logits.device):
        sts_reference.observe_drafts_reference(
            judged,
            new_logits,
            temperature,
            ring_out,
            stamp=stamp,
            draft_depth=draft_depth,
            sample_stride=sample_stride,
            sample_offset=sample_offset,
        )
        return
    unread = judged.num_sampled
    _observe_drafts_kernel[(1,)](
        judged.slots,
        judged.num_sampled,
        judged.num_rejected,
        unread if judged.capacities is None else judged.capacities,
        unread if judged.excluded is None else judged.excluded,
        temperature,
        new_logits,
        ring_out.slot_logits,
        ring_out.slot_stamp,
        ring_out.logits,
        ring_out.accepted,
        ring_out.verified,
        ring_out.num_rows,
        int(judged.capacities is not None),
        int(judged.excluded is not None),
        judged.slots.shape[0],
        stamp,
        draft_depth,
        sample_stride,
        sample_offset,
        new_logits.shape[1],
        # One size an engine, so that no batch compiles anything.
        ROW_BLOCK=triton.next_power_of_2(ring_out.slot_stamp.shape[0]),
        RING=RING_ROWS,
        DEPTH_BITS=DEPTH_BITS,
        NO_CAPACITY=NO_CAPACITY,
        num_warps=min(32, max(1, ring_out.slot_stamp.shape[0] // 32)),
    )


@triton.jit
def _fit_confidences_kernel(
    ring_logits_ptr,  # [2, RING, num_steps]
    ring_accepted_ptr,  # [2, RING]
    ring_verified_ptr,  # [2, RING]
    num_rows_ptr,  # [2]
    prior_ptr,  # [2, 2, num_steps]
    calibration_ptr,  # [2, 2, num_steps], start, then result
    num_steps,
    log2_decay,
    scale_prior_info,
    bias_prior_info,
    RING: tl.constexpr,
    NUM_ITERATIONS: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    MAX_SCALE: tl.constexpr,
    MAX_BIAS: tl.constexpr,
    MAX_BIAS_STEP: tl.constexpr,
    MAX_SCALE_STEP: tl.constexpr,
):
    """Fit one class, left to right.

    Grid: (2,), a program per class; its rows stay in registers.
    """
    group = tl.program_id(0)
    rows = tl.arange(0, RING)
    newest = tl.load(num_rows_ptr + group) - 1
    age = ((newest - rows) & (RING - 1)).to(tl.int32)
    has_row = age <= newest
    accepted = tl.load(ring_accepted_ptr + group * RING + rows)
    verified = tl.where(has_row, tl.load(ring_verified_ptr + group * RING + rows), 0)
    weight = tl.exp2(age.to(tl.float32) * log2_decay)
    survival = tl.full([RING], 1.0, tl.float32)
    logits_at = ring_logits_ptr + (group * RING + rows) * num_steps
    table = 2 * group * num_steps
    for step in range(num_steps):
        known = verified > step
        z = tl.load(logits_at + step, mask=known, other=0.0)
        outcome = (accepted > step).to(tl.float32)
        w = tl.where(known, weight, 0.0)
        prior_scale = tl.load(prior_ptr + table + step)
        prior_bias = tl.load(prior_ptr + table + num_steps + step)
        scale = tl.load(calibration_ptr + table + step)
        bias = tl.load(calibration_ptr + table + num_steps + step)
        for _ in range(NUM_ITERATIONS):
            u = scale * z + bias
            prob = survival * _sigmoid(u)
            # (1 - s) / (1 - S s), in a form that stays in (0, 1] as both vanish.
            miss = _sigmoid(-u)
            ratio = miss / tl.maximum(1.0 - survival + survival * miss, 1e-12)
            slope = w * (prob - outcome) * ratio
            curve = w * prob * miss * ratio
            g_scale = tl.sum(slope * z, axis=0) + scale_prior_info * (
                scale - prior_scale
            )
            g_bias = tl.sum(slope, axis=0) + bias_prior_info * (bias - prior_bias)
            h_ss = tl.sum(curve * z * z, axis=0) + scale_prior_info
            h_sb = tl.sum(curve * z, axis=0)
            h_bb = tl.sum(curve, axis=0) + bias_prior_info
            det = h_ss * h_bb - h_sb * h_sb
            d_scale = (h_bb * g_scale - h_sb * g_bias) / det
            d_bias = (h_ss * g_bias - h_sb * g_scale) / det
            limit = tl.maximum(
                tl.abs(d_bias) / MAX_BIAS_STEP,
                tl.abs(d_scale) / (MAX_SCALE_STEP * scale),
            )
            limit = tl.maximum(limit, 1.0)
            scale = tl.minimum(
                tl.maximum(scale - d_scale / limit, MIN_SCALE), MAX_SCALE
            )
            bias = tl.minimum(tl.maximum(bias - d_bias / limit, -MAX_BIAS), MAX_BIAS)
        tl.store(calibration_ptr + table + step, scale)
        tl.store(calibration_ptr + table + num_steps + step, bias)
        survival = tl.where(known, survival * _sigmoid(scale * z + bias), survival)


def fit_confidences(
    ring: DraftRing, prior: torch.Tensor, *, calibration_out: torch.Tensor
) -> None:
    """Refit scales and biases to the graded rows, in one launch.

    Args:
        ring: Graded rows.
        prior: What the fit falls back on. Shape [2, 2, K], float32.
        calibration_out: Where the search begins and where the result goes. Shape
            [2, 2, K], float32, contiguous.

    Source: the steps of ``sts_fit.fit_calibration``.
    """
    if not runs_sts_kernels(calibration_out.device):
        sts_reference.fit_confidences_reference(
            ring, prior, calibration_out=calibration_out
        )
        return
    _fit_confidences_kernel[(calibration_out.shape[0],)](
        ring.logits,
        ring.accepted,
        ring.verified,
        ring.num_rows,
        prior,
        calibration_out,
        calibration_out.shape[2],
        _LOG2_DECAY,
        sts_fit.PRIOR_SCALE_INFORMATION,
        sts_fit.PRIOR_BIAS_INFORMATION,
        RING=RING_ROWS,
        NUM_ITERATIONS=sts_fit.NUM_ITERATIONS,
        MIN_SCALE=sts_fit.MIN_SCALE,
        MAX_SCALE=sts_fit.MAX_SCALE,
        MAX_BIAS=sts_fit.MAX_BIAS,
        MAX_BIAS_STEP=sts_fit.MAX_BIAS_STEP,
        MAX_SCALE_STEP=sts_fit.MAX_SCALE_STEP,
        num_warps=_FIT_WARPS,
    )


def runs_sts_kernels(device: torch.device) -> bool:
    """Tell whether tensors of this device reach the kernels, not the references."""
    is_interpreted = not isinstance(_fit_confidences_kernel, triton.runtime.JITFunction)
    return device.type != "cpu" or is_interpreted


def _step_block(num_steps: int) -> int:
    return 8 if num_steps <= 8 else MAX_STS_STEPS
