# SPDX-License-Identifier: Apache-2.0
"""Measured times of published steps: rank 0's, on every rank.

A step's time is the interval between the ends of its own and the last publication's
copy of confidences, so it holds whatever a step costs, gaps included. Both events
exist for the mirror's sake and have been waited for: nothing is recorded, launched or
waited for in order to measure.

Several ranks measure several times. Every ``EXCHANGE_INTERVAL`` publications rank 0's
are broadcast on the device and copied to the host, to be read one interval later;
all ranks count publications alike, so they do it in the same step.

Invariants (pinned by tests/.../dspark/test_step_times.py):
  * ``take`` returns equal times in equal steps on every rank.
  * One rank broadcasts nothing.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.utils.gpu_sync_debug import gpu_sync_allowed

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

# Publications between broadcasts: a few launches of some bytes, amortised.
EXCHANGE_INTERVAL = 32


class StepTimes:
    """Per step: ``take``, any number of ``add``, ``exchange``.

    Args:
        group: The tensor-parallel group.
        device: Device of the group's broadcasts.
    """

    def __init__(self, group: "GroupCoordinator", device: torch.device):
        self._group = group
        self._ready: list[tuple[int, float]] = []
        self._own: list[tuple[int, float]] = []
        self._sent: list[int] = []
        if group.world_size == 1:
            return
        size, pinned = EXCHANGE_INTERVAL, device.type == "cuda"
        self._device_ms = torch.zeros(size, dtype=torch.float32, device=device)
        self._out_ms = torch.zeros(size, dtype=torch.float32, pin_memory=pinned)
        self._in_ms = torch.zeros(size, dtype=torch.float32, pin_memory=pinned)
        self._event = torch.cuda.Event(blocking=True)

    def add(self, serial: int, ms: float) -> None:
        """Note a time that this rank measured.

        Args:
            serial: Number of the publication, equal on every rank.
            ms: Milliseconds.
        """
        target = self._ready if self._group.world_size == 1 else self._own
        target.append((serial, ms))

    def exchange(self, serial: int) -> None:
        """Send rank 0's latest times to every rank; call after every publication."""
        if self._group.world_size == 1 or serial % EXCHANGE_INTERVAL:
            return
        self._receive()
        latest, self._own = self._own[-EXCHANGE_INTERVAL:], []
        if not latest:
            return
        # Every rank lands the same publications in the same step.
        self._sent = [s for s, _ in latest]
        self._out_ms[: len(latest)] = torch.tensor([ms for _, ms in latest])
        self._device_ms.copy_(self._out_ms, non_blocking=True)
        self._group.broadcast(self._device_ms, src=0)
        self._in_ms.copy_(self._device_ms, non_blocking=True)
        self._event.record()

    def _receive(self) -> None:
        if not self._sent:
            return
        with gpu_sync_allowed():
            # An interval ago, so this returns at once; a poll could differ by rank.
            self._event.synchronize()
        times = np.asarray(self._in_ms[: len(self._sent)]).tolist()
        self._ready += zip(self._sent, times, strict=True)
        self._sent = []

    @property
    def num_ready(self) -> int:
        """How many times ``take`` would return."""
        return len(self._ready)

    def take(self) -> list[tuple[int, float]]:
        """Return ``(serial, ms)`` of steps that have not been returned yet."""
        ready, self._ready = self._ready, []
        return ready
