# SPDX-License-Identifier: Apache-2.0
"""The host's survivals by request slot: which rounds it may see, and the prior.

NumPy only. :mod:`.confidence_mirror` feeds it what the device published; a simulator
may feed it directly. A round is *published* when its drafts are made, *taken in* when
its confidences are on the host, and *released*, row by row, once the same request has
been published again: until then its drafts are still to be judged.

Invariants (pinned by tests/.../dspark/test_confidence_mirror.py):
  * A row is readable only once its request has been published again, on every rank
    alike. A request that a step left out keeps its drafts, so its row stays held
    although the round is over.
  * Rows whose drafts were made while publishing was off are not fresh.
  * What lands after its slot was freed or given to another request is dropped, and
    nothing is held for a request that has ended.
  * Positions beyond the depth that was drafted carry the learned prior.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

# Conditional acceptance assumed for a request until its first round has landed;
# near the mean of published DSpark checkpoints (arXiv 2607.05147).
PRIOR_CONFIDENCE = 0.8
# Weight of the past in the learned prior, per landed round: a memory of about a
# hundred rounds, some seconds of serving.
PRIOR_DECAY = 0.99
# Rounds' worth of requests that the assumed confidence stands for at the start.
PRIOR_WEIGHT = 8.0


@dataclass(frozen=True, slots=True)
class Round:
    """Who was published in one round.

    Attributes:
        slots: Request slots. Shape [R], intp.
        generations: Their generations at the time. Shape [R], int64.
        draft_depth: Positions that were drafted.
        serial: Number of the round.
        num_reqs: Requests of the whole round.
    """

    slots: np.ndarray
    generations: np.ndarray
    draft_depth: int
    serial: int
    num_reqs: int

    def select(self, rows: np.ndarray) -> "Round":
        """Return some of the rows. ``rows``: shape [R], bool."""
        return replace(self, slots=self.slots[rows], generations=self.generations[rows])


class AcceptancePrior:
    """What is expected of a draft that nothing is known about but its position.

    A decayed mean over rounds, per position, of those that got there.

    Args:
        num_speculative_steps: Logical depth K.

    Attributes:
        confidence: P(draft k accepted given that all before it were). Shape [K],
            float32.
        survival: Its running product. Shape [K], float32.
    """

    def __init__(self, num_speculative_steps: int):
        self._weight = np.full(num_speculative_steps, PRIOR_WEIGHT)
        self._sum = self._weight * PRIOR_CONFIDENCE
        self._update()

    def learn(
        self, reach: np.ndarray, confidence: np.ndarray, *, num_reqs: int
    ) -> None:
        """Move towards the mean of some rows; part of a round counts as that part.

        Args:
            reach: P(all drafts before k accepted), or whether they were. Shape
                [N, d], bool or float32.
            confidence: P(draft k accepted) given that, or whether it was. Shape
                [N, d], bool or float32.
            num_reqs: Requests of the whole round, >= 1.
        """
        depth = reach.shape[1]
        decay = PRIOR_DECAY ** (len(reach) / num_reqs)
        weight, total = self._weight[:depth], self._sum[:depth]
        weight[:] = decay * weight + reach.sum(axis=0) / num_reqs
        total[:] = decay * total + (reach * confidence).sum(0) / num_reqs
        self._update()

    def _update(self) -> None:
        confidence = self._sum / np.maximum(self._weight, 1e-6)
        self.confidence = confidence.astype(np.float32)
        self.survival = np.cumprod(self.confidence, dtype=np.float32)


class SurvivalHistory:
    """Survivals one round old. Per step: ``release``, read, ``begin_round``; at any
    time ``take_in`` a round that has landed.

    Args:
        max_num_reqs: Number of request slots.
        num_speculative_steps: Logical depth K.

    Attributes:
        serial: Number of the latest round, counted alike on every rank.
    """

    def __init__(self, max_num_reqs: int, num_speculative_steps: int):
        shape = (max_num_reqs, num_speculative_steps)
        self.serial = 0
        self._survival = np.zeros(shape, dtype=np.float32)
        self._prior = AcceptancePrior(num_speculative_steps)
        self._fresh = np.zeros(max_num_reqs, dtype=bool)
        self._generation = np.zeros(max_num_reqs, dtype=np.int64)
        self._drafted = np.zeros(max_num_reqs, dtype=bool)
        self._last_serial = np.zeros(max_num_reqs, dtype=np.int64)
        self._held: list[tuple[Round, np.ndarray]] = []

    @property
    def prior(self) -> np.ndarray:
        """Survivals assumed where none has landed. Shape [K], float32."""
        return self._prior.survival

    def reset_slot(self, slot: int, *, publishing: bool) -> None:
        """Forget a slot that was given to a new request.

        Args:
            slot: Request slot.
            publishing: True while rounds are being published.
        """
        self._generation[slot] += 1
        self._drafted[slot] = False
        self._survival[slot] = 0.0
        self._fresh[slot] = publishing

    def drop_slots(self, slots: Sequence[int]) -> None:
        """Let go of what is held for requests that have ended.

        Their last drafts are never judged, so no later round would release them.

        Args:
            slots: The slots they had, each once.
        """
        self._generation[slots] += 1

    def all_fresh(self, slots: np.ndarray) -> bool:
        """Return whether the drafts in hand of every slot were published.

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

    def begin_round(self, slots: np.ndarray, draft_depth: int) -> Round:
        """Note that a round is published.

        Args:
            slots: Request slots. Shape [R], intp.
            draft_depth: Positions that are drafted.

        Returns:
            The round, to be taken in with its confidences.
        """
        self.serial += 1
        self._last_serial[slots] = self.serial
        self._fresh[slots] = True
        first = slots[~self._drafted[slots]]
        self._survival[first] = self.prior
        self._drafted[first] = True
        generations = self._generation[slots].copy()
        return Round(slots, generations, draft_depth, self.serial, len(slots))

    def take_in(self, landed: Round, probs: np.ndarray) -> None:
        """Hold a round's confidences until its rows may be seen.

        Args:
            landed: A round that is not the latest.
            probs: Confidences of its rows, without NaN; written to. Shape [R, K],
                float32.
        """
        self._held.append((landed, probs))

    def release(self) -> None:
        """Make the rows readable whose requests have been published again."""
        self._held = [rest for h in self._held if (rest := self._release(*h))]

    def _release(
        self, held: Round, probs: np.ndarray
    ) -> tuple[Round, np.ndarray] | None:
        """Take in the rows whose drafts are done with; return those to hold on to."""
        current = self._generation[held.slots] == held.generations
        pending = current & (self._last_serial[held.slots] == held.serial)
        if pending.all():
            return held, probs
        is_held = bool(pending.any())
        done, seen = (
            (held.select(~pending), probs[~pending])
            if is_held
            else (
                held,
                probs,
            )
        )
        depth = done.draft_depth
        seen[:, depth:] = self._prior.confidence[depth:]
        survival = np.cumprod(seen, axis=1, dtype=np.float32)
        self._learn_prior(done, seen, survival)
        current = current[~pending]
        self._survival[done.slots[current]] = survival[current]
        return (held.select(pending), probs[pending]) if is_held else None

    def _learn_prior(
        self, landed: Round, probs: np.ndarray, survival: np.ndarray
    ) -> None:
        """Move the prior towards a round's mean confidence per position.

        A request counts at a position as much as it is expected to get there.
        """
        depth = landed.draft_depth
        reach = np.concatenate(
            (np.ones_like(survival[:, :1]), survival[:, : depth - 1]), axis=1
        )[:, :depth]
        num_reqs = max(landed.num_reqs, 1)
        self._prior.learn(reach, probs[:, :depth], num_reqs=num_reqs)

    def restart(self) -> None:
        """Begin publishing after steps that did not publish.

        The drafts in hand were made unobserved, so no slot is fresh, and what
        landed before is too old to plan with: the prior stands in.
        """
        self._held.clear()
        self._fresh[:] = False
        self._survival[:] = self.prior
        self._drafted[:] = True
