# SPDX-License-Identifier: Apache-2.0
"""Coupled acceptance: the sampler accepts by the probability that the head reports.

Each draft's true acceptance probability comes from ``benchmarks.acceptance``: a
function of (request seed, token position, draft index). Two small kernels compute it
where it is needed, on the device, with no host sync and nothing stored:

* in the drafter's graph, in the place of the confidence head;
* before rejection sampling, where a draft that loses its draw becomes -1, which the
  sampler rejects. Its synthetic rates are all 1, so every other draft is accepted.

It works alike for every arm, since both places are upstream's own. The seed is
``SamplingParams.seed``. Greedy requests only, and only workers in the process that
called ``install`` (one GPU).

Invariants (pinned by tests/benchmarks/sweep/test_coupled.py, test_coupled_engine.py):
  * Both kernels agree with ``World``, which the simulator uses.
  * Accepted drafts are exactly those of ``World.accepted_prefix``, at any depth and
    however the verification was trimmed.
"""

from typing import Any

import torch

from benchmarks.acceptance import draws
from benchmarks.acceptance.world import World
from vllm.triton_utils import tl, triton

ACCEPT = tl.constexpr(draws.ACCEPT)
POSITION = tl.constexpr(draws.POSITION)
REQUEST = tl.constexpr(draws.REQUEST)
SEED_STEP = tl.constexpr(draws.SEED_STEP)
COUNTER_STEP = tl.constexpr(draws.COUNTER_STEP)
STREAM_STEP = tl.constexpr(draws.STREAM_STEP)
MIX_1 = tl.constexpr(draws.MIX_1)
MIX_2 = tl.constexpr(draws.MIX_2)
LOW_32 = tl.constexpr(0xFFFFFFFF)
TWO_PI = tl.constexpr(6.283185307179586)
_BLOCK = 256


# int64 throughout: products wrap, and their low 32 bits are those of draws.py.
@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = (x * MIX_1) & LOW_32
    x = x ^ (x >> 15)
    x = (x * MIX_2) & LOW_32
    return x ^ (x >> 16)


