# SPDX-License-Identifier: Apache-2.0
"""Coupled acceptance in an engine of the rehearsal, with a record of what it did."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.acceptance.world import World

WORLD = World.with_profile(
    spread_request=1.0,
    spread_position=1.0,
    confidence_scale=1.5,
    confidence_shift=0.2,
)
# Rounds judged: seed, position of the first draft, drafts judged, drafts accepted.
_JUDGED: list[tuple[int, int, int, int]] = []
# Rounds drafted: seed, position of the first draft, confidences.
_REPORTED: list[tuple[int, int, list[float]]] = []


@contextmanager
def coupled() -> Iterator[None]:
    """Install the world around an engine, and take it out again."""
    from benchmarks.sweep.coupled import install
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    patched = [
        (DSparkSpeculator, "_sample_sequential"),
        (rejection_sampler.RejectionSampler, "__call__"),
        (rejection_sampler, "gather_draft_sampled"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name in patched]
    _JUDGED.clear(), _REPORTED.clear()
    install(WORLD)
    _watch_drafts(DSparkSpeculator)
    _watch_verification(rejection_sampler.RejectionSampler)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _watch_drafts(owner: Any) -> None:
    sample = owner._sample_sequential

    def watched(self: Any, num_reqs: int, head_hidden: Any) -> None:
        sample(self, num_reqs, head_hidden)
        if not self.use_confidence_head:
            return
        depth = self.num_speculative_steps
        slots = self.sample_idx_mapping[: num_reqs * depth : depth].tolist()
        first = self.sample_pos[: num_reqs * depth : depth].tolist()
        probs = self.draft_token_confidence_probs[:num_reqs, :depth].tolist()
        for slot, position, row in zip(slots, first, probs, strict=True):
            if slot >= 0:
                _REPORTED.append((int(self.seeds[slot]), position, row))

    owner._sample_sequential = watched


def _watch_verification(owner: Any) -> None:
    verify = owner.__call__

    def watched(self: Any, logits: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = verify(self, logits, batch, *args, **kwargs)
        bounds = batch.cu_num_logits[: batch.num_reqs + 1].tolist()
        positions = batch.positions[batch.logits_indices].tolist()
        states = self.sampler.req_states
        for row, slot in enumerate(batch.idx_mapping[: batch.num_reqs].tolist()):
            start, num_drafts = bounds[row], bounds[row + 1] - bounds[row] - 1
            if num_drafts and positions[start] >= int(states.prefill_len.gpu[slot]):
                seed = int(self.sampler.sampling_states.seeds.gpu[slot])
                accepted = int(output.num_sampled[row]) - 1
                _JUDGED.append((seed, positions[start] + 1, num_drafts, accepted))
        return output

    owner.__call__ = watched


def record(worker: Any) -> dict[str, Any]:
    """Return what was judged and reported."""
    return {"judged": list(_JUDGED), "reported": list(_REPORTED)}
