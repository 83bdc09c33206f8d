# SPDX-License-Identifier: Apache-2.0
"""Admit the draft tokens that are worth verifying, in one kernel launch.

Every scheduled draft (row r, position k) is a slot. Its survival probability is
the running product of the row's confidences up to k; the budget goes to the slots
with the highest survival.

Invariants (pinned by tests):
  * Survival is the float32 product in position order, never reassociated;
    subnormal values are kept, not flushed.
  * Rank: higher survival, then earlier position, then lower row. This is a total
    order, and the kernel uses no atomics, so all ranks agree on equal inputs.
  * The admitted slots of a row are a prefix of it; their sum never passes the
    budget or the scheduled drafts.
  * Survival 0 is admitted only by ``fill_budget``, after everything else.
  * Batch size, K, strides and budget never cause a compilation after ``warm_up``.
  * Confidences are clamped to [0, 1]; NaN counts as 1 (the draft is verified, so a
    broken confidence head costs speed, not correctness).
"""

import struct
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from vllm.v1.worker.gpu.spec_decode.dspark.capacity_checks import (
    MAX_ADMISSION_REQS,
    MAX_ADMISSION_STEPS,
    check_admission,
    check_budget,
    check_scalars,
    check_slots,
)
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_reference import (
    admit_drafts_reference,
)
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_reference import (
    assign_capacities_reference as assign_capacities_reference,
)

# Row blocks that may be compiled, with the warps of each. One row per thread (the
# product then needs no communication) up to the 32 warps of one thread block.
_ROW_BLOCK_WARPS = {64: 2, 256: 8, 1024: 32, MAX_ADMISSION_REQS: 32}
_STEP_BLOCKS = (8, MAX_ADMISSION_STEPS)

# What all implementations look like: the parameters of ``admit_drafts``.
AdmitDrafts = Callable[..., None]

_RUNTIME_ARGS = (
    "confidence_stride",
    "num_slots",
    "num_steps",
    "num_reqs",
    "num_offsets",
    "draft_budget",
    "key_floor",
    "num_bonus_tokens",
)
_TENSOR_ARGS = (
    "confidence_ptr",
    "idx_mapping_ptr",
    "scheduled_drafts_ptr",
    "num_non_draft_tokens_ptr",
    "capacities_ptr",
    "cu_num_logits_ptr",
    "query_start_loc_ptr",
)


@triton.jit
def _load_survival_keys(
    confidence_ptr,
    slots,  # [ROW_BLOCK] int64
    num_drafts,  # [ROW_BLOCK] int32, 0 for rows without a request
    confidence_stride,
    ROW_BLOCK: tl.constexpr,
    STEP_BLOCK: tl.constexpr,
):
    """Return the slots' rank keys, [STEP_BLOCK, ROW_BLOCK] int32; -1 = no slot.

    Non-negative floats order like their bits, so the keys are the survival bits.
    """
    steps = tl.arange(0, STEP_BLOCK)
    keys = tl.full([STEP_BLOCK, ROW_BLOCK], -1, tl.int32)
    survival = tl.full([ROW_BLOCK], 1.0, tl.float32)
    # A loop, not a scan: a parallel scan would reassociate the product.
    for step in tl.static_range(STEP_BLOCK):
        is_draft = step < num_drafts
        confidence = tl.load(
            confidence_ptr + slots * confidence_stride + step, mask=is_draft, other=0.0
        )
        confidence = tl.where(confidence == confidence, confidence, 1.0)
        # A comparison, not a maximum: -0.0 must become +0.0, or its bits rank wrong.
        confidence = tl.where(confidence > 0.0, tl.minimum(confidence, 1.0), 0.0)
        survival = survival * confidence
        key = tl.where(is_draft, survival.to(tl.int32, bitcast=True), -1)
        keys = tl.where(steps[:, None] == step, key[None, :], keys)
    return keys


@triton.jit
def _count_slots(is_counted):
    """Return how many entries of a [STEP_BLOCK, ROW_BLOCK] mask are true."""
    return tl.sum(tl.sum(is_counted.to(tl.int32), axis=0), axis=0)


