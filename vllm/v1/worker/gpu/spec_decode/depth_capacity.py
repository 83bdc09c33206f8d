# SPDX-License-Identifier: Apache-2.0
"""The capacity manager of drafts that report no confidences: depth alone.

Nothing ranks such drafts, so cutting them could only cut every request at the same
position, which drafting less deep does for less. Every draft is therefore verified;
the depth follows the load by what was accepted per position and what steps cost.

Invariants (pinned by tests/v1/worker/gpu/test_dspark_dflash.py):
  * No step trims.
  * Below the knee the step is that of fixed K.
"""

from typing import TYPE_CHECKING, Any

import torch

from vllm.v1.worker.gpu.spec_decode.capacity import CapacityManager
from vllm.v1.worker.gpu.spec_decode.dspark.acceptance_mirror import AcceptanceMirror

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


class DepthCapacityManager(CapacityManager):
    """Chooses the draft depth; verifies every draft.

    Lifecycle: as its base, without ``admit``; ``note_judged`` comes between
    ``plan_step`` and ``finish_step``.

    Args:
        args: See ``CapacityManager``.
        kwargs: See ``CapacityManager``.
    """

    mirror: AcceptanceMirror

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._judged: tuple[torch.Tensor, torch.Tensor] | None = None

    def _make_mirror(self) -> AcceptanceMirror:
        states = self.req_states
        return AcceptanceMirror(
            states.max_num_reqs,
            states.num_speculative_steps,
            states.device,
            num_bonus_tokens=self.num_bonus_tokens,
        )

    def _warm_up(self) -> None:
        """Do nothing: nothing is ever admitted."""

    def note_judged(
        self, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Keep what the step verified until its end; see the base class."""
        self._judged = num_sampled, num_rejected

    def finish_step(
        self, probs: torch.Tensor, input_batch: "InputBatch", draft_depth: int
    ) -> None:
        """Publish what was accepted of the drafts that this step verified, if it shall.

        Args:
            probs: Not read: the draft reports no confidences.
            input_batch: The batch that was verified.
            draft_depth: Positions that were drafted.
        """
        if not self._publishes():
            return
        assert self._judged is not None
        self.mirror.publish(*self._judged, ~input_batch.is_prefilling_np)
        self.planner.published(draft_depth)
