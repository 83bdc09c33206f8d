# SPDX-License-Identifier: Apache-2.0
"""The confidence mirror without a device: the same ages, the same prior.

Stands in for ``dspark/confidence_mirror.py``, whose copies need CUDA streams and
events. A round becomes readable for a request once that request has been published
again and a further round has begun; see there for why.

Invariants (pinned by tests/benchmarks/simulator/test_mirror.py, which replays random
rounds through both):
  * ``survival_probs``, ``prior`` and ``all_fresh`` equal the product's.
"""

from dataclasses import dataclass, replace

import numpy as np

from vllm.v1.worker.gpu.spec_decode.dspark.confidence_mirror import (
    PRIOR_CONFIDENCE,
    PRIOR_DECAY,
    PRIOR_WEIGHT,
)


@dataclass(slots=True)
class _Round:
    """A published round, or the rows of it that may not be seen yet."""

    slots: np.ndarray
    generations: np.ndarray
    probs: np.ndarray
    draft_depth: int
    serial: int
    num_reqs: int

    def select(self, rows: np.ndarray) -> "_Round":
        """Return some of the rows. ``rows``: shape [R], bool."""
        return replace(
            self,
            slots=self.slots[rows],
            generations=self.generations[rows],
            probs=self.probs[rows],
        )


class HostMirror:
    """Confidences by slot, one round old. Per step: land, read, publish.

    Args:
        max_num_reqs: Number of request slots.
        num_speculative_steps: Logical depth K.
    """

    def __init__(self, max_num_reqs: int, num_speculative_steps: int):
        shape = (max_num_reqs, num_speculative_steps)
        self.probs = np.zeros(shape, dtype=np.float32)
        self._survival = np.zeros(shape, dtype=np.float32)
        self._fresh = np.zeros(max_num_reqs, dtype=bool)
        self._drafted = np.zeros(max_num_reqs, dtype=bool)
        self._generation = np.zeros(max_num_reqs, dtype=np.int64)
        self._weight = np.full(num_speculative_steps, PRIOR_WEIGHT)
        self._sum = self._weight * PRIOR_CONFIDENCE
        self._last_serial = np.zeros(max_num_reqs, dtype=np.int64)
        self._serial = 0
        self._rounds: list[_Round] = []
        self._update_prior()

    def _update_prior(self) -> None:
        confidence = self._sum / np.maximum(self._weight, 1e-6)
        self._prior_confidence = confidence.astype(np.float32)
        self.prior = np.cumprod(self._prior_confidence, dtype=np.float32)

    def reset_slot(self, slot: int, *, publishing: bool) -> None:
        """Forget a slot that was given to a new request; see the product's."""
        self._generation[slot] += 1
        self._drafted[slot] = False
        self._survival[slot] = 0.0
        self._fresh[slot] = publishing
        if publishing:
            self.probs[slot] = 0.0

    def all_fresh(self, slots: np.ndarray) -> bool:
        """Return whether the drafts in hand of every slot were published."""
        return bool(self._fresh[slots].all())

    def survival_probs(self, slots: np.ndarray) -> np.ndarray:
        """Return survivals one round old, or the prior. Shape [R, K], float32."""
        return self._survival[slots]

    def land(self) -> None:
        """Take in every round but the latest, rows that were published again."""
        kept = []
        for held in self._rounds:
            pending = self._last_serial[held.slots] == held.serial
            pending &= self._generation[held.slots] == held.generations
            if held.serial == self._serial:
                pending[:] = True
            else:
                self._release(held.select(~pending))
            if pending.any():
                kept.append(held.select(pending))
        self._rounds = kept

    def _release(self, done: "_Round") -> None:
        slots, probs, depth = done.slots, done.probs, done.draft_depth
        probs[:, depth:] = self._prior_confidence[depth:]
        survival = np.cumprod(probs, axis=1, dtype=np.float32)
        reach = np.concatenate(
            (np.ones_like(survival[:, :1]), survival[:, : depth - 1]), axis=1
        )[:, :depth]
        decay = PRIOR_DECAY ** (len(slots) / done.num_reqs)
        weight, total = self._weight[:depth], self._sum[:depth]
        weight[:] = decay * weight + reach.sum(axis=0) / done.num_reqs
        judged = (reach * probs[:, :depth]).sum(0) / done.num_reqs
        total[:] = decay * total + judged
        self._update_prior()
        current = self._generation[slots] == done.generations
        self._survival[slots[current]] = survival[current]

    def publish(self, probs: np.ndarray, slots: np.ndarray, draft_depth: int) -> None:
        """Store a round's confidences.

        Args:
            probs: In batch order. Shape [R, K], float32.
            slots: Request slots. Shape [R], intp.
            draft_depth: Positions that were drafted.
        """
        self.probs[slots] = probs
        self._serial += 1
        self._last_serial[slots] = self._serial
        self._rounds.append(
            _Round(
                slots.copy(),
                self._generation[slots].copy(),
                probs.copy(),
                draft_depth,
                self._serial,
                max(len(slots), 1),
            )
        )
        self._fresh[slots] = True
        first = slots[~self._drafted[slots]]
        self._survival[first] = self.prior
        self._drafted[first] = True

    def restart(self) -> None:
        """Begin publishing after steps that did not: the prior stands in."""
        self._rounds.clear()
        self._fresh[:] = False
        self._survival[:] = self.prior
        self._drafted[:] = True
