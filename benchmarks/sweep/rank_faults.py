# SPDX-License-Identifier: Apache-2.0
"""Faults and timelines inside the ranks of one engine, for check_tensor_parallel.py."""

import types
from typing import Any

from benchmarks.sweep.worker import SweepWorkerExtension


class RankFaultExtension(SweepWorkerExtension):
    """Worker extension that makes ranks disagree and times their broadcasts."""

    rank: int

    def fault_inject(self, drifts: bool, loses_broadcast: bool) -> None:
        """Change every other rank's confidences, each step in another way.

        In turn by one unit in the last place, to their complement, and to NaN in
        every second row; on the device and without waiting for it.

        Args:
            drifts: Whether ranks other than 0 drift.
            loses_broadcast: Whether the broadcast that would undo it is left out.
        """
        manager = self.model_runner.capacity
        self._num_drifted = self._num_active = 0
        finish_step = manager.finish_step

        def drifted_finish_step(probs: Any, *args: Any) -> None:
            if manager._plan.active:
                self._num_active += 1
                if drifts and self.rank != 0:
                    _drift(probs, self._num_drifted)
                    self._num_drifted += 1
            finish_step(probs, *args)

        manager.finish_step = drifted_finish_step
        if loses_broadcast:
            group = manager._tp_group
            manager._tp_group = types.SimpleNamespace(
                world_size=group.world_size, broadcast=lambda *args, **kwargs: None
            )

    def fault_counts(self) -> dict[str, int]:
        """Return how many steps were active, and drifted, on this rank."""
        return {"num_active": self._num_active, "num_drifted": self._num_drifted}

    def timeline_start(self) -> None:
        """Begin to record a timeline of this rank's host and device."""
        from torch.profiler import ProfilerActivity, profile

        self._timeline = profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]
        )
        self._timeline.start()

    def timeline_stop(self) -> dict[str, list[float]]:
        """Return the duration of every broadcast by event name, microseconds."""
        self._timeline.stop()
        found: dict[str, list[float]] = {}
        for event in self._timeline.events():
            if "broadcast" in event.name.lower():
                found.setdefault(event.name, []).append(event.time_range.elapsed_us())
        return found


def _drift(probs: Any, step: int) -> None:
    import torch

    if step % 3 == 0:
        probs.view(torch.int32).add_(1)
    elif step % 3 == 1:
        probs.neg_().add_(1.0)
    else:
        probs[::2] = float("nan")
