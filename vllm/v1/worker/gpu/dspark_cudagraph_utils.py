# SPDX-License-Identifier: Apache-2.0
"""Target CUDA graphs for capacity: the uniform ones of fixed K beside varlen ones.

Upstream captures either uniform decode graphs or varlen ones. Capacity needs
both: below the knee a step replays the very graph that fixed K would, above it a
varlen graph of the trimmed size.

Invariants (pinned by tests/v1/worker/gpu/test_dspark_cudagraph_utils.py):
  * Every uniform descriptor of a fixed-K manager is captured, and a uniform batch
    dispatches to the descriptor that the fixed-K manager would choose.
  * A batch that is not uniform never matches a uniform graph.
"""

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    ModelCudaGraphManager,
)
from vllm.v1.worker.gpu.dspark_capture_meter import MeteredCapture

Candidates = dict[tuple[int, int], list[BatchExecutionDescriptor]]
CaptureDescs = dict[CUDAGraphMode, list[BatchExecutionDescriptor]]


def ladder(max_value: int) -> list[int]:
    """Return batch sizes whose neighbours differ by at most a sixteenth.

    Args:
        max_value: Largest size, included.

    Returns:
        Ascending sizes: every one up to 16, then in steps of a sixteenth of the
        power of two below. Padding to the next costs about 3 % on average.
    """
    sizes, size = [], 1
    while size < max_value:
        sizes.append(size)
        size += max(1, 1 << (size.bit_length() - 5)) if size >= 16 else 1
    return [*sizes, max_value]


class CapacityCudaGraphManager(ModelCudaGraphManager, MeteredCapture):
    """Captures uniform and varlen decode graphs; uniform ones win a tie.

    Uniform graphs exist for every enabled draft depth: the K-wide ones at the sizes
    of a fixed-K engine, narrower ones at the sizes of ``ladder``.

    Lifecycle: built once per KV cache initialisation; captured at start-up;
    per step: dispatch, replay.
    """

    def _init_candidates(self) -> None:
        speculative_config = self.vllm_config.speculative_config
        if not getattr(speculative_config, "capacity_enabled", False):
            # Another engine of this process, without capacity.
            super()._init_candidates()
            return
        config = speculative_config.capacity_config
        num_steps = self.vllm_config.num_speculative_tokens
        self.uniform_query_lens = {
            depth: depth + self.decode_query_len - num_steps
            for depth in config.resolve_depths(num_steps)
        }
        varlen = self.varlen_decode
        # `varlen_decode` is an exclusive switch upstream, so the candidates are
        # built once with it off (the fixed-K set, then each narrower width) and
        # once with it on.
        self.varlen_decode = False
        super()._init_candidates()
        parts = [(self._candidates, self._capture_descs)]
        for query_len in self.uniform_query_lens.values():
            if query_len != self.decode_query_len:
                parts.append(self._narrow_candidates(query_len))
        if varlen:
            self.varlen_decode = True
            self._candidates, self._capture_descs = {}, {}
            super()._init_candidates()
            parts.append((self._candidates, self._capture_descs))
        self._merge_parts(parts)

    def _narrow_candidates(self, query_len: int) -> tuple[Candidates, CaptureDescs]:
        """Build the uniform candidates of one width below K + 1."""
        config, full_len = self.compilation_config, self.decode_query_len
        sizes = config.cudagraph_capture_sizes
        limit = max(sizes, default=0) // query_len
        self._candidates, self._capture_descs = {}, {}
        self.decode_query_len = query_len
        config.cudagraph_capture_sizes = [
            n * query_len for n in ladder(min(self.max_num_reqs, limit)) if n > 0
        ]
        try:
            super()._init_candidates()
        finally:
            self.decode_query_len = full_len
            config.cudagraph_capture_sizes = sizes
        # Graphs of mixed batches do not depend on the width.
        full = CUDAGraphMode.FULL
        candidates = {
            key: [d for d in descs if d.cg_mode == full]
            for key, descs in self._candidates.items()
        }
        return candidates, {full: self._capture_descs.get(full, [])}

    def _merge_parts(self, parts: list[tuple[Candidates, CaptureDescs]]) -> None:
        self._candidates, self._capture_descs = {}, {}
        for candidates, descs in parts:
            for key, found in candidates.items():
                self._candidates.setdefault(key, []).extend(found)
            for mode, found in descs.items():
                self._capture_descs.setdefault(mode, []).extend(found)
        for key, found in self._candidates.items():
            # FULL before PIECEWISE; the sort is stable, so uniform stays first.
            found = dict.fromkeys(found)
            self._candidates[key] = sorted(
                found, key=lambda d: d.cg_mode != CUDAGraphMode.FULL
            )
        for mode, found in self._capture_descs.items():
            # Largest first: smaller graphs then reuse the pool's memory.
            self._capture_descs[mode] = sorted(
                dict.fromkeys(found), key=lambda d: d.num_tokens, reverse=True
            )

    def uniform_num_reqs(self, depth: int) -> list[int]:
        """Return the request counts with a uniform graph of one depth, sorted.

        Args:
            depth: Enabled draft depth.
        """
        width = self.uniform_query_lens[depth]
        return sorted(
            {
                d.num_reqs
                for d in self.graphs
                if d.uniform_token_count == width and d.num_reqs is not None
            }
        )

    def varlen_num_tokens(self) -> list[int]:
        """Return the token counts with a captured varlen decode graph, sorted."""
        return sorted({d.num_tokens for d in self.graphs if d.max_query_len})
