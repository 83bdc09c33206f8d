# SPDX-License-Identifier: Apache-2.0
"""What a step's decisions need to know of its batch, gathered once.

Inside an engine caches are cold, and every small NumPy call costs microseconds.
NumPy and the standard library only.

Invariants (pinned by tests/.../dspark/test_batch_facts.py):
  * Every figure equals what counting request by request gives.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import BatchReqState


class BatchFacts(NamedTuple):
    """Figures of one scheduled batch.

    Attributes:
        num_reqs: Requests R.
        num_decodes: Those past their prompts.
        num_drafts: Drafts in hand.
        num_verifying: Requests that have some; they come first.
        width: Drafts in hand of every request; -1 if they differ.
        num_non_drafts: Scheduled tokens besides drafts.
    """

    num_reqs: int
    num_decodes: int
    num_drafts: int
    num_verifying: int
    width: int
    num_non_drafts: int

    @property
    def decode_only(self) -> bool:
        """Whether no request is within its prompt."""
        return self.num_decodes == self.num_reqs


def count_decodes(batch: "BatchReqState") -> int:
    """Return the requests of a batch that are past their prompts."""
    return len(batch.req_ids) - int(np.count_nonzero(batch.is_prefilling_np))


def gather_facts(batch: "BatchReqState", num_decodes: int) -> BatchFacts:
    """Return the figures of a batch.

    Args:
        batch: The scheduled batch in batch order, not yet trimmed, requests with
            drafts first.
        num_decodes: See :func:`count_decodes`.
    """
    drafts, num_reqs = batch.num_draft_tokens_np, len(batch.req_ids)
    if drafts is None:  # a step after one at depth 0
        return BatchFacts(num_reqs, num_decodes, 0, 0, 0, batch.num_tokens)
    num_drafts, most = int(np.add.reduce(drafts)), int(np.maximum.reduce(drafts))
    num_non_drafts = batch.num_tokens - num_drafts
    if num_drafts == most * num_reqs:  # so all have the most
        num_verifying, width = num_reqs if most else 0, most
    else:
        num_verifying, width = int(np.count_nonzero(drafts)), -1
    return BatchFacts(
        num_reqs, num_decodes, num_drafts, num_verifying, width, num_non_drafts
    )
