# SPDX-License-Identifier: Apache-2.0
"""State and oracle of confidence calibration: plain loops, also the CPU path.

Shares no arithmetic with the kernels (:mod:`.sts_kernels`) but the constants.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch

from vllm.v1.worker.gpu.spec_decode.dspark import sts_fit

MAX_STS_STEPS = 16
# Graded rows kept of each class. At DECAY the oldest weighs a fiftieth of the newest.
RING_ROWS = 4096
# A stamp holds the depth in its low bits.
DEPTH_BITS = 5
NO_CAPACITY = 1 << 30


@dataclass(frozen=True, slots=True)
class JudgedDrafts:
    """What one step verified, in batch order, on the device.

    Attributes:
        slots: Request slots. Shape [R], int64.
        num_sampled: Accepted drafts plus one; 0 while prefilling. Shape [R], int32.
        num_rejected: Verified drafts that were not accepted. Shape [R], int32.
        capacities: Drafts that were really judged, where ``num_rejected`` counts
            masked ones as well; None elsewhere. Shape [R], int32.
        excluded: Nonzero for rows that a grammar steered; None for no such row.
            Shape [R], int32.
    """

    slots: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    capacities: torch.Tensor | None = None
    excluded: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DraftRing:
    """Raw logits of the drafts in hand by slot, and the graded rows by class.

    Attributes:
        slot_logits: Shape [S, K], float32.
        slot_stamp: ``(stamp << 5) | depth`` of a slot's logits; 0 is none.
            Shape [S], int64.
        logits: Shape [2, RING_ROWS, K], float32; 0 beyond what was verified.
        accepted: Shape [2, RING_ROWS], int32.
        verified: Shape [2, RING_ROWS], int32.
        num_rows: Rows graded so far; row i lies at ``i % RING_ROWS``. Shape [2],
            int64.
    """

    slot_logits: torch.Tensor
    slot_stamp: torch.Tensor
    logits: torch.Tensor
    accepted: torch.Tensor
    verified: torch.Tensor
    num_rows: torch.Tensor

    @classmethod
    def empty(
        cls, num_slots: int, num_steps: int, device: torch.device | str
    ) -> "DraftRing":
        """Return a ring without rows."""

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(num_slots, num_steps, dtype=torch.float32),
            zeros(num_slots, dtype=torch.int64),
            zeros(2, RING_ROWS, num_steps, dtype=torch.float32),
            zeros(2, RING_ROWS, dtype=torch.int32),
            zeros(2, RING_ROWS, dtype=torch.int32),
            zeros(2, dtype=torch.int64),
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors in the order of the attributes."""
        return [getattr(self, f.name) for f in fields(self)]

    def clear(self) -> None:
        """Forget everything, in place."""
        for tensor in self.tensors():
            tensor.zero_()

    def graded_rows(self, group: int) -> sts_fit.GradedRows:
        """Return one class's rows on the host, oldest first (synchronises)."""
        total = int(self.num_rows[group])
        kept = np.arange(max(total - RING_ROWS, 0), total) % RING_ROWS
        return sts_fit.GradedRows(
            self.logits[group].cpu().numpy()[kept],
            self.accepted[group].cpu().numpy()[kept],
            self.verified[group].cpu().numpy()[kept],
        )


def calibrate_confidences_reference(
    slots: torch.Tensor,
    temperature: torch.Tensor,
    calibration: torch.Tensor,
    *,
    probs_out: torch.Tensor,
    logits_out: torch.Tensor,
) -> None:
    """See ``sts_kernels.calibrate_confidences``."""
    for row, slot in enumerate(slots.tolist()):
        known = 0 <= slot < len(temperature)
        group = int(known and float(temperature[slot]) > 0.0)
        for step in range(probs_out.shape[1]):
            prob = probs_out[row, step].clone()
            logit = torch.logit(prob, eps=1e-6).clamp(
                -sts_fit.MAX_LOGIT, sts_fit.MAX_LOGIT
            )
            scale, bias, bend = calibration[group, :, step]
            logits_out[row, step] = logit
            # In float64, where the hyperbolic cosine of any u is finite.
            u = (scale * logit + bias).double()
            calibrated = u + 2.0 * bend * torch.log(torch.cosh(0.5 * u))
            probs_out[row, step] = torch.sigmoid(calibrated)


def observe_drafts_reference(
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
    """See ``sts_kernels.observe_drafts``."""
    ring = ring_out
    for row, slot in enumerate(judged.slots.tolist()):
        _grade(
            judged, row, slot, temperature, ring, stamp, sample_stride, sample_offset
        )
        ring.slot_logits[slot, :draft_depth] = new_logits[row, :draft_depth]
        ring.slot_stamp[slot] = (stamp << DEPTH_BITS) | draft_depth


def _grade(
    judged: JudgedDrafts,
    row: int,
    slot: int,
    temperature: torch.Tensor,
    ring: DraftRing,
    stamp: int,
    sample_stride: int,
    sample_offset: int,
) -> None:
    old_stamp = int(ring.slot_stamp[slot])
    if (row + sample_offset) % sample_stride or old_stamp >> DEPTH_BITS != stamp:
        return
    if judged.excluded is not None and int(judged.excluded[row]):
        return
    accepted = int(judged.num_sampled[row]) - 1
    verified = accepted + int(judged.num_rejected[row])
    verified = min(verified, old_stamp & ((1 << DEPTH_BITS) - 1))
    if judged.capacities is not None:
        verified = min(verified, int(judged.capacities[row]))
    logits = ring.slot_logits[slot].clone()
    for step in range(max(verified, 0)):
        if torch.isnan(logits[step]):
            verified = step
            break
    if verified <= 0:
        return
    group = int(float(temperature[slot]) > 0.0)
    cell = int(ring.num_rows[group]) % RING_ROWS
    logits[verified:] = 0.0
    ring.logits[group, cell] = logits
    ring.accepted[group, cell] = min(accepted, verified)
    ring.verified[group, cell] = verified
    ring.num_rows[group] += 1


def fit_confidences_reference(
    ring: DraftRing, prior: torch.Tensor, *, calibration_out: torch.Tensor
) -> None:
    """See ``sts_kernels.fit_confidences``."""
    for group in range(calibration_out.shape[0]):
        fitted = sts_fit.fit_calibration(
            ring.graded_rows(group),
            calibration_out[group].cpu().numpy(),
            prior[group].cpu().numpy(),
        )
        calibration_out[group] = torch.from_numpy(fitted).to(calibration_out)