@triton.jit
def _find_key_threshold(keys, num_admitted, num_eligible):
    """Return ``(threshold, count)``: count slots have keys >= threshold.

    Radix search, two bits a pass. It stops early as soon as the count is exact; at
    the end of the bits the threshold is the num_admitted-th largest key and the
    count exceeds num_admitted by ties alone. Needs num_admitted < num_eligible.
    """
    threshold = 0
    count = num_eligible
    shift = 28  # 1.0 is 0x3F800000, so no key reaches bit 30.
    while (shift >= 0) & (count != num_admitted):
        step = 1 << shift
        # Three counts in one reduction: each of 21 bits, ample for 2**16 slots.
        packed = (keys >= threshold + step).to(tl.int64)
        packed += (keys >= threshold + 2 * step).to(tl.int64) << 21
        packed += (keys >= threshold + 3 * step).to(tl.int64) << 42
        counts = tl.sum(tl.sum(packed, axis=0), axis=0)
        count_1 = (counts & 0x1FFFFF).to(tl.int32)
        count_2 = ((counts >> 21) & 0x1FFFFF).to(tl.int32)
        count_3 = (counts >> 42).to(tl.int32)
        # Counts fall as the digit grows, so the last digit that still has enough is
        # the number of digits that have enough.
        digit = (count_1 >= num_admitted).to(tl.int32)
        digit += (count_2 >= num_admitted).to(tl.int32)
        digit += (count_3 >= num_admitted).to(tl.int32)
        threshold += digit * step
        count = tl.where(digit == 1, count_1, count)
        count = tl.where(digit == 2, count_2, count)
        count = tl.where(digit == 3, count_3, count)
        shift -= 2
    return threshold, count


@triton.jit
def _admit_ties(is_tie, num_ties_admitted):
    """Keep the first ties in position-major order; at most one position is split."""
    ties_per_step = tl.sum(is_tie.to(tl.int32), axis=1)
    allowed = num_ties_admitted - (tl.cumsum(ties_per_step, axis=0) - ties_per_step)
    is_split = (allowed > 0) & (allowed < ties_per_step)
    split_ties = tl.sum((is_tie & is_split[:, None]).to(tl.int32), axis=0)
    rank = tl.cumsum(split_ties, axis=0)  # 1-based, by row, within that position
    quota = allowed[:, None]
    return is_tie & tl.where(is_split[:, None], rank[None, :] <= quota, quota > 0)


@triton.jit(
    do_not_specialize=_RUNTIME_ARGS, do_not_specialize_on_alignment=_TENSOR_ARGS
)
def _admit_drafts_kernel(
    confidence_ptr,  # [num_slots, num_steps] float32
    idx_mapping_ptr,  # [num_reqs]
    scheduled_drafts_ptr,  # [num_reqs]
    num_non_draft_tokens_ptr,  # [num_reqs]
    capacities_ptr,  # [>= num_reqs], written
    cu_num_logits_ptr,  # [>= num_reqs + 1], written
    query_start_loc_ptr,  # [num_offsets], written
    confidence_stride,
    num_slots,
    num_steps,
    num_reqs,
    num_offsets,
    draft_budget,
    key_floor,
    num_bonus_tokens,
    ROW_BLOCK: tl.constexpr,
    STEP_BLOCK: tl.constexpr,
):
    """Admit drafts and write the offsets of the compacted batch.

    Grid: (1,). The ranking is global, and the tile is small enough for one block.
    Ties: earlier position first, then lower row.
    """
    rows = tl.arange(0, ROW_BLOCK)
    is_row = rows < num_reqs
    slots = tl.load(idx_mapping_ptr + rows, mask=is_row, other=-1).to(tl.int64)
    num_drafts = tl.load(scheduled_drafts_ptr + rows, mask=is_row, other=0)
    non_draft = tl.load(num_non_draft_tokens_ptr + rows, mask=is_row, other=0)
    # A padded row (-1) must not read another request's confidences.
    has_slot = (slots >= 0) & (slots < num_slots)
    num_drafts = tl.where(has_slot, tl.minimum(num_drafts, num_steps), 0)

    keys = _load_survival_keys(
        confidence_ptr, slots, num_drafts, confidence_stride, ROW_BLOCK, STEP_BLOCK
    )
    num_eligible = _count_slots(keys >= key_floor)
    num_admitted = tl.minimum(draft_budget, num_eligible)
    threshold = key_floor
    count = num_eligible
    if num_admitted < num_eligible:
        threshold, count = _find_key_threshold(keys, num_admitted, num_eligible)
    is_admitted = keys >= threshold
    if count > num_admitted:
        is_tie = keys == threshold
        num_ties_admitted = num_admitted - (count - _count_slots(is_tie))
        is_admitted = (keys > threshold) | _admit_ties(is_tie, num_ties_admitted)

    capacities = tl.sum(is_admitted.to(tl.int32), axis=0)
    tl.store(capacities_ptr + rows, capacities, mask=is_row)
    # Both prefix sums in one scan: neither is negative, so no carry crosses over.
    packed = (capacities + num_bonus_tokens).to(tl.int64) << 32
    packed = tl.cumsum(packed + (capacities + non_draft).to(tl.int64), axis=0)
    tl.store(cu_num_logits_ptr + 1 + rows, (packed >> 32).to(tl.int32), mask=is_row)
    tl.store(query_start_loc_ptr + 1 + rows, packed.to(tl.int32), mask=is_row)
    tl.store(cu_num_logits_ptr, 0)
    tl.store(query_start_loc_ptr, 0)
    # Graphs replay more rows than requests: the rest must be empty and in range.
    num_tokens = tl.sum(non_draft, axis=0) + draft_budget
    for start in range(num_reqs + 1, num_offsets, ROW_BLOCK):
        offsets = start + rows
        tl.store(query_start_loc_ptr + offsets, num_tokens, mask=offsets < num_offsets)


