# SPDX-License-Identifier: Apache-2.0
"""Block-draft speculators that really draft d <= K positions.

At depth d the draft pass has d drafting rows, d vocabulary projections and, for
DSpark, d Markov steps per request, on a FULL graph captured for that depth. The
logical width stays K: buffers keep K columns, and columns beyond d hold valid token
ids that nothing schedules.

Invariants (pinned by tests/.../dspark/test_depth_speculator.py and the engine runs
in tests/v1/worker/gpu/test_dspark_depth.py):
  * Outside ``at_depth`` every attribute has its value for K.
  * A graph captured for depth d is replayed at depth d only: descriptors of
    different depths differ in ``uniform_token_count``.
  * Depth 0 keeps the context K/V of accepted tokens up to date.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CreateForwardFn,
)
from vllm.v1.worker.gpu.dspark_capture_meter import MeteredCapture
from vllm.v1.worker.gpu.dspark_cudagraph_utils import ladder
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark.online_sts import calibration_tensor
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark.sts_kernels import calibrate_confidences

logger = init_logger(__name__)


# vLLM 0.32 always runs the query pass; 0.33 can store the context K/V alone.
SKIPS_QUERY_PASS = hasattr(DFlashSpeculator, "_store_hidden_states")


class _CaptureAtDepth(MeteredCapture):
    """Runs every captured forward at the depth of its descriptor."""

    at_query_len: Callable[[int], contextlib.AbstractContextManager[None]]

    def capture(
        self, create_forward_fn: CreateForwardFn, *args: Any, **kwargs: Any
    ) -> None:
        """Capture with the speculator switched to each descriptor's depth."""

        def create_at_depth(
            desc: BatchExecutionDescriptor, warmup: bool
        ) -> Callable[[CUDAGraphMode], None]:
            query_len = desc.uniform_token_count or self.decode_query_len
            with self.at_query_len(query_len):
                forward = create_forward_fn(desc, warmup=warmup)

            def forward_at_depth(cg_mode: CUDAGraphMode) -> None:
                with self.at_query_len(query_len):
                    forward(cg_mode)

            return forward_at_depth

        super().capture(create_at_depth, *args, **kwargs)


