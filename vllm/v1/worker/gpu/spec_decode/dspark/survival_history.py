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
  * Rows whose drafts were made while publishing was off, or in a step that was not
    published, are not fresh.
  * What lands after its slot was freed or given to another request is dropped, and
    nothing is held for a request that has ended.
  * Positions beyond the depth that was drafted carry the learned prior.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Conditional acceptance assumed for a request until its first round has landed;
# near the mean of published DSpark checkpoints (arXiv 2607.05147).
PRIOR_CONFIDENCE = 0.8
# Weight of the past in the learned prior, per step: a memory of about a hundred, some
# seconds of serving.
PRIOR_DECAY = 0.99
# Rounds' worth of requests that the assumed confidence stands for at the start.
PRIOR_WEIGHT = 8.0


class Round(NamedTuple):
    """Who was published in one round.

    Attributes:
        slots: Request slots. Shape [R], intp.
        generations: Their generations at the time. Shape [R], int64.
        draft_depth: Positions that were drafted.
        serial: Number of the round.
        num_reqs: Requests of the whole round.
        epoch: Number of the changes to slots before it.
        num_steps: Steps since the round before it; 1 if that was the last step.
    """

    slots: np.ndarray
    generations: np.ndarray
    draft_depth: int
    serial: int
    num_reqs: int
    epoch: int
    num_steps: int

    def select(self, rows: np.ndarray) -> "Round":
        """Return some of the rows. ``rows``: shape [R], bool."""
        return self._replace(slots=self.slots[rows], generations=self.generations[rows])