def admit_drafts(
    confidence_probs: torch.Tensor,
    idx_mapping: torch.Tensor,
    scheduled_drafts: torch.Tensor,
    num_non_draft_tokens: torch.Tensor,
    draft_budget: int,
    *,
    num_bonus_tokens: int,
    fill_budget: bool,
    capacities_out: torch.Tensor,
    cu_num_logits_out: torch.Tensor,
    query_start_loc_out: torch.Tensor,
    min_survival: float = 0.0,
) -> None:
    """Admit the best drafts and write the batch offsets, into the outputs given.

    One launch, no allocation, no host synchronisation; safe to capture in a graph
    (the budget is then frozen). CPU tensors run the kernel under Triton's
    interpreter where that is on, else the reference.

    ``fill_budget=True`` also spends what is left of the budget on the slots below
    the floor, in rank order (for survival 0: earlier position, then lower row), so
    that the capacities sum to exactly ``min(draft_budget, scheduled drafts)``. The
    engine needs this: the host has already shaped the batch for the whole budget,
    and a shortfall would leave rows that no request owns. It stays lossless and
    non-anticipating: a filled draft takes the same rejection test as any other; the
    budget does not depend on the confidences of these drafts; and the later slots
    of a row always rank below (r, k), so whether (r, k) is admitted depends, within
    its request, on confidences up to k alone: on tokens before it, never on the
    token judged.

    Args:
        confidence_probs: P(draft k accepted given k - 1 accepted) by request slot.
            Shape [S, K], float32, K <= 16; rows may be strided.
        idx_mapping: Batch row to request slot. Shape [R], int32 or int64, R <= 4096.
            A row outside [0, S) (padding is -1) counts as having no drafts.
        scheduled_drafts: Drafts that may be admitted. Shape [R], int32; above K
            counts as K, below 0 as 0.
        num_non_draft_tokens: Tokens of each row that are not drafts. Shape [R], int32.
        draft_budget: Most drafts to admit over the batch, at most 2**30; below 0
            counts as 0.
        num_bonus_tokens: Logits of each row beyond its drafts.
        fill_budget: Spend the whole budget, see above.
        capacities_out: Drafts admitted. Shape [>= R], int32; only [:R] is written.
        cu_num_logits_out: 0, then the running sum of capacity + bonus. Shape
            [>= R + 1], int32; only [:R + 1] is written.
        query_start_loc_out: 0, then the running sum of capacity + non-draft tokens.
            Shape [>= R + 1], int32; all entries after R become
            ``num_non_draft_tokens.sum() + draft_budget``.
        min_survival: Slots below it count like survival 0. 0 = off. In [0, 1].

    Raises:
        TypeError: The budget is no integer.
        ValueError: A shape, dtype, device, layout or range is not as above.

    Source: DESIGN.md, 3.3; ranking and TP ties: vllm
        v1/worker/gpu/spec_decode/adaptive_verification.py:46@v0.33.0 (the same set
        where survivals differ; there ties and zeros are left open).
    """
    inputs = (idx_mapping, scheduled_drafts, num_non_draft_tokens)
    outputs = (capacities_out, cu_num_logits_out, query_start_loc_out)
    draft_budget = check_admission(
        confidence_probs, inputs, outputs, draft_budget, num_bonus_tokens, min_survival
    )
    num_reqs = idx_mapping.shape[0]
    num_slots, num_steps = confidence_probs.shape
    if not runs_admission_kernel(confidence_probs.device):
        admit_drafts_reference(
            confidence_probs,
            *inputs,
            draft_budget,
            num_bonus_tokens=num_bonus_tokens,
            fill_budget=fill_budget,
            capacities_out=capacities_out,
            cu_num_logits_out=cu_num_logits_out,
            query_start_loc_out=query_start_loc_out,
            min_survival=min_survival,
        )
        return
    row_block, step_block = _pick_blocks(num_reqs, num_steps)
    _admit_drafts_kernel[(1,)](
        confidence_probs,
        *inputs,
        *outputs,
        confidence_probs.stride(0),
        num_slots,
        num_steps,
        num_reqs,
        query_start_loc_out.shape[0],
        draft_budget,
        0 if fill_budget else _survival_key(min_survival),
        num_bonus_tokens,
        ROW_BLOCK=row_block,
        STEP_BLOCK=step_block,
        num_warps=_ROW_BLOCK_WARPS[row_block],
    )


