# SPDX-License-Identifier: Apache-2.0
"""The capacity manager that keeps the batch's shape: what is not admitted is rejected.

Why that is lossless is argued in :mod:`.capacity`.

Invariants (pinned by tests/v1/worker/gpu/spec_decode/test_capacity.py):
  * A step that trims nothing marks nothing and launches nothing.
  * Marked are exactly the drafts beyond each request's capacity.
"""

from typing import TYPE_CHECKING, Any

import torch

from vllm.config.dspark_capacity import DSparkCapacityConfig
from vllm.config.dspark_environ import DSparkCapacityEnv
from vllm.v1.worker.gpu.spec_decode.capacity import CapacityManager

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState


class MaskCapacityManager(CapacityManager):
    """Fixed-shape verification: drafts beyond the capacity are rejected unjudged.

    Saves no target work; it is the way out where an attention backend cannot
    replay graphs of uneven query lengths, and it keeps threshold semantics. Measured
    costs (``auto``) therefore say that a budget saves nothing: only the depth follows
    the load.
    """

    def __init__(
        self,
        config: DSparkCapacityConfig,
        env: DSparkCapacityEnv,
        *,
        req_states: "RequestState",
        **kwargs: Any,
    ):
        super().__init__(config, env, req_states=req_states, **kwargs)
        max_reqs, device = req_states.max_num_reqs, req_states.device
        self._cu_num_logits = torch.zeros(
            max_reqs + 1, dtype=torch.int32, device=device
        )
        self._query_start_loc = torch.zeros_like(self._cu_num_logits)
        self._capacity_of_slot = torch.zeros(max_reqs, dtype=torch.int32, device=device)

    def invalid_drafts(self, input_batch: "InputBatch") -> torch.Tensor | None:
        """Mark the logits rows of drafts that capacity rejects.

        The rejection sampler resamples at the first of them from the plain target
        distribution, exactly as if the draft had not been made.

        Args:
            input_batch: The batch being verified, fixed shape.

        Returns:
            Shape [L], bool, device; None when the step trims nothing.
        """
        if not self._plan.trims:
            return None
        capacities = self.admit(
            input_batch.idx_mapping, self._cu_num_logits, self._query_start_loc
        )
        self._capacity_of_slot[input_batch.idx_mapping] = capacities
        # Draft i of a request sits at local position i + 1.
        row_capacity = self._capacity_of_slot[input_batch.expanded_idx_mapping]
        return input_batch.expanded_local_pos > row_capacity
