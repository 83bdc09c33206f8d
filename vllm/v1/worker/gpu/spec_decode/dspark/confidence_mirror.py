# SPDX-License-Identifier: Apache-2.0
"""Draft confidences: current on the device, one round old on the host.

What the host may see, and when, is :mod:`.survival_history`; here are the device's
view, and the copies from one to the other.

Invariants (pinned by tests/.../dspark/test_confidence_mirror.py):
  * The host never sees confidences of drafts that are still to be judged.
  * A row that no real draft wrote is zero on both sides, so a padded or
    never-drafted request is never admitted ahead of a real draft.
  * A copy that lands after its slot was given to another request is dropped.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu.async_utils import stream
from vllm.v1.worker.gpu.spec_decode.dspark.survival_history import (
    Round,
    SurvivalHistory,
)

logger = init_logger(__name__)

# Rounds in flight: one per step that may be queued, and one being written.
_RING_SIZE = 3


@dataclass(slots=True)
class _Copy:
    """One device-to-host copy in flight."""

    buffer: CpuGpuBuffer
    event: torch.cuda.Event
    round: Round


class ConfidenceMirror(SurvivalHistory):
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
        super().__init__(max_num_reqs, num_speculative_steps)
        shape = (max_num_reqs, num_speculative_steps)
        self.device = device
        self.probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._copy_stream = torch.cuda.Stream(device)
        self._free = deque(
            (
                CpuGpuBuffer(*shape, dtype=torch.float32, device=device),
                torch.cuda.Event(blocking=True, enable_timing=True),
            )
            for _ in range(_RING_SIZE)
        )
        self._in_flight: deque[_Copy] = deque()
        # Receives (serial, ms) between the ends of two publications; None: untimed.
        self.on_step_time: Callable[[int, float], None] | None = None
        self._landed: _Copy | None = None
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
        """Take in every round but the latest, waiting for its copy.

        The wait is on an event, never a poll: ranks that polled could see
        different rounds and choose different budgets.
        """
        while len(self._in_flight) > 1:
            copy = self._in_flight.popleft()
            with gpu_sync_allowed():
                copy.event.synchronize()
            self._time(copy)
            self.take_in(copy.round, self._read(copy))
            self._free.append((copy.buffer, copy.event))
        self.release()

    def _time(self, copy: _Copy) -> None:
        """Report the time from the last publication's end to this one's."""
        # The last one's event is free by now, but the next publication has yet to
        # take it: events are reused in order.
        last, self._landed = self._landed, copy
        if self.on_step_time is not None and last is not None:
            ms = last.event.elapsed_time(copy.event)
            self.on_step_time(copy.round.serial, ms)

    def _read(self, copy: _Copy) -> np.ndarray:
        probs = copy.buffer.np[copy.round.slots]
        nan = np.isnan(probs[:, : copy.round.draft_depth])
        if nan.any():
            self._warn_nan(int(nan.any(axis=1).sum()))
            probs[:, : copy.round.draft_depth][nan] = 1.0
        return np.clip(probs, 0.0, 1.0, out=probs)

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
        main_stream = torch.cuda.current_stream(self.device)
        if self._in_flight:
            # The last copy reads `self.probs`, which is about to change.
            main_stream.wait_event(self._in_flight[-1].event)
        self.probs[idx_mapping] = probs[: slots.shape[0]]
        if not self._free:
            self.land()
        buffer, event = self._free.popleft()
        if self._landed is not None and self._landed.event is event:
            # Two publications without landing: the last end is about to be lost.
            self._landed = None
        self._copy_stream.wait_stream(main_stream)
        with stream(self._copy_stream, main_stream):
            buffer.cpu.copy_(self.probs, non_blocking=True)
            event.record()
        published = self.begin_round(slots, draft_depth)
        self._in_flight.append(_Copy(buffer, event, published))

    def restart(self) -> None:
        """Begin publishing after steps that did not publish; see the base class."""
        # Unread copies need no wait: the copy stream is in order, so a reused
        # buffer is written after them, and nothing reads them any more.
        while self._in_flight:
            copy = self._in_flight.popleft()
            self._free.append((copy.buffer, copy.event))
        self._landed = None
        super().restart()