def assign_capacities(
    confidence_probs: torch.Tensor,
    idx_mapping: torch.Tensor,
    scheduled_drafts: torch.Tensor,
    draft_budget: int,
    *,
    admit: AdmitDrafts = admit_drafts,
) -> torch.Tensor:
    """Return how many drafts of each row to verify, by current survival.

    The offline form of ``admit_drafts``: it allocates, and never admits survival 0.

    Args:
        confidence_probs: As in ``admit_drafts``. Shape [S, K], float32.
        idx_mapping: Batch row to request slot, or -1 for padding. Shape [R], int32
            or int64. On a device the values are not looked at, which would cost a
            synchronisation: a row outside [0, S) then counts as padding.
        scheduled_drafts: Drafts that may be admitted. Shape [R], int32.
        draft_budget: Most drafts to admit over the batch.
        admit: Implementation: ``admit_drafts`` or another with its parameters.

    Returns:
        Capacities. Shape [R], int32, on the device of the inputs; 0 for padding.

    Raises:
        IndexError: A CPU ``idx_mapping`` holds a slot outside [-1, S).
        TypeError: The budget is no integer.
        ValueError: As ``admit_drafts``.
    """
    check_budget(draft_budget)
    num_reqs = idx_mapping.shape[0]
    num_offsets = num_reqs + 1
    scratch = scheduled_drafts.new_empty(num_reqs + 2 * num_offsets)
    capacities, *offsets = scratch.split([num_reqs, num_offsets, num_offsets])
    admit(
        confidence_probs,
        idx_mapping,
        scheduled_drafts,
        scheduled_drafts,  # Any int32 [R]: the offsets are thrown away.
        min(draft_budget, num_reqs * MAX_ADMISSION_STEPS),
        num_bonus_tokens=1,
        fill_budget=False,
        capacities_out=capacities,
        cu_num_logits_out=offsets[0],
        query_start_loc_out=offsets[1],
    )
    # Last, because admit_drafts has checked the tensors by now.
    check_slots(idx_mapping, confidence_probs.shape[0])
    return capacities


def runs_admission_kernel(device: torch.device) -> bool:
    """Tell whether tensors of this device reach the kernel, not the reference."""
    is_interpreted = not isinstance(_admit_drafts_kernel, triton.runtime.JITFunction)
    return device.type != "cpu" or is_interpreted


def warm_up(
    max_num_reqs: int,
    num_steps: int,
    device: torch.device,
    idx_dtype: torch.dtype = torch.int64,
    admit: AdmitDrafts = admit_drafts,
) -> None:
    """Compile every variant that batches up to ``max_num_reqs`` can reach.

    Call it at start-up, before graphs are captured: a compilation takes a second or
    so, and one that comes with the first trimmed batch stalls all its requests.

    Args:
        max_num_reqs: Largest R that will be served, at most 4096.
        num_steps: K of the confidences, at most 16.
        device: Where the engine's tensors live.
        idx_dtype: dtype of ``idx_mapping``: int64 (the V2 runner's) or int32.
        admit: Implementation that will serve; a native one loads its code here.

    Raises:
        ValueError: A size is beyond what the kernel takes.
    """
    check_scalars(max_num_reqs, num_steps, 0, 1, 0.0)
    reachable = [n for n in _ROW_BLOCK_WARPS if n < max_num_reqs]
    for num_reqs in {*reachable, max_num_reqs}:
        counts = torch.ones(num_reqs, dtype=torch.int32, device=device)
        assign_capacities(
            torch.ones(1, num_steps, device=device),
            torch.zeros(num_reqs, dtype=idx_dtype, device=device),
            counts,
            num_reqs // 2,
            admit=admit,
        )


def _pick_blocks(num_reqs: int, num_steps: int) -> tuple[int, int]:
    row_block = next(n for n in _ROW_BLOCK_WARPS if num_reqs <= n)
    step_block = next(n for n in _STEP_BLOCKS if num_steps <= n)
    return row_block, step_block


def _survival_key(min_survival: float) -> int:
    """Return the least rank key that is at or above the floor; never that of 0."""
    return max(1, struct.unpack("<i", struct.pack("<f", min_survival))[0])
