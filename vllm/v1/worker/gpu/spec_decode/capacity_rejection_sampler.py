# SPDX-License-Identifier: Apache-2.0
"""Rejection sampler that can be told to leave drafts unjudged (mask mode)."""

from typing import Any

import torch

from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler


class CapacityRejectionSampler(RejectionSampler):
    """Upstream's sampler; once per call it takes a mask of drafts to reject.

    A masked draft counts as absent: sampling at its place is from the plain target
    distribution, so masking never shifts the output distribution.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.capacity_invalid_drafts: torch.Tensor | None = None

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Verify the drafts, rejecting masked ones unjudged.

        Args:
            logits: Target logits. Shape [L, V], device.
            input_batch: The batch being verified.
            draft_logits: Draft logits by slot, or None for one-hot drafts.
            invalid_drafts: Grammar's mask of drafts to reject. Shape [L], bool.

        Returns:
            Sampled tokens with accepted and rejected counts.
        """
        mask, self.capacity_invalid_drafts = self.capacity_invalid_drafts, None
        if mask is not None:
            invalid_drafts = mask if invalid_drafts is None else mask | invalid_drafts
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)
