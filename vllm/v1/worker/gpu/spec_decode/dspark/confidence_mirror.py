# SPDX-License-Identifier: Apache-2.0
"""Draft confidences: current on the device, one round old on the host.

Invariants (pinned by tests/.../dspark/test_confidence_mirror.py):
  * The host never sees confidences of drafts that are still to be judged: a row of
    a round is readable only once the same request has been published again, on
    every rank alike. A request that a step left out keeps its drafts, so its row
    stays held although the round is over.
  * A row that no real draft wrote is zero on both sides, so a padded or
    never-drafted request is never admitted ahead of a real draft.
  * Rows whose drafts were made while publishing was off are not fresh; nothing
    may rank them.
  * A copy that lands after its slot was given to another request is dropped.
  * Positions beyond the depth that was drafted carry the learned prior, never the
    leftovers of an older, deeper round.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu.async_utils import stream

logger = init_logger(__name__)

# Conditional acceptance assumed for a request until its first round has landed;
# near the mean of published DSpark checkpoints (arXiv 2607.05147).
PRIOR_CONFIDENCE = 0.8
# Weight of the past in the learned prior, per landed round: a memory of about a
# hundred rounds, some seconds of serving.
PRIOR_DECAY = 0.99
# Rounds' worth of requests that the assumed confidence stands for at the start.
PRIOR_WEIGHT = 8.0
# Rounds in flight: one per step that may be queued, and one being written.
_RING_SIZE = 3


@dataclass(slots=True)
class _Copy:
    """One device-to-host copy in flight."""

    buffer: CpuGpuBuffer
    event: torch.cuda.Event
    slots: np.ndarray
    generations: np.ndarray
    draft_depth: int
    serial: int


@dataclass(slots=True)
class _Landed:
    """Rows of a landed round that the planner may not see yet.

    Attributes:
        slots: Request slots. Shape [R], intp.
        generations: Their generations at the time. Shape [R], int64.
        probs: Confidences without NaN. Shape [R, K], float32.
        draft_depth: Positions that were drafted.
        serial: Number of the round.
        num_reqs: Requests of the whole round.
    """

    slots: np.ndarray
    generations: np.ndarray
    probs: np.ndarray
    draft_depth: int
    serial: int
    num_reqs: int

    def select(self, rows: np.ndarray) -> "_Landed":
        """Return some of the rows. ``rows``: shape [R], bool."""
        return replace(
            self,
            slots=self.slots[rows],
            generations=self.generations[rows],
            probs=self.probs[rows],
        )


class ConfidenceMirror:
    """Keeps the two views in step. Per step: land, read, publish;
    restart after steps that did not publish.

    Args:
        max_num_reqs: Number of request slots.
        num_speculative_steps: Logical depth K.
        device: Device of the drafter's confidences.

    Attributes:
        probs: Current confidences by slot. Shape [max_num_reqs, K], float32, device.
        prior: Survivals assumed where none has landed, from the decayed mean of
            what has. Shape [K], float32.
        num_nan_rows: Rows with a NaN confidence so far.
    """

    def __init__(
        self, max_num_reqs: int, num_speculative_steps: int, device: torch.device
    ):
        shape = (max_num_reqs, num_speculative_steps)
        self.device = device
        self.probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._survival = np.zeros(shape, dtype=np.float32)
        self._prior_weight = np.full(num_speculative_steps, PRIOR_WEIGHT)
        self._prior_sum = self._prior_weight * PRIOR_CONFIDENCE
        self._update_prior()
        self._fresh = np.zeros(max_num_reqs, dtype=bool)
        self._generation = np.zeros(max_num_reqs, dtype=np.int64)
        self._drafted = np.zeros(max_num_reqs, dtype=bool)
        self._copy_stream = torch.cuda.Stream(device)
        self._free = deque(
            (
                CpuGpuBuffer(*shape, dtype=torch.float32, device=device),
                torch.cuda.Event(blocking=True, enable_timing=True),
            )
            for _ in range(_RING_SIZE)
        )
        self._in_flight: deque[_Copy] = deque()
        self._held: list[_Landed] = []
        self._serial = 0
        # Receives (serial, ms) between the ends of two publications; None: untimed.
        self.on_step_time: Callable[[int, float], None] | None = None
        self._landed: _Copy | None = None
        self._last_serial = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_nan_rows = 0

    def reset_slot(self, slot: int, *, publishing: bool) -> None:
        """Forget a slot that was given to a new request.

        Args:
            slot: Request slot.
            publishing: True while rounds are being published; the device row is
                then zeroed at once. Otherwise the slot just stays not fresh.
        """
        self._generation[slot] += 1
        self._drafted[slot] = False
        self._survival[slot] = 0.0
        self._fresh[slot] = publishing
        if publishing:
            self.probs[slot].zero_()

    @property
    def serial(self) -> int:
        """Number of the latest publication, counted alike on every rank."""
        return self._serial

    def all_fresh(self, slots: np.ndarray) -> bool:
        """Return whether every slot's device row belongs to its drafts in hand.

        Args:
            slots: Request slots. Shape [R], intp.
        """
        return bool(self._fresh[slots].all())

    def survival_probs(self, slots: np.ndarray) -> np.ndarray:
        """Return prefix survivals that are one round old, or the prior.

        Args:
            slots: Request slots. Shape [R], intp.

        Returns:
            Shape [R, K], float32; NaN confidences count as 1.
        """
        return self._survival[slots]

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
            self._held.append(self._read(copy))
            self._free.append((copy.buffer, copy.event))
        self._held = [rest for held in self._held if (rest := self._release(held))]

    def _time(self, copy: _Copy) -> None:
        """Report the time from the last publication's end to this one's."""
        # The last one's event is free by now, but the next publication has yet to
        # take it: events are reused in order.
        last, self._landed = self._landed, copy
        if self.on_step_time is not None and last is not None:
            self.on_step_time(copy.serial, last.event.elapsed_time(copy.event))

    def _read(self, copy: _Copy) -> _Landed:
        depth = copy.draft_depth
        probs = copy.buffer.np[copy.slots]
        nan = np.isnan(probs[:, :depth])
        if nan.any():
            self._warn_nan(int(nan.any(axis=1).sum()))
            probs[:, :depth][nan] = 1.0
        np.clip(probs, 0.0, 1.0, out=probs)
        return _Landed(
            copy.slots, copy.generations, probs, depth, copy.serial, len(probs)
        )

    def _release(self, held: _Landed) -> _Landed | None:
        """Take in the rows whose drafts are done with; return those to hold on to."""
        current = self._generation[held.slots] == held.generations
        pending = current & (self._last_serial[held.slots] == held.serial)
        is_held = bool(pending.any())
        done = held.select(~pending) if is_held else held
        done.probs[:, done.draft_depth :] = self._prior_confidence[done.draft_depth :]
        survival = np.cumprod(done.probs, axis=1, dtype=np.float32)
        self._learn_prior(done, survival)
        current = current[~pending]
        self._survival[done.slots[current]] = survival[current]
        return held.select(pending) if is_held else None

    def _learn_prior(self, landed: _Landed, survival: np.ndarray) -> None:
        """Move the prior towards a round's mean confidence per position.

        A request counts at a position as much as it is expected to get there, and
        part of a round counts as that part.
        """
        depth, num_reqs = landed.draft_depth, max(landed.num_reqs, 1)
        reach = np.concatenate(
            (np.ones_like(survival[:, :1]), survival[:, : depth - 1]), axis=1
        )[:, :depth]
        decay = PRIOR_DECAY ** (len(survival) / num_reqs)
        weight, total = self._prior_weight[:depth], self._prior_sum[:depth]
        weight[:] = decay * weight + reach.sum(axis=0) / num_reqs
        total[:] = decay * total + (reach * landed.probs[:, :depth]).sum(0) / num_reqs
        self._update_prior()

    def _update_prior(self) -> None:
        confidence = self._prior_sum / np.maximum(self._prior_weight, 1e-6)
        self._prior_confidence = confidence.astype(np.float32)
        self.prior = np.cumprod(self._prior_confidence, dtype=np.float32)

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
        self._serial += 1
        self._last_serial[slots] = self._serial
        generations = self._generation[slots].copy()
        self._in_flight.append(
            _Copy(buffer, event, slots, generations, draft_depth, self._serial)
        )
        self._fresh[slots] = True
        first = slots[~self._drafted[slots]]
        self._survival[first] = self.prior
        self._drafted[first] = True

    def restart(self) -> None:
        """Begin publishing after steps that did not publish.

        The drafts in hand were made unobserved, so no slot is fresh, and what
        landed before is too old to plan with: the prior stands in.
        """
        # Unread copies need no wait: the copy stream is in order, so a reused
        # buffer is written after them, and nothing reads them any more.
        while self._in_flight:
            copy = self._in_flight.popleft()
            self._free.append((copy.buffer, copy.event))
        self._landed = None
        self._held.clear()
        self._fresh[:] = False
        self._survival[:] = self.prior
        self._drafted[:] = True