@triton.jit
def _uniform(seed, counter, stream: tl.constexpr):
    spread = (seed * SEED_STEP + stream * STREAM_STEP) & LOW_32
    bits = _mix((_mix(spread) + counter * COUNTER_STEP) & LOW_32)
    return ((bits >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)


@triton.jit
def _normal(seed, counter, stream: tl.constexpr):
    radius = tl.sqrt(-2.0 * tl.log(_uniform(seed, counter, stream)))
    return radius * tl.cos(_uniform(seed, counter, stream + 16) * TWO_PI)


@triton.jit
def _true_logit(seed, position, bias, spread_request, spread_position):
    by_request = _normal(seed, position * 0, REQUEST)
    by_position = _normal(seed, position, POSITION)
    return bias + spread_request * by_request + spread_position * by_position


@triton.jit
def _report_confidence_kernel(
    out_ptr,  # [R * depth] float32
    slots_ptr,  # [R * depth] int32, -1 in padding
    positions_ptr,  # [R * depth]
    seeds_ptr,  # [max_num_reqs] int64
    biases_ptr,  # [K] float32
    num_rows,
    depth,
    spread_request,
    spread_position,
    scale,
    shift,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = row < num_rows
    slot = tl.load(slots_ptr + row, mask=valid, other=-1).to(tl.int64)
    real = valid & (slot >= 0)
    seed = tl.load(seeds_ptr + slot, mask=real, other=0)
    position = tl.load(positions_ptr + row, mask=real, other=0).to(tl.int64)
    bias = tl.load(biases_ptr + row % depth, mask=valid, other=0.0)
    logit = _true_logit(seed & LOW_32, position, bias, spread_request, spread_position)
    reported = 1.0 / (1.0 + tl.exp(-(scale * logit + shift)))
    tl.store(out_ptr + row, reported, mask=valid)


@triton.jit
def _reject_drafts_kernel(
    draft_sampled_ptr,  # [L] int64, in place
    positions_ptr,  # [L]
    slots_ptr,  # [L]
    local_pos_ptr,  # [L] 0 is the anchor, k the k-th draft
    seeds_ptr,  # [max_num_reqs] int64
    biases_ptr,  # [K] float32
    num_rows,
    spread_request,
    spread_position,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = row < num_rows
    local_pos = tl.load(local_pos_ptr + row, mask=valid, other=0)
    is_draft = valid & (local_pos > 0)
    slot = tl.load(slots_ptr + row, mask=is_draft, other=0).to(tl.int64)
    seed = tl.load(seeds_ptr + slot, mask=is_draft, other=0) & LOW_32
    position = tl.load(positions_ptr + row, mask=is_draft, other=0).to(tl.int64)
    bias = tl.load(biases_ptr + local_pos - 1, mask=is_draft, other=0.0)
    logit = _true_logit(seed, position, bias, spread_request, spread_position)
    accepted = _uniform(seed, position, ACCEPT) < 1.0 / (1.0 + tl.exp(-logit))
    tl.store(draft_sampled_ptr + row, -1, mask=is_draft & (accepted == 0))


class CoupledAcceptance:
    """A world on a device. Lifecycle: built once per process, then called per step.

    Args:
        world: True probabilities and what is reported of them.
    """

    def __init__(self, world: World):
        self.world = world
        self._biases: torch.Tensor | None = None

    def _biases_on(self, device: torch.device) -> torch.Tensor:
        # First called by warm-up runs, before any capture.
        if self._biases is None:
            self._biases = torch.tensor(
                self.world.biases, dtype=torch.float32, device=device
            )
        return self._biases

    def report_confidence(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        seeds: torch.Tensor,
        depth: int,
    ) -> torch.Tensor:
        """Return what the confidence head says of drafts.

        Args:
            slots: Request slot per draft, -1 in padding. Shape [R * depth], int32.
            positions: Token position per draft. Shape [R * depth], integer.
            seeds: By slot. Shape [max_num_reqs], int64.
            depth: Drafts per request.

        Returns:
            Shape [R * depth], float32.
        """
        world, num_rows = self.world, slots.shape[0]
        out = torch.empty(num_rows, dtype=torch.float32, device=slots.device)
        _report_confidence_kernel[(triton.cdiv(num_rows, _BLOCK),)](
            out,
            slots,
            positions,
            seeds,
            self._biases_on(slots.device),
            num_rows,
            depth,
            float(world.spread_request),
            float(world.spread_position),
            float(world.confidence_scale),
            float(world.confidence_shift),
            BLOCK=_BLOCK,
        )
        return out

    def reject_drafts(
        self,
        draft_sampled: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        local_pos: torch.Tensor,
        seeds: torch.Tensor,
    ) -> None:
        """Set drafts that lose their draw to -1, in place.

        Args:
            draft_sampled: Token per logits row. Shape [L], int64.
            positions: Token position per row. Shape [L], integer.
            slots: Request slot per row. Shape [L], integer.
            local_pos: 0 for the anchor, k for the k-th draft. Shape [L], int32.
            seeds: By slot. Shape [max_num_reqs], int64.
        """
        num_rows = draft_sampled.shape[0]
        _reject_drafts_kernel[(triton.cdiv(num_rows, _BLOCK),)](
            draft_sampled,
            positions,
            slots,
            local_pos,
            seeds,
            self._biases_on(draft_sampled.device),
            num_rows,
            float(self.world.spread_request),
            float(self.world.spread_position),
            BLOCK=_BLOCK,
        )


def install(world: World) -> None:
    """Make this process's drafter report, and its sampler accept, by ``world``.

    The engine must use synthetic acceptance with every rate 1, and its requests
    must carry seeds.
    """
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    coupled = CoupledAcceptance(world)
    drafting: list[Any] = []
    sample_sequential = DSparkSpeculator._sample_sequential
    gather = rejection_sampler.gather_draft_sampled
    verify = rejection_sampler.RejectionSampler.__call__
    sampling: list[Any] = []

    def sample_with_speculator(self: Any, num_reqs: int, head_hidden: Any) -> None:
        drafting[:] = [self]
        self.model.compute_confidence = compute_confidence
        sample_sequential(self, num_reqs, head_hidden)

    def compute_confidence(head_hidden: Any, markov_embed: Any) -> Any:
        speculator, num_rows = drafting[0], head_hidden.shape[0]
        return coupled.report_confidence(
            speculator.sample_idx_mapping[:num_rows],
            speculator.sample_pos[:num_rows],
            speculator.seeds,
            speculator.num_speculative_steps,
        )

    def verify_with_sampler(self: Any, *args: Any, **kwargs: Any) -> Any:
        sampling[:] = [self.sampler]
        return verify(self, *args, **kwargs)

    def gather_and_reject(
        input_ids: Any,
        positions: Any,
        logits_indices: Any,
        expanded_idx_mapping: Any,
        expanded_local_pos: Any,
        prefill_len: Any,
    ) -> Any:
        draft_sampled, pos = gather(
            input_ids,
            positions,
            logits_indices,
            expanded_idx_mapping,
            expanded_local_pos,
            prefill_len,
        )
        coupled.reject_drafts(
            draft_sampled,
            pos,
            expanded_idx_mapping,
            expanded_local_pos,
            sampling[0].sampling_states.seeds.gpu,
        )
        return draft_sampled, pos

    DSparkSpeculator._sample_sequential = sample_with_speculator
    rejection_sampler.RejectionSampler.__call__ = verify_with_sampler
    rejection_sampler.gather_draft_sampled = gather_and_reject
