# SPDX-License-Identifier: Apache-2.0
"""Acceptance by draft position, for drafts that report no confidences.

Every request is expected to fare as the recent ones did: there is one survival per
position and nothing by request. What was accepted of each request is copied to the
host after every step above the knee and read one step later.

Lossless because it decides about drafts that are made later, never about those in
hand, and by outcomes of drafts that were judged before.

Invariants (pinned by tests/.../dspark/test_acceptance_mirror.py):
  * A position counts only in requests whose target judged it: all drafts before it
    were accepted, and it was verified.
  * A request without drafts (prefill, its first decode step) teaches nothing, nor
    does one whose prompt ends with placeholders that nobody drafted.
  * What was learned outlasts steps that do not publish.
"""

from collections.abc import Sequence

import numpy as np
import torch

from vllm.v1.worker.gpu.spec_decode.dspark.host_copies import HostCopies
from vllm.v1.worker.gpu.spec_decode.dspark.survival_history import AcceptancePrior


class AcceptanceMirror(HostCopies[np.ndarray]):
    """Learns how far drafts are accepted. Per step: land, read, publish;
    restart after steps that did not publish.

    Args:
        max_num_reqs: Number of request slots.
        num_speculative_steps: Logical depth K.
        device: Device of the sampler's counts.
        num_bonus_tokens: Sampled tokens per request and step besides drafts.

    Attributes:
        serial: Number of the latest publication, counted alike on every rank.
    """

    def __init__(
        self,
        max_num_reqs: int,
        num_speculative_steps: int,
        device: torch.device,
        *,
        num_bonus_tokens: int,
    ):
        # A round is known by who decodes, shape [R], bool; rows are sampled, rejected.
        super().__init__((2, max_num_reqs), torch.int32, device)
        self.serial = 0
        self._num_bonus_tokens = num_bonus_tokens
        self._prior = AcceptancePrior(num_speculative_steps)

    @property
    def prior(self) -> np.ndarray:
        """P(draft k and all before it accepted). Shape [K], float32."""
        return self._prior.survival

    def survival_probs(self, slots: np.ndarray) -> np.ndarray:
        """Return the prior for each request.

        Args:
            slots: Request slots. Shape [R], intp.

        Returns:
            Shape [R, K], float32, read-only.
        """
        return np.broadcast_to(self.prior, (len(slots), len(self.prior)))

    def reset_slot(self, slot: int, *, publishing: bool) -> None:
        """Do nothing: no slot has a state of its own."""

    def drop_slots(self, slots: Sequence[int]) -> None:
        """Do nothing, as in :meth:`reset_slot`."""

    def restart(self) -> None:
        """Begin publishing after steps that did not publish."""
        self._drop_copies()

    def land(self) -> None:
        """Learn from every round but the latest, waiting for its copy."""
        for copy in self._landed_copies():
            counts = copy.buffer.np[:, : len(copy.round)]
            num_sampled, num_rejected = counts[:, copy.round]
            num_accepted = np.maximum(num_sampled - self._num_bonus_tokens, 0)
            if len(num_accepted):
                self._learn(num_accepted, num_accepted + num_rejected, copy.num_steps)

    def publish(
        self,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        decoding: np.ndarray,
    ) -> None:
        """Start the copy of what a step verified.

        Args:
            num_sampled: Tokens that each request got, 0 within a prompt. Shape [R],
                int32, device.
            num_rejected: Verified drafts that were not accepted. Shape [R], int32,
                device.
            decoding: Whether a request was past its prompt before the step. Shape
                [R], bool.
        """
        if not self._free:
            self.land()
        buffer, event = self._take_buffer()
        num_reqs = num_sampled.shape[0]
        # On the main stream: some kilobytes, and a side stream would cost more host
        # time than it hides.
        buffer.cpu[0, :num_reqs].copy_(num_sampled, non_blocking=True)
        buffer.cpu[1, :num_reqs].copy_(num_rejected, non_blocking=True)
        event.record()
        self.serial += 1
        self._start(buffer, event, self.serial, decoding)

    def _learn(
        self, num_accepted: np.ndarray, num_judged: np.ndarray, num_steps: int
    ) -> None:
        depth = int(num_judged.max())
        positions = np.arange(depth)
        accepted = num_accepted[:, None] > positions
        reached = num_accepted[:, None] >= positions
        judged = reached & (num_judged[:, None] > positions)
        num_reqs = len(num_judged)
        self._prior.learn(
            judged.sum(axis=0).tolist(),
            (judged & accepted).sum(axis=0).tolist(),
            num_rows=num_reqs,
            num_reqs=num_reqs,
            num_steps=num_steps,
        )
