# SPDX-License-Identifier: Apache-2.0
"""Timing of what follows the target's forward: logits and rejection sampling.

Upstream's step timing ends with the forward, so a budget would look cheaper than
it is by the whole vocabulary projection and the sampler's passes over the logits.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.dspark_capacity_model_runner import (
        DSparkCapacityModelRunner,
    )

# Repeats per size; the first is a warm-up and is dropped.
NUM_REPEATS = 4
# Row counts per octave are not needed: both parts are linear in rows once they
# fill the device, and flat before.
NUM_SIZES = 8


def dummy_verify_batch(
    runner: "DSparkCapacityModelRunner", num_reqs: int
) -> InputBatch:
    """Return a batch in which every request has K drafts to verify.

    Args:
        runner: Runner whose input buffers are free (no step in progress).
        num_reqs: Requests R.

    Returns:
        A batch with ``R * decode_query_len`` logits rows, on the request slots 0..R-1.
    """
    width, device = runner.decode_query_len, runner.device
    num_logits = num_reqs * width
    dummy = InputBatch.make_dummy(num_reqs, num_logits, runner.input_buffers)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * width
    rows = torch.arange(num_logits, dtype=torch.int64, device=device)
    return replace(
        dummy,
        logits_indices=rows,
        expanded_idx_mapping=rows // width,
        expanded_local_pos=(rows % width).to(torch.int32),
        cu_num_logits=starts,
        cu_num_logits_np=np.arange(num_reqs + 1, dtype=np.int32) * width,
        num_draft_tokens=num_logits - num_reqs,
    )


def measure_sample_ms(
    runner: "DSparkCapacityModelRunner",
) -> list[tuple[int, float]]:
    """Time the vocabulary projection and the rejection sampler, greedy.

    Args:
        runner: Runner whose graphs have been captured.

    Returns:
        ``(logits rows, ms)`` ascending; empty when no graph is wide enough for one
        request. Device time from events. All ranks must call it together: the
        projection may gather over the tensor-parallel group.
    """
    hidden = runner.cudagraph_manager.hidden_states
    if hidden is None:
        return []
    width = runner.decode_query_len
    rows = min(hidden.shape[0], get_max_chunk_logits(runner.vocab_size))
    largest = min(rows // width, runner.max_num_reqs)
    if largest < 1:
        return []
    sizes = sorted({max(1, largest >> i) for i in range(NUM_SIZES)})
    return [(n * width, _median_ms(runner, hidden, n)) for n in sizes]


def _median_ms(
    runner: "DSparkCapacityModelRunner", hidden_states: torch.Tensor, num_reqs: int
) -> float:
    batch = dummy_verify_batch(runner, num_reqs)
    times = []
    for _ in range(NUM_REPEATS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        logits = runner.model.compute_logits(hidden_states[batch.logits_indices])
        runner.rejection_sampler(logits, batch, runner.speculator.draft_logits)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(np.median(times[1:]))
