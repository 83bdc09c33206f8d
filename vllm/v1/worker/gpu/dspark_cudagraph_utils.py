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

Descs = list[BatchExecutionDescriptor]
Candidates = dict[tuple[int, int], Descs]
CaptureDescs = dict[CUDAGraphMode, Descs]


# Below these tokens a step streams the model's weights: it takes as long whatever the
# batch, so sizes may double. Above, kernels work in tiles of this many rows.
FLAT_NUM_TOKENS = 64
TILE_NUM_TOKENS = 16


def _step(size: int, width: int = 1, parts: int = 16) -> int:
    """Return how far the next size to capture may be from one of ``size`` units."""
    if size * width < FLAT_NUM_TOKENS:
        return size
    tile = 1 << max((TILE_NUM_TOKENS // width).bit_length() - 1, 0)
    return max(tile, (1 << (size.bit_length() - 1)) // parts)


def ladder(max_value: int, width: int = 1, *, parts: int = 16) -> list[int]:
    """Return batch sizes to capture, few where a batch's size hardly costs.

    Args:
        max_value: Largest size, included.
        width: Tokens of one unit of the size (a request, a token), >= 1.
        parts: Steps between a power of two and the next.

    Returns:
        Ascending sizes: powers of two until a batch has ``FLAT_NUM_TOKENS``, then in
        steps of the power of two below divided by ``parts``, but of about
        ``TILE_NUM_TOKENS`` at least. Padding to the next is then at most one of
        ``parts``, half of that on average, or within a tile.
    """
    sizes, size = [], 1
    while size < max_value:
        sizes.append(size)
        size += _step(size, width, parts)
    return [*sizes, max_value] if max_value > 0 else []


def thinned(sizes: list[int]) -> list[int]:
    """Drop the token counts whose next kept one is within a step of the ladder.

    Args:
        sizes: Token counts.

    Returns:
        Some of them, ascending, with the largest.
    """
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not kept or kept[-1] - size >= _step(size):
            kept.append(size)
    return kept[::-1]


class CapacityCudaGraphManager(ModelCudaGraphManager, MeteredCapture):
    """Captures uniform and varlen decode graphs; uniform ones win a tie.

    Uniform graphs exist for every enabled draft depth: the K-wide ones at the sizes
    of a fixed-K engine, narrower and varlen ones at those that the ladder asks for.

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
        sizes = self.compilation_config.cudagraph_capture_sizes or []
        varlen = self.varlen_decode
        # `varlen_decode` is an exclusive switch upstream, so the candidates are
        # built once with it off (the fixed-K set, then each narrower width) and
        # once with it on.
        self.varlen_decode = False
        super()._init_candidates()
        parts = [(self._candidates, self._capture_descs)]
        for query_len in self.uniform_query_lens.values():
            if query_len != self.decode_query_len:
                most = min(self.max_num_reqs, max(sizes, default=0) // query_len)
                num_tokens = [n * query_len for n in ladder(most, query_len)]
                parts.append(self._decode_candidates(query_len, num_tokens))
        if varlen:
            self.varlen_decode = True
            parts.append(self._decode_candidates(self.decode_query_len, thinned(sizes)))
        self._merge_parts(parts)

    def _decode_candidates(
        self, query_len: int, num_tokens: list[int]
    ) -> tuple[Candidates, CaptureDescs]:
        """Build the decode candidates of one width at sizes of its own."""
        config, full_len = self.compilation_config, self.decode_query_len
        sizes = config.cudagraph_capture_sizes
        self._candidates, self._capture_descs = {}, {}
        self.decode_query_len = query_len
        config.cudagraph_capture_sizes = num_tokens
        try:
            super()._init_candidates()
        finally:
            self.decode_query_len = full_len
            config.cudagraph_capture_sizes = sizes

        def for_decodes(
            descs: list[BatchExecutionDescriptor],
        ) -> list[BatchExecutionDescriptor]:
            # Graphs of mixed batches do not depend on the width: fixed K's serve.
            return [d for d in descs if d.uniform_token_count or d.max_query_len]

        full = CUDAGraphMode.FULL
        candidates = {n: for_decodes(found) for n, found in self._candidates.items()}
        return candidates, {full: for_decodes(self._capture_descs.get(full, []))}

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
