# SPDX-License-Identifier: Apache-2.0
"""Builders for unit tests of the capacity managers and what they are made of.

Import this module before the modules under test: on a CPU it puts vLLM's
placeholders for CUDA streams and events in place, which those modules bind by name.
"""

from types import SimpleNamespace

import numpy as np
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    import vllm.v1.worker.cpu.shm  # noqa: F401

from vllm.config.dspark_capacity import (  # noqa: E402
    DSparkCapacityConfig,
    DSparkCapacityEnv,
)

MAX_NUM_REQS = 8
K = 4
NO_LIMIT = 10**6


class FakeGroup:
    """A tensor-parallel group of one process, or one whose rank 0 is elsewhere.

    Attributes:
        broadcasts: Copies of the tensors that were broadcast, as they came in.
    """

    def __init__(self, world_size=1, rank_0_value=None, rank_in_group=0):
        self.world_size, self.rank_0_value = world_size, rank_0_value
        self.rank_in_group = rank_in_group
        self.broadcasts = []

    def broadcast(self, tensor, src=0):
        assert src == 0
        self.broadcasts.append(tensor.clone())
        if self.rank_0_value is not None:
            tensor.fill_(self.rank_0_value)
        return tensor

    def broadcast_object(self, obj, src=0):
        assert src == 0
        self.broadcasts.append(obj)
        return obj if self.rank_0_value is None else self.rank_0_value


def make_config(**keys):
    return DSparkCapacityConfig.from_keys(keys)


def make_env(**variables):
    """Return switches with capacity active from one request on."""
    environ = {"VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": "1"}
    environ |= {f"VLLM_DSPARK_{name}": str(v) for name, v in variables.items()}
    return DSparkCapacityEnv.from_environ(environ)


def make_req_states(max_num_reqs=MAX_NUM_REQS, num_steps=K):
    return SimpleNamespace(
        max_num_reqs=max_num_reqs,
        num_speculative_steps=num_steps,
        max_num_batched_tokens=max_num_reqs * (num_steps + 1),
        device=DEVICE,
        num_computed_tokens_np=np.zeros(max_num_reqs, dtype=np.int32),
    )


def make_batch(drafts, *, slots=None, non_drafts=None, prefilling=None):
    """Return a batch as the runner gathers it.

    Args:
        drafts: Scheduled drafts per request, requests with drafts first; None for
            a batch without drafts (then give ``non_drafts``).
        slots: Request slots; the row numbers by default.
        non_drafts: Scheduled tokens besides drafts; 1 each by default.
        prefilling: Prompt length per prefilling request, 0 for decodes.
    """
    num_reqs = len(drafts if drafts is not None else non_drafts)
    draft_counts = np.zeros(num_reqs) if drafts is None else np.asarray(drafts)
    others = np.ones(num_reqs) if non_drafts is None else np.asarray(non_drafts)
    scheduled = (draft_counts + others).astype(np.int32)
    prompts = np.zeros(num_reqs) if prefilling is None else np.asarray(prefilling)
    return SimpleNamespace(
        req_ids=[f"r{i}" for i in range(num_reqs)],
        num_scheduled_tokens=scheduled,
        num_tokens=int(scheduled.sum()),
        num_draft_tokens_np=None if drafts is None else draft_counts.astype(np.int32),
        idx_mapping_np=np.arange(num_reqs) if slots is None else np.asarray(slots),
        prefill_len_np=np.where(prompts > 0, prompts, 1).astype(np.int32),
        num_computed_prefill_tokens_np=np.where(prompts > 0, 0, 1).astype(np.int32),
        is_prefilling_np=prompts > 0,
    )


def make_input_batch(batch):
    """Return the device view of a fixed-shape decode batch."""
    slots = torch.as_tensor(batch.idx_mapping_np, dtype=torch.int64, device=DEVICE)
    widths = torch.as_tensor(batch.num_scheduled_tokens, device=DEVICE).long()
    local = torch.cat([torch.arange(int(w)) for w in widths]).to(DEVICE)
    return SimpleNamespace(
        num_reqs=len(batch.req_ids),
        idx_mapping=slots,
        idx_mapping_np=batch.idx_mapping_np,
        is_prefilling_np=batch.is_prefilling_np,
        expanded_idx_mapping=torch.repeat_interleave(slots, widths),
        expanded_local_pos=local,
    )
