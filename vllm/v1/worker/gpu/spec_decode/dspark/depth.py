# SPDX-License-Identifier: Apache-2.0
"""The draft depth controller: from per-step wishes to a steady depth.

Standard library only. The planner says which depth it would draft at if every step
stood alone; the controller turns that into a depth that follows load at once and
noise slowly.

Invariants (pinned by tests/.../dspark/test_depth.py):
  * The depth is always an enabled one.
  * It falls as soon as a whole window asked for less, and by the full amount; when
    the load itself rose, it falls at once.
  * It rises one enabled depth at a time, at most once a window.
  * On a constant wish it changes at most until it has reached that wish, probes
    aside; a probe lasts one step.
  * After ``PROBE_INTERVAL`` steps at one depth below K the next deeper one is tried
    for a step, so a run of bad luck cannot pin the depth at the floor.
  * ``hold`` counts steps like ``update`` at a wish that is granted; a probe that
    falls due meanwhile comes with the next ``update``.
  * Idle, or a batch down to 75 % of its high-water mark, resets it to K.
"""

from collections import deque
from collections.abc import Sequence

# Steps at one depth before a deeper one is tried: rare enough to cost under 1 %,
# often enough to refresh the deeper positions' acceptance within seconds.
PROBE_INTERVAL = 64
# A batch this far below its high-water mark is another regime.
# Source: local-inference-lab/vllm PR #107.
RESET_FRACTION = 0.75
# Growth of the batch that counts as a new load rather than churn.
OVERLOAD_FRACTION = 1.125


class DepthController:
    """Chooses the depth of the next drafts. Per step: ``update``.

    Args:
        depths: Enabled depths, ascending, K last.
        window: Steps that must agree before the depth falls or rises.
    """

    def __init__(self, depths: Sequence[int], *, window: int):
        self._depths = list(depths)
        self._window = window
        self.reset()

    @property
    def depth(self) -> int:
        """Depth in use, probes aside."""
        return self._depths[self._index]

    def reset(self) -> None:
        """Go back to K and forget the past."""
        self._index = len(self._depths) - 1
        self._wishes: deque[int] = deque(maxlen=self._window)
        self._high_water = 0
        self._steps_at_depth = 0

    def update(self, wished_depth: int, num_reqs: int) -> int:
        """Take one step's wish and return the depth to draft at.

        Args:
            wished_depth: The planner's choice for this step, an enabled depth.
            num_reqs: Running decode requests; 0 is idle.

        Returns:
            An enabled depth.
        """
        if num_reqs == 0 or num_reqs <= RESET_FRACTION * self._high_water:
            self.reset()
        overload = num_reqs > OVERLOAD_FRACTION * self._high_water
        self._high_water = max(self._high_water, num_reqs)
        wish = self._clamp(wished_depth)
        self._wishes.append(wish)
        self._steps_at_depth += 1
        # The window's maximum: one lucky step is enough to stay deep.
        need = max(self._wishes)
        full_window = len(self._wishes) == self._window
        if wish < self._index and (overload or (full_window and need < self._index)):
            self._move_to(wish if overload else need)
        elif full_window and min(self._wishes) > self._index:
            self._move_to(self._index + 1)
        elif self._probes():
            return self._depths[self._index + 1]
        return self.depth

    def hold(self, num_steps: int) -> None:
        """Count steps that wished for the depth in use and were not asked about.

        Args:
            num_steps: How many.
        """
        self._wishes.extend([self._index] * num_steps)
        self._steps_at_depth += num_steps

    def clamp(self, depth: int) -> int:
        """Return the deepest usable depth that is at most ``depth``."""
        return self._depths[self._clamp(depth)]

    def _clamp(self, depth: int) -> int:
        """Return the index of the deepest usable depth that is at most ``depth``."""
        return max((i for i, d in enumerate(self._depths) if d <= depth), default=0)

    def _move_to(self, index: int) -> None:
        self._index = index
        self._wishes.clear()
        self._steps_at_depth = 0

    def _probes(self) -> bool:
        if self._index == len(self._depths) - 1:
            return False
        if self._steps_at_depth < PROBE_INTERVAL:
            return False
        self._steps_at_depth = 0
        return True
