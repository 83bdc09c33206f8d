# SPDX-License-Identifier: Apache-2.0
"""Kernels of confidence calibration in a step: apply and observe.

``calibrate_confidences`` runs inside the captured draft graph, ``observe_drafts`` once
a published step; ``fit_confidences`` (:mod:`.sts_fit_kernel`) once per many. All run on
the main stream, so what a draft graph reads is settled by stream order alone.

Invariants (pinned by tests/.../dspark/test_sts_kernels.py and test_kernel_registry.py):
  * Each kernel equals its reference (:mod:`.sts_reference`); no atomics, so equal
    inputs give equal bits.
  * Batch size, depth and step counters never cause a compilation after the first.
  * NaN passes through ``calibrate_confidences`` and never enters the ring.
"""

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


@triton.jit
def sigmoid(x):
    """Return the logistic function of a float32 block."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def bend_term(u):
    """Return ``2 log cosh(u / 2)`` of a float32 block without overflow."""
    size = tl.abs(u)
    # 2 log 2, so that it is 0 at 0.
    return size + 2.0 * tl.log(1.0 + tl.exp(-size)) - 1.3862943611198906


@triton.jit(
    do_not_specialize=("slot_stride", "probs_stride", "num_reqs", "num_steps"),
    do_not_specialize_on_alignment=("slots_ptr", "probs_ptr"),
)
def _calibrate_confidences_kernel(
    slots_ptr,  # [num_reqs] strided
    temperature_ptr,  # [num_slots]
    calibration_ptr,  # [2, 3, max_steps]
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
    """Replace sigmoid(z) by its calibrated value and keep z.

    Grid: (row blocks,).
    """
    rows = tl.program_id(0) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    steps = tl.arange(0, STEP_BLOCK)
    is_row = rows < num_reqs
    slots = tl.load(slots_ptr + rows * slot_stride, mask=is_row, other=-1)
    # Rows that only pad a graph have no slot; what they get is never read.
    has_slot = (slots >= 0) & (slots < num_slots)
    temperature = tl.load(temperature_ptr + slots, mask=has_slot, other=0.0)
    table = tl.where(temperature > 0.0, 3, 0) * max_steps
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
    bend = tl.load(cells + 2 * max_steps, mask=mask, other=0.0)
    u = scale * logits + bias
    tl.store(at, sigmoid(u + bend * bend_term(u)), mask=mask)
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
        calibration: By class (greedy, sampled): scales, biases, bends. Shape
            [2, 3, K], float32, contiguous.
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
    # One size an engine, so that no batch compiles anything.
    row_block = triton.next_power_of_2(ring_out.slot_stamp.shape[0])
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
        ROW_BLOCK=row_block,
        RING=RING_ROWS,
        DEPTH_BITS=DEPTH_BITS,
        NO_CAPACITY=NO_CAPACITY,
        num_warps=min(32, max(1, row_block // 32)),
    )


def runs_sts_kernels(device: torch.device) -> bool:
    """Tell whether tensors of this device reach the kernels, not the references."""
    is_interpreted = not isinstance(_observe_drafts_kernel, triton.runtime.JITFunction)
    return device.type != "cpu" or is_interpreted


def _step_block(num_steps: int) -> int:
    return 8 if num_steps <= 8 else MAX_STS_STEPS
