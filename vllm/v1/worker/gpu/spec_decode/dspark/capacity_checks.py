# SPDX-License-Identifier: Apache-2.0
"""What draft admission accepts, and the errors for all else."""

from typing import NoReturn

import numpy as np
import torch

# Largest blocks that the kernel is compiled for (capacity.py).
MAX_ADMISSION_REQS = 4096
MAX_ADMISSION_STEPS = 16
# The budget is an int32 in the kernel, where token counts are added to it.
_MAX_DRAFT_BUDGET = 2**30
# The order of check_tensors: three inputs, three outputs.
_VECTOR_NAMES = (
    "idx_mapping",
    "scheduled_drafts",
    "num_non_draft_tokens",
    "capacities_out",
    "cu_num_logits_out",
    "query_start_loc_out",
)


def check_admission(
    confidence_probs: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, ...],
    draft_budget: int,
    num_bonus_tokens: int,
    min_survival: float,
) -> int:
    """Check all that an implementation of ``admit_drafts`` is given.

    Args:
        confidence_probs: As for :func:`check_tensors`.
        inputs: As for :func:`check_tensors`.
        outputs: As for :func:`check_tensors`.
        draft_budget: Most drafts to admit; below 0 counts as 0.
        num_bonus_tokens: Logits of each row beyond its drafts.
        min_survival: Least survival that is admitted, a probability.

    Returns:
        The budget, at least 0.

    Raises:
        TypeError: The budget is no integer.
        ValueError: Anything else is not as documented; the message names it.
    """
    check_tensors(confidence_probs, inputs, outputs)
    check_budget(draft_budget)
    draft_budget = max(int(draft_budget), 0)
    check_scalars(
        inputs[0].shape[0],
        confidence_probs.shape[1],
        draft_budget,
        num_bonus_tokens,
        min_survival,
    )
    return draft_budget


def check_scalars(
    num_reqs: int,
    num_steps: int,
    draft_budget: int,
    num_bonus_tokens: int,
    min_survival: float,
) -> None:
    """Check sizes and numbers.

    Args:
        num_reqs: Rows of the batch, R.
        num_steps: Draft positions, K.
        draft_budget: Most drafts to admit.
        num_bonus_tokens: Logits of each row beyond its drafts.
        min_survival: Least survival that is admitted, a probability.

    Raises:
        ValueError: One is out of range; the message names it and the range.
    """
    bounds = (
        ("the number of rows", num_reqs, 0, MAX_ADMISSION_REQS, "lower max_num_seqs"),
        (
            "the number of draft positions",
            num_steps,
            1,
            MAX_ADMISSION_STEPS,
            "lower num_speculative_tokens",
        ),
        ("draft_budget", draft_budget, 0, _MAX_DRAFT_BUDGET, "use the drafts' sum"),
        ("num_bonus_tokens", num_bonus_tokens, 0, 2**15, "use 1"),
        ("min_survival", min_survival, 0.0, 1.0, "use 0.0 for no floor"),
    )
    for name, value, low, high, way_out in bounds:
        if not low <= value <= high:  # Also true for NaN.
            raise ValueError(
                f"Draft admission: {name} is {value}, but {low} to {high} is "
                f"allowed; {way_out}."
            )


def check_budget(draft_budget: int) -> None:
    """Check the type of a budget, before any arithmetic with it.

    Raises:
        TypeError: It is no integer; a fraction of a draft cannot be admitted, and a
            tensor would have to be read from the device.
    """
    is_bool = isinstance(draft_budget, bool)
    if isinstance(draft_budget, (int, np.integer)) and not is_bool:
        return
    raise TypeError(
        f"Draft admission: draft_budget is {draft_budget!r}, a "
        f"{type(draft_budget).__name__}, but an integer is needed; use int(...)."
    )


def check_slots(idx_mapping: torch.Tensor, num_slots: int) -> None:
    """Check request slots, of a CPU tensor only: a device would have to be waited for.

    Args:
        idx_mapping: Batch row to request slot. Shape [R], int32 or int64.
        num_slots: Rows of the confidences, S.

    Raises:
        IndexError: A slot of a CPU tensor is neither -1 (padding) nor in [0, S).
    """
    if idx_mapping.device.type != "cpu":
        return
    wrong = ((idx_mapping < -1) | (idx_mapping >= num_slots)).nonzero()
    if wrong.numel():
        row = int(wrong[0])
        raise IndexError(
            f"Draft admission: idx_mapping[{row}] is {int(idx_mapping[row])}, but "
            f"confidence_probs has {num_slots} rows: 0 to {num_slots - 1} is allowed, "
            "and -1 for padding; pass the slot of each batch row."
        )


def check_tensors(
    confidence_probs: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, ...],
) -> None:
    """Check layout, dtype and device of what ``admit_drafts`` is given.

    Args:
        confidence_probs: Should be [S, K] float32 with unit column stride.
        inputs: idx_mapping, scheduled_drafts, num_non_draft_tokens; each [R].
        outputs: capacities, cu_num_logits, query_start_loc; [>= R], twice [>= R + 1].

    Raises:
        ValueError: One differs; the message names it, what came and what is needed.
    """
    if (
        confidence_probs.ndim != 2
        or confidence_probs.dtype != torch.float32
        or (confidence_probs.stride(1) != 1 and confidence_probs.shape[1] != 1)
    ):
        _refuse("confidence_probs", confidence_probs, "[S, K] float32, column stride 1")
    device = confidence_probs.device
    num_reqs = inputs[0].numel()
    # This runs in every step: plain comparisons, and words only for an error.
    for index, tensor in enumerate(inputs + outputs):
        size = tensor.shape[0] if tensor.ndim == 1 else -1
        least = num_reqs + 1 if index > 3 else num_reqs
        if (
            size < least
            or (index < 3 and size != num_reqs)
            or (tensor.dtype != torch.int32 and (index or tensor.dtype != torch.int64))
            or not tensor.is_contiguous()
            or tensor.device != device
        ):
            shape = f"[{num_reqs}]" if index < 3 else f"[>= {least}]"
            dtype = "int32" if index else "int32 or int64"
            needed = f"{shape} {dtype}, contiguous, on {device} like confidence_probs"
            _refuse(_VECTOR_NAMES[index], tensor, needed)


def _refuse(name: str, tensor: torch.Tensor, needed: str) -> NoReturn:
    raise ValueError(
        f"Draft admission: {name} is {list(tensor.shape)} {tensor.dtype}, strides "
        f"{tensor.stride()}, on {tensor.device}; pass {needed}."
    )
