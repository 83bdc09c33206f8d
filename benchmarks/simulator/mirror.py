# SPDX-License-Identifier: Apache-2.0
"""The confidence mirror without a device: the product's history, fed directly.

Stands in for ``dspark/confidence_mirror.py``, whose copies need CUDA streams and
events; what may be seen when is the product's own ``dspark/survival_history.py``.

Invariants (pinned by tests/benchmarks/simulator/test_mirror.py, which replays random
rounds through both):
  * ``survival_probs``, ``prior`` and ``all_fresh`` equal the product's.
"""

import numpy as np

from vllm.v1.worker.gpu.spec_decode.dspark.survival_history import (
    Round,
    SurvivalHistory,
)


class HostMirror(SurvivalHistory):
    """Confidences by slot, one round old. Per step: land, read, publish.

    Args:
        max_num_reqs: Number of request slots.
        num_speculative_steps: Logical depth K.

    Attributes:
        probs: Current confidences by slot. Shape [max_num_reqs, K], float32.
    """

    def __init__(self, max_num_reqs: int, num_speculative_steps: int):
        super().__init__(max_num_reqs, num_speculative_steps)
        self.probs = np.zeros((max_num_reqs, num_speculative_steps), dtype=np.float32)
        self._in_flight: list[tuple[Round, np.ndarray]] = []

    def reset_slot(self, slot: int, *, publishing: bool) -> None:
        """Forget a slot that was given to a new request; see the product's."""
        super().reset_slot(slot, publishing=publishing)
        if publishing:
            self.probs[slot] = 0.0

    def land(self) -> None:
        """Take in every round but the latest."""
        while len(self._in_flight) > 1:
            self.take_in(*self._in_flight.pop(0))
        self.release()

    def publish(self, probs: np.ndarray, slots: np.ndarray, draft_depth: int) -> None:
        """Store a round's confidences.

        Args:
            probs: In batch order. Shape [R, K], float32.
            slots: Request slots. Shape [R], intp.
            draft_depth: Positions that were drafted.
        """
        self.probs[slots] = probs
        published = self.begin_round(slots.copy(), draft_depth)
        self._in_flight.append((published, probs.copy()))

    def restart(self) -> None:
        """Begin publishing after steps that did not: the prior stands in."""
        self._in_flight.clear()
        super().restart()