class DepthCudaGraphManager(DFlashCudaGraphManager, _CaptureAtDepth):
    """One drafter graph manager for every enabled depth.

    One object, because upstream's memory profiling finds managers as attributes of
    the speculator and drops their graphs. ``_CaptureAtDepth`` sits between upstream's
    two classes, where the factory of forwards passes from one to the other.

    Args:
        query_lens: Query rows per request of each enabled depth, ascending.
        at_query_len: Context that switches the speculator to such a depth.
        args: See ``CudaGraphManager``.
        kwargs: See ``CudaGraphManager``.
    """

    def __init__(
        self,
        query_lens: tuple[int, ...],
        at_query_len: Callable[[int], contextlib.AbstractContextManager[None]],
        *args: Any,
        **kwargs: Any,
    ):
        self._query_lens = query_lens
        self.at_query_len = at_query_len
        super().__init__(*args, **kwargs)

    def _init_candidates(self) -> None:
        config, full_len = self.compilation_config, self.decode_query_len
        sizes = config.cudagraph_capture_sizes
        candidates: dict[tuple[int, int], list[Any]] = {}
        descs: dict[CUDAGraphMode, list[Any]] = {}
        try:
            # Deepest first: at equal token counts it has the fewest requests.
            for query_len in reversed(self._query_lens):
                self.decode_query_len = query_len
                if query_len != full_len:
                    config.cudagraph_capture_sizes = self._sizes_of(query_len, sizes)
                self._candidates, self._capture_descs = {}, {}
                super()._init_candidates()
                for key, found in self._candidates.items():
                    candidates.setdefault(key, []).extend(found)
                for mode, found in self._capture_descs.items():
                    descs.setdefault(mode, []).extend(found)
        finally:
            self.decode_query_len = full_len
            config.cudagraph_capture_sizes = sizes
        self._candidates = candidates
        self._capture_descs = {
            mode: sorted(dict.fromkeys(d), key=lambda x: x.num_tokens, reverse=True)
            for mode, d in descs.items()
        }

    def _sizes_of(self, query_len: int, sizes: list[int] | None) -> list[int]:
        """Return the token counts to capture at one width below K's.

        Half as dense as the target's: a drafter's step is a fraction of a step.
        """
        most = min(self.max_num_reqs, max(sizes or (), default=0) // query_len)
        return [n * query_len for n in ladder(most, query_len, parts=8)]


def _draft_depths(vllm_config: VllmConfig) -> tuple[int, ...]:
    """Return the enabled depths; K alone for an engine without capacity."""
    config = vllm_config.speculative_config
    num_steps = config.num_speculative_tokens
    if not getattr(config, "capacity_enabled", False):
        return (num_steps,)
    return config.capacity_config.resolve_depths(num_steps)


def _start_calibration(
    vllm_config: VllmConfig, device: torch.device
) -> torch.Tensor | None:
    """Return what the captured graphs apply at first; None to apply nothing."""
    config = vllm_config.speculative_config
    if not getattr(config, "capacity_enabled", False):
        return None
    start = config.capacity_config.start_calibration(config.num_speculative_tokens)
    return None if start is None else calibration_tensor(start, device)


class _DepthDrafting(DFlashSpeculator):
    """What a depth changes in every block-draft speculator.

    Lifecycle: as its base; per step ``propose`` runs at the depth that the
    scheduler asked for.

    Args:
        vllm_config: Config whose ``speculative_config`` has capacity keys.
        device: Device of the drafter.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        full = self.num_speculative_steps
        self.draft_depths = _draft_depths(vllm_config)
        # Depth of dummy runs, which carry no depth of their own (cost profiling).
        self.dummy_depth = full
        # The fill-in layout has one bonus row per request besides the drafts.
        self._extra_query_rows = self.num_query_per_req - full
        self._sample_col_of_depth = {
            depth: torch.arange(depth, dtype=torch.int32, device=device).repeat(
                self.max_num_reqs
            )
            for depth in self.draft_depths
        }

    def query_len(self, depth: int) -> int:
        """Return the query rows per request of a draft pass at ``depth``."""
        return depth + self._extra_query_rows

    @contextlib.contextmanager
    def at_depth(self, depth: int) -> Iterator[None]:
        """Run the base class's code at another depth.

        Every buffer whose layout follows the depth is swapped for a view or table
        of that depth at the same storage, so captured addresses stay valid.

        Args:
            depth: Enabled depth, >= 1.
        """
        if depth == self.num_speculative_steps:
            yield
            return
        layout = self._layout_of(depth)
        before = {name: getattr(self, name) for name in layout}
        vars(self).update(layout)
        try:
            yield
        finally:
            vars(self).update(before)

    def _layout_of(self, depth: int) -> dict[str, Any]:
        """Return the attributes that follow the depth, with their values there."""
        return {
            "num_speculative_steps": depth,
            "num_query_per_req": self.query_len(depth),
            "sample_col": self._sample_col_of_depth[depth],
            "draft_tokens": self.draft_tokens[:, :depth],
        }

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Create one graph manager that holds the graphs of every enabled depth."""
        super().init_cudagraph_manager(cudagraph_mode)
        base = self.query_cudagraph_manager
        assert base is not None
        self.query_cudagraph_manager = DepthCudaGraphManager(
            tuple(self.query_len(d) for d in self.draft_depths if d > 0),
            lambda query_len: self.at_depth(query_len - self._extra_query_rows),
            self.vllm_config,
            self.device,
            base.cudagraph_mode,
            decode_query_len=self.num_query_per_req,
        )

    def captured_num_reqs(self, depth: int) -> list[int]:
        """Return the request counts with a captured draft graph of one depth, sorted.

        Args:
            depth: Enabled draft depth; 0 has no draft pass.
        """
        manager, width = self.query_cudagraph_manager, self.query_len(depth)
        if depth == 0 or manager is None:
            return []
        return sorted(
            {
                d.num_reqs
                for d in manager.graphs
                if d.uniform_token_count == width and d.num_reqs is not None
            }
        )

    def propose(
        self,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft at the depth asked for.

        Args:
            args: See ``DFlashSpeculator.propose``.
            dummy_run: Whether no real request is served.
            num_speculative_tokens: Depth d; None is K, or ``dummy_depth`` in dummy
                runs.
            kwargs: See ``DFlashSpeculator.propose``.

        Returns:
            Shape [R, K], int64; columns beyond d hold valid ids of older drafts.
        """
        depth = num_speculative_tokens
        if depth is None:
            depth = self.dummy_depth if dummy_run else self.num_speculative_steps
        # Query rows are laid out even where their pass is skipped: as few as can be,
        # since a batch of depth 0 may hold more requests than fit K rows each.
        layout_depth = depth or min(d for d in self.draft_depths if d > 0)
        if not SKIPS_QUERY_PASS:
            depth = layout_depth
        with self.at_depth(layout_depth):
            drafts = super().propose(
                *args,
                dummy_run=dummy_run,
                num_speculative_tokens=depth,
                **kwargs,
            )
        return self.draft_tokens[: drafts.shape[0]]


class DepthDFlashSpeculator(_DepthDrafting):
    """DFlash speculator with a physical depth per step; it reports no confidences."""


class DepthDSparkSpeculator(_DepthDrafting, DSparkSpeculator):
    """DSpark speculator with a physical depth per step and calibrated confidences.

    Args:
        vllm_config: Config whose ``speculative_config`` has capacity keys.
        device: Device of the drafter.

    Attributes:
        calibration: Scales, biases, bends, by class; read by the captured graphs.
            Shape [2, 3, K], float32; None where confidences stay as reported.
        confidence_logits: Raw logits of the last drafts, written by the captured
            graphs that calibrate. Shape [max_num_reqs, K], float32.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        self.calibration = _start_calibration(vllm_config, device)
        self.confidence_logits = torch.zeros_like(self.draft_token_confidence_probs)
        self._rows_of_depth = {
            depth: torch.arange(self.max_num_reqs, dtype=torch.int64, device=device)
            * self.query_len(depth)
            for depth in self.draft_depths
        }

    def _layout_of(self, depth: int) -> dict[str, Any]:
        return super()._layout_of(depth) | {
            "_anchor_idx": self._rows_of_depth[depth],
            "draft_token_confidence_probs": self.draft_token_confidence_probs[
                :, :depth
            ],
        }

    def _sample_sequential(self, num_reqs: int, head_hidden: torch.Tensor) -> None:
        """Draft left to right, then calibrate the confidences, in the graph."""
        super()._sample_sequential(num_reqs, head_hidden)
        if self.calibration is None or not self.use_confidence_head:
            return
        depth = self.num_speculative_steps
        calibrate_confidences(
            self.sample_idx_mapping[: num_reqs * depth : depth],
            self.temperature,
            self.calibration,
            probs_out=self.draft_token_confidence_probs[:num_reqs],
            logits_out=self.confidence_logits,
        )
