# SPDX-License-Identifier: Apache-2.0
"""What turns reported confidences into probabilities in the simulated engine.

Invariants (pinned by tests/benchmarks/simulator/test_calibrators.py):
  * ``HostOnlineSTS`` fits the product's rows at the product's rhythm: what it has
    learned of a head's distortion undoes it.
  * Confidences published with one calibration are never changed by a later one.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vllm.v1.worker.gpu.spec_decode.dspark.online_sts import (
    FIT_INTERVAL,
    MAX_ROWS_PER_STEP,
)
from vllm.v1.worker.gpu.spec_decode.dspark.sts_fit import (
    GradedRows,
    calibrated_logits,
    fit_calibration,
    sigmoid,
)
from vllm.v1.worker.gpu.spec_decode.dspark.sts_reference import RING_ROWS


class Calibrator(Protocol):
    """Turns reported confidence logits into probabilities, and may learn to."""

    def apply(self, logits: np.ndarray) -> np.ndarray:
        """Return probabilities. Shape [R, K], float64."""

    def observe(
        self, logits: np.ndarray, accepted: np.ndarray, verified: np.ndarray
    ) -> None:
        """Take in the rounds that one active step judged, in batch order.

        Args:
            logits: As reported. Shape [R, K].
            accepted: Leading drafts that were accepted. Shape [R], int64.
            verified: Drafts that were verified; 0 for a row that does not count.
                Shape [R], int64.
        """


@dataclass(frozen=True)
class FixedTemperature:
    """``dspark_confidence_temperature``: one temperature, which learns nothing."""

    temperature: float = 1.0

    def apply(self, logits: np.ndarray) -> np.ndarray:
        """Return sigmoid(logits / T)."""
        return sigmoid(np.asarray(logits) / self.temperature)

    def observe(
        self, logits: np.ndarray, accepted: np.ndarray, verified: np.ndarray
    ) -> None:
        """A fixed temperature does not learn."""


class HostOnlineSTS:
    """``dspark_online_sts`` of one request class, its ring and fits on the host.

    Args:
        temperature: ``dspark_confidence_temperature``, which it starts from.
        num_steps: Draft positions K.
    """

    def __init__(self, temperature: float, num_steps: int):
        scales, nothing = np.full(num_steps, 1.0 / temperature), np.zeros(num_steps)
        self._prior = np.stack([scales, nothing, nothing])
        self.calibration = self._prior
        self._rows = GradedRows(
            np.zeros((0, num_steps)), np.zeros(0, np.int64), np.zeros(0, np.int64)
        )
        self._num_steps_observed = 0
        self._fit_is_due = False

    def apply(self, logits: np.ndarray) -> np.ndarray:
        """Return probabilities, then refit if it is time, as the device does."""
        probs = sigmoid(calibrated_logits(logits, self.calibration))
        if self._fit_is_due:
            self._fit_is_due = False
            self.calibration = fit_calibration(
                self._rows, self.calibration, self._prior
            )
        return probs

    def observe(
        self, logits: np.ndarray, accepted: np.ndarray, verified: np.ndarray
    ) -> None:
        """Keep the rows that the product would grade."""
        stride = max(1, len(accepted) // MAX_ROWS_PER_STEP)
        step = self._num_steps_observed
        in_turn = (np.arange(len(accepted)) + step + step // stride) % stride == 0
        new = GradedRows(logits, accepted, verified).select(in_turn & (verified > 0))
        self._rows = GradedRows(
            *(
                np.concatenate((old, added))[-RING_ROWS:]
                for old, added in (
                    (self._rows.logits, new.logits),
                    (self._rows.accepted, new.accepted),
                    (self._rows.verified, new.verified),
                )
            )
        )
        self._num_steps_observed += 1
        self._fit_is_due |= self._num_steps_observed % FIT_INTERVAL == 0
