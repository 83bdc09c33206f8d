# SPDX-License-Identifier: Apache-2.0
"""The admission rule in plain loops: the kernel's oracle and the CPU path.

Also the one seeded builder of admission inputs, for tests and benchmarks. The rule
shares no helper with the kernel (capacity.py), so that a mistake must be made
twice to go unseen. Device tensors are copied to the host: never call it while
serving on a GPU.
"""

from dataclasses import dataclass

import numpy as np
import torch


def assign_capacities_reference(
    confidence_probs: torch.Tensor,
    idx_mapping: torch.Tensor,
    scheduled_drafts: torch.Tensor,
    draft_budget: int,
    *,
    fill_budget: bool = False,
    min_survival: float = 0.0,
) -> torch.Tensor:
    """Return how many drafts of each row to verify, by current survival.

    Args:
        confidence_probs: Conditional acceptance by request slot. Shape [S, K], float32.
        idx_mapping: Batch row to request slot, outside [0, S) = no drafts. Shape [R].
        scheduled_drafts: Drafts that may be admitted. Shape [R], int32.
        draft_budget: Most drafts to admit over the batch.
        fill_budget: Spend the rest of the budget on the slots below the floor.
        min_survival: Least survival that is admitted; 0 still excludes survival 0.

    Returns:
        Capacities. Shape [R], int32, on the device of ``idx_mapping``.

    Ties: earlier position first, then lower row.
    """
    confidences = confidence_probs.detach().cpu().numpy()
    slots = idx_mapping.tolist()
    num_slots, num_steps = confidences.shape
    least_survival = float(np.float32(min_survival))
    ranked = []
    for row, num_drafts in enumerate(scheduled_drafts.tolist()):
        if not 0 <= slots[row] < num_slots:
            continue
        survival = np.float32(1.0)
        for step in range(min(num_drafts, num_steps)):
            confidence = confidences[slots[row], step]
            if np.isnan(confidence):
                confidence = np.float32(1.0)
            survival *= min(max(confidence, np.float32(0.0)), np.float32(1.0))
            is_worth_it = survival > 0 and survival >= least_survival
            if fill_budget or is_worth_it:
                ranked.append((-float(survival), step, row))
    ranked.sort()
    capacities = np.zeros(len(slots), dtype=np.int32)
    for _, _, row in ranked[: max(draft_budget, 0)]:
        capacities[row] += 1
    return torch.from_numpy(capacities).to(idx_mapping.device)


def admit_drafts_reference(
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
    """Write capacities and batch offsets, as ``admit_drafts`` documents them.

    Args:
        confidence_probs: Conditional acceptance by request slot. Shape [S, K], float32.
        idx_mapping: Batch row to request slot. Shape [R], int32 or int64.
        scheduled_drafts: Drafts that may be admitted. Shape [R], int32.
        num_non_draft_tokens: Tokens of each row that are not drafts. Shape [R], int32.
        draft_budget: Most drafts to admit over the batch.
        num_bonus_tokens: Logits of each row beyond its drafts.
        fill_budget: Spend the rest of the budget on the slots below the floor.
        capacities_out: Shape [>= R], int32.
        cu_num_logits_out: Shape [>= R + 1], int32.
        query_start_loc_out: Shape [>= R + 1], int32.
        min_survival: Least survival that is admitted.
    """
    capacities = assign_capacities_reference(
        confidence_probs,
        idx_mapping,
        scheduled_drafts,
        draft_budget,
        fill_budget=fill_budget,
        min_survival=min_survival,
    ).tolist()
    num_logits, num_tokens = [0], [0]
    for capacity, non_draft in zip(
        capacities, num_non_draft_tokens.tolist(), strict=True
    ):
        num_logits.append(num_logits[-1] + capacity + num_bonus_tokens)
        num_tokens.append(num_tokens[-1] + capacity + non_draft)
    total = int(num_non_draft_tokens.sum()) + max(draft_budget, 0)
    num_padded = query_start_loc_out.shape[0] - len(num_tokens)
    _write(capacities_out, capacities)
    _write(cu_num_logits_out, num_logits)
    _write(query_start_loc_out, num_tokens + [total] * num_padded)


def _write(out: torch.Tensor, values: list[int]) -> None:
    out[: len(values)] = torch.tensor(values, dtype=out.dtype, device=out.device)


@dataclass(frozen=True)
class AdmissionInputs:
    """What ``admit_drafts`` reads, in its order."""

    confidence_probs: torch.Tensor
    """P(draft k accepted given k - 1 accepted). Shape [S, K], float32."""
    idx_mapping: torch.Tensor
    """Batch row to request slot, -1 for a padded row. Shape [R], int32."""
    scheduled_drafts: torch.Tensor
    """Drafts that may be admitted, 0 to K. Shape [R], int32."""
    num_non_draft_tokens: torch.Tensor
    """Other tokens of each row, at least 1. Shape [R], int32."""

    @property
    def num_drafts(self) -> int:
        """Drafts that belong to a request: what an unlimited budget can buy."""
        return int(self.scheduled_drafts[self.idx_mapping >= 0].sum())


# Value families: name -> maker of [S, K] confidences.
CONFIDENCE_FAMILIES = {
    "random": lambda rng, shape: rng.random(shape),
    "confident": lambda rng, shape: rng.beta(4.0, 1.0, shape),
    "tied": lambda rng, shape: rng.integers(0, 5, shape) / 4,
    "ones": lambda rng, shape: np.ones(shape),
    "zeros": lambda rng, shape: np.zeros(shape),
    "one_hot": lambda rng, shape: (
        np.arange(shape[0])[:, None] == rng.integers(shape[0]) + np.zeros(shape[1])
    ),
    "subnormal": lambda rng, shape: rng.random(shape) * 10.0 ** -rng.integers(8, 20),
    # Neighbours of one float32: a reassociated product ranks them differently.
    "neighbours": lambda rng, shape: 0.7 + rng.integers(-2, 3, shape) * 2.0**-24,
    "broken": lambda rng, shape: rng.choice(
        [np.nan, np.inf, -np.inf, -0.0, 0.0, -1.0, 0.5, 1.0, 1.5, 1e-45], shape
    ),
}


def make_admission_inputs(
    num_reqs: int,
    num_steps: int,
    *,
    family: str = "confident",
    seed: int = 0,
    is_ragged: bool = True,
) -> AdmissionInputs:
    """Build seeded inputs on the CPU.

    Args:
        num_reqs: Rows of the batch, R. There are R + 2 request slots.
        num_steps: Draft positions, K.
        family: A key of ``CONFIDENCE_FAMILIES``.
        seed: Of all random values.
        is_ragged: Draw scheduled drafts from 0 to K and pad about one row in 16;
            else every row has K drafts and a slot.

    Returns:
        Tensors as ``AdmissionInputs`` documents, on the CPU.
    """
    rng = np.random.default_rng(seed)
    num_slots = num_reqs + 2
    probs = CONFIDENCE_FAMILIES[family](rng, (num_slots, num_steps))
    slots = rng.permutation(num_slots)[:num_reqs]
    scheduled = np.full(num_reqs, num_steps)
    non_draft = np.ones(num_reqs)
    if is_ragged:
        slots = np.where(rng.random(num_reqs) < 1 / 16, -1, slots)
        scheduled = rng.integers(0, num_steps + 1, num_reqs)
        non_draft = rng.integers(1, 9, num_reqs)
    return AdmissionInputs(
        torch.from_numpy(np.asarray(probs, dtype=np.float32)),
        *(torch.from_numpy(x.astype(np.int32)) for x in (slots, scheduled, non_draft)),
    )
