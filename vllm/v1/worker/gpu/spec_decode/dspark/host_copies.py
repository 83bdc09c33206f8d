# SPDX-License-Identifier: Apache-2.0
"""Host copies of what every step publishes, read one step later, and step times.

Invariants (pinned by tests/.../dspark/test_confidence_mirror.py and
test_acceptance_mirror.py):
  * The host waits on events and never polls: ranks that polled could see different
    rounds and decide differently.
  * The latest copy is never landed.
  * Only the time between publications of consecutive steps is reported.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.utils import CpuGpuBuffer

# In flight are up to two of a quiet period and the last one before it; the fourth is
# the last that landed, whose end is where the next one's time begins.
_RING_SIZE = 4

RoundT = TypeVar("RoundT")


@dataclass(slots=True)
class HostCopy(Generic[RoundT]):
    """One device-to-host copy in flight.

    Attributes:
        buffer: Where it goes.
        event: Recorded behind it.
        serial: Number of its publication.
        round: What the host knows about it.
        num_steps: Steps since the publication before it; 1 if that was the last step.
    """

    buffer: CpuGpuBuffer
    event: torch.cuda.Event
    serial: int
    round: RoundT
    num_steps: int


class HostCopies(Generic[RoundT]):
    """A ring of host buffers. Per step: ``_landed_copies``, then ``_take_buffer`` and
    ``_start``; ``_drop_copies`` after steps that did not publish.

    Args:
        shape: Shape of a copy.
        dtype: Its type.
        device: Device that is copied from.

    Attributes:
        on_step_time: Receives (serial, ms) between the ends of two publications of
            consecutive steps; None: untimed.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ):
        self.device = device
        self.on_step_time: Callable[[int, float], None] | None = None
        self._free = deque(
            (
                CpuGpuBuffer(*shape, dtype=dtype, device=device),
                torch.cuda.Event(blocking=True, enable_timing=True),
            )
            for _ in range(_RING_SIZE)
        )
        self._in_flight: deque[HostCopy[RoundT]] = deque()
        self._landed: HostCopy[RoundT] | None = None
        self._num_steps = 1

    def skip_step(self) -> None:
        """Note that a step was not published: the next one's time is not its own."""
        self._num_steps += 1

    def _landed_copies(self) -> Iterator[HostCopy[RoundT]]:
        """Yield every copy but the latest, in order, waiting for each."""
        while len(self._in_flight) > 1:
            copy = self._in_flight.popleft()
            with gpu_sync_allowed():
                copy.event.synchronize()
            self._time(copy)
            yield copy
            self._free.append((copy.buffer, copy.event))

    def _time(self, copy: HostCopy[RoundT]) -> None:
        """Report the time from the last publication's end to this one's."""
        # The last one's event is free by now, but the next publication has yet to
        # take it: events are reused in order.
        last, self._landed = self._landed, copy
        if self.on_step_time is None or last is None:
            return
        if copy.num_steps == 1:
            self.on_step_time(copy.serial, last.event.elapsed_time(copy.event))

    def _take_buffer(self) -> tuple[CpuGpuBuffer, torch.cuda.Event]:
        """Return a free buffer and its event; the caller has landed what it can."""
        buffer, event = self._free.popleft()
        if self._landed is not None and self._landed.event is event:
            # Two publications without landing: the last end is about to be lost.
            self._landed = None
        return buffer, event

    def _start(
        self, buffer: CpuGpuBuffer, event: torch.cuda.Event, serial: int, round_: RoundT
    ) -> None:
        """Note that a copy was queued and its event recorded behind it."""
        copy = HostCopy(buffer, event, serial, round_, self._num_steps)
        self._in_flight.append(copy)
        self._num_steps = 1

    def _drop_copies(self) -> None:
        """Forget the copies in flight."""
        # They need no wait: a stream is in order, so a reused buffer is written
        # after them, and nothing reads them any more.
        while self._in_flight:
            copy = self._in_flight.popleft()
            self._free.append((copy.buffer, copy.event))
        self._landed, self._num_steps = None, 1