class AcceptancePrior:
    """What is expected of a draft that nothing is known about but its position.

    A decayed mean over rounds, per position, of those that got there.

    Args:
        num_speculative_steps: Logical depth K.
    """

    def __init__(self, num_speculative_steps: int):
        # Lists: K numbers are cheaper so than in an array.
        self._weight = [PRIOR_WEIGHT] * num_speculative_steps
        self._sum = [PRIOR_WEIGHT * PRIOR_CONFIDENCE] * num_speculative_steps
        self._arrays: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def confidence(self) -> np.ndarray:
        """P(draft k accepted given that all before it were). Shape [K], float32."""
        return self._as_arrays()[0]

    @property
    def survival(self) -> np.ndarray:
        """Its running product. Shape [K], float32."""
        return self._as_arrays()[1]

    def _as_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        # Most steps learn and nobody looks.
        if self._arrays is None:
            weights = np.maximum(self._weight, 1e-6)
            confidence = (np.array(self._sum) / weights).astype(np.float32)
            survival = np.cumprod(confidence, dtype=np.float32)
            self._arrays = confidence, survival
        return self._arrays

    def learn(
        self,
        reached: Sequence[float],
        accepted: Sequence[float],
        *,
        num_rows: int,
        num_reqs: int,
        num_steps: int = 1,
    ) -> None:
        """Move towards the mean of some rows; part of a round counts as that part.

        A round stands for the steps before it that were not published as well, so
        that the past fades by steps and not by publications.

        Args:
            reached: Rows that got to position k, or how many are expected to have.
                Shape [d].
            accepted: How many of them had draft k accepted. Shape [d].
            num_rows: All rows.
            num_reqs: Requests of the whole round, >= 1.
            num_steps: Steps that the round stands for, >= 1.
        """
        share = num_steps / num_reqs
        decay = PRIOR_DECAY ** (num_rows * share)
        weight, total = self._weight, self._sum
        for k in range(len(accepted)):
            weight[k] = decay * weight[k] + reached[k] * share
            total[k] = decay * total[k] + accepted[k] * share
        self._arrays = None


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
        # Of the latest group it holds the first round's: see _release.
        self._last_serial = np.zeros(max_num_reqs, dtype=np.int64)
        self._held: list[tuple[Round, np.ndarray]] = []
        # Changes with any slot's generation or freshness.
        self._epoch = 0
        # Latest steps whose drafts were not published.
        self._num_skipped = 0
        nobody = np.zeros(0, dtype=np.int64)
        self._latest = Round(nobody, nobody, 0, 0, 0, 0, 1)

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
        self._epoch += 1
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
        self._epoch += 1
        self._generation[slots] += 1

    def all_fresh(self, slots: np.ndarray) -> bool:
        """Return whether the drafts in hand of every slot were published.

        Args:
            slots: Request slots. Shape [R], intp.
        """
        if self._num_skipped:
            return False
        return int(np.count_nonzero(self._fresh.take(slots))) == len(slots)

    def survival_probs(self, slots: np.ndarray) -> np.ndarray:
        """Return prefix survivals that are one round old, or the prior.

        Args:
            slots: Request slots. Shape [R], intp.

        Returns:
            Shape [R, K], float32; NaN confidences count as 1.
        """
        return self._survival.take(slots, axis=0)

    def begin_round(self, slots: np.ndarray, draft_depth: int) -> Round:
        """Note that a round is published.

        Args:
            slots: Request slots. Shape [R], intp.
            draft_depth: Positions that are drafted.

        Returns:
            The round, to be taken in with its confidences.
        """
        self.serial += 1
        num_steps, self._num_skipped = 1 + self._num_skipped, 0
        if num_steps > 1:
            self._epoch += 1
            self._fresh[:] = False
        last = self._latest
        stays = last.epoch == self._epoch and len(last.slots) == len(slots)
        if stays and np.count_nonzero(last.slots == slots) == len(slots):
            # The same requests as in the last round: nothing about them has changed.
            slots, generations = last.slots, last.generations
        else:
            self._last_serial[last.slots] = last.serial
            self._last_serial[slots] = self.serial
            self._fresh[slots] = True
            first = slots[~self._drafted[slots]]
            self._survival[first] = self.prior
            self._drafted[first] = True
            generations = self._generation[slots]
        self._latest = Round(
            slots,
            generations,
            draft_depth,
            self.serial,
            len(slots),
            self._epoch,
            num_steps,
        )
        return self._latest

    def skip_step(self) -> None:
        """Note that a step drafted and was not published.

        Its drafts are unknown, so no slot is fresh until it is published again. What
        landed before stays: it is a few steps old, and of the same requests.
        """
        self._num_skipped += 1

    def take_in(self, landed: Round, probs: np.ndarray) -> None:
        """Hold a round's confidences until its rows may be seen.

        Args:
            landed: A round that is not the latest.
            probs: Confidences of its rows, 0..1 or NaN; written to by the next
                ``release``, and no longer used behind it. Shape [R, K], float32.
        """
        self._held.append((landed, probs))

    def release(self) -> None:
        """Make the rows readable whose requests have been published again."""
        self._held = [rest for h in self._held if (rest := self._release(*h))]

    def _release(
        self, held: Round, probs: np.ndarray
    ) -> tuple[Round, np.ndarray] | None:
        """Take in the rows whose drafts are done with; return those to hold on to."""
        if held.epoch == self._epoch and held.slots is self._latest.slots:
            # The same requests ever since, so of all of them or of none.
            if held.serial == self.serial:
                return held, probs.copy()
            self._survival[held.slots] = self._survival_of(held, probs)
            return None
        current = self._generation[held.slots] == held.generations
        last_serial = self._last_serial[held.slots]
        if held.slots is self._latest.slots:
            last_serial = self.serial
        pending = current & (last_serial == held.serial)
        done, rest = held, None
        if num_pending := np.count_nonzero(pending):
            if num_pending == len(pending):
                return held, probs.copy()
            rest = held.select(pending), probs[pending]
            done, probs = held.select(~pending), probs[~pending]
            current = current[~pending]
        survival = self._survival_of(done, probs)
        self._survival[done.slots[current]] = survival[current]
        return rest

    def _survival_of(self, done: Round, probs: np.ndarray) -> np.ndarray:
        """Return the survivals of a round that is over, and learn the prior from it.

        A request counts at a position as much as it is expected to get there.

        Args:
            done: The round, or part of it.
            probs: Confidences; written to. Shape [N, K], float32.
        """
        depth, num_rows = done.draft_depth, len(probs)
        if depth < probs.shape[1]:
            probs[:, depth:] = self._prior.confidence[depth:]
        survival = np.multiply.accumulate(probs, axis=1)
        accepted = np.add.reduce(survival, axis=0).tolist()
        if accepted[-1] != accepted[-1]:
            # A NaN goes through products and sums to the end.
            self._mend(probs[:, :depth])
            survival = np.multiply.accumulate(probs, axis=1)
            accepted = np.add.reduce(survival, axis=0).tolist()
        accepted = accepted[:depth]
        # What gets to a position is what all before it let through.
        self._prior.learn(
            [num_rows, *accepted],
            accepted,
            num_rows=num_rows,
            num_reqs=max(done.num_reqs, 1),
            num_steps=done.num_steps,
        )
        return survival

    def _mend(self, probs: np.ndarray) -> None:
        """Set every NaN to 1, in place: nobody has said that the draft is bad."""
        probs[np.isnan(probs)] = 1.0

    def restart(self) -> None:
        """Begin publishing after steps that did not publish.

        The drafts in hand were made unobserved, so no slot is fresh, and what
        landed before is too old to plan with: the prior stands in.
        """
        self._held.clear()
        self._epoch += 1
        self._num_skipped = 0
        self._fresh[:] = False
        self._survival[:] = self.prior
        self._drafted[:] = True
