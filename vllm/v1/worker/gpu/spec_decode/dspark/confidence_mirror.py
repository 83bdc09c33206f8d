# SPDX-License-Identifier: Apache-2.0
"""Draft confidences: current on the device, one round old on the host.

What the host may see, and when, is :mod:`.survival_history`; here are the device's
view, and the copies from one to the other.

Invariants (pinned by tests/.../dspark/test_confidence_mirror.py):
  * The host never sees confidences of drafts that are still to be judged.
  * A row that no real draft wrote is zero on both sides, so a padded or
    never-drafted request is never admitted ahead of a real draft.
  * A copy that lands after its slot was given to another request is dropped.
  * Everything runs on the main stream, in order: no write overtakes a copy.
"""

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.dspark.host_copies import HostCopies
from vllm.v1.worker.gpu.spec_decode.dspark.survival_history import (
    Round,
    SurvivalHistory,
)

logger = init_logger(__name__)


class ConfidenceMirror(HostCopies[Round], SurvivalHistory):
    """Keeps the two views in step. Per step: land, read, publish;
    restart after steps that did not publish.

    Args:
        max_num_reqs: Number of request slots.
        num_speculative_steps: Logical depth K.
        device: Device of the drafter's confidences.

    Attributes:
        probs: Current confidences by slot. Shape [max_num_reqs, K], float32, device.
        num_nan_rows: Rows with a NaN confidence so far.
    """

    def __init__(
        self, max_num_reqs: int, num_speculative_steps: int, device: torch.device
    ):
        shape = (max_num_reqs, num_speculative_steps)
        SurvivalHistory.__init__(self, *shape)
        HostCopies.__init__(self, shape, torch.float32, device)
        self.probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._sliced = self.probs, max_num_reqs, self.probs
        self.num_nan_rows = 0

    def reset_slot(self, slot: int, *, publishing: bool) -> None:
        """Forget a slot that was given to a new request.

        Args:
            slot: Request slot.
            publishing: True while rounds are being published; the device row is
                then zeroed at once. Otherwise the slot just stays not fresh.
        """
        super().reset_slot(slot, publishing=publishing)
        if publishing:
            self.probs[slot].zero_()

    def land(self) -> None:
        """Take in every round but the latest, waiting for its copy."""
        for copy in self._landed_copies():
            # In batch order, as it was copied.
            self.take_in(copy.round, copy.buffer.np[: copy.round.num_reqs])
        self.release()

    def _mend(self, probs: np.ndarray) -> None:
        self._warn_nan(int(np.isnan(probs).any(axis=1).sum()))
        super()._mend(probs)

    def _warn_nan(self, num_rows: int) -> None:
        self.num_nan_rows += num_rows
        logger.warning_once(
            "The draft model's confidence head returned NaN; the affected requests "
            "have all their drafts verified. Check the draft checkpoint's "
            "confidence_head weights (dtype overflow or a missing tensor)."
        )

    def publish(
        self,
        probs: torch.Tensor,
        idx_mapping: torch.Tensor,
        slots: np.ndarray,
        draft_depth: int,
    ) -> None:
        """Store this round's confidences and start their copy to the host.

        Args:
            probs: Confidences in batch order; columns beyond ``draft_depth`` are
                not read by anybody. Shape [>= R, K], float32, device.
            idx_mapping: Batch row to slot. Shape [R], int64, device.
            slots: The same mapping on the host. Shape [R], intp.
            draft_depth: Positions that were drafted.
        """
        if not self._free:
            self.land()
        buffer, event = self._take_buffer()
        rows, num_reqs = self._rows_of(probs, len(slots)), len(slots)
        self.probs.index_copy_(0, idx_mapping, rows)
        # On the main stream: some kilobytes, and a side stream would cost more host
        # time than it hides.
        buffer.cpu[:num_reqs].copy_(rows, non_blocking=True)
        event.record()
        published = self.begin_round(slots, draft_depth)
        self._start(buffer, event, published.serial, published)

    def skip_step(self) -> None:
        """Note that a step was not published; see the base classes."""
        HostCopies.skip_step(self)
        SurvivalHistory.skip_step(self)

    def _rows_of(self, probs: torch.Tensor, num_reqs: int) -> torch.Tensor:
        """Return the first rows. The drafter's tensor is the same in every step."""
        whole, size, rows = self._sliced
        if whole is not probs or size != num_reqs:
            rows = probs[:num_reqs]
            self._sliced = probs, num_reqs, rows
        return rows

    def restart(self) -> None:
        """Begin publishing after steps that did not publish; see the base class."""
        self._drop_copies()
        super().restart()
