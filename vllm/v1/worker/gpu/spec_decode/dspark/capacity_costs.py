# SPDX-License-Identifier: Apache-2.0
"""Where a worker's step costs come from, and the knee that follows from them.

A given curve is used as it is; ``auto`` prices the batches that capacity serves,
each on the graph that serves it: uniform decode batches of K + 1 tokens a request,
and varlen batches by token count. Threshold and fraction modes need no costs.

Invariants (pinned by tests/.../dspark/test_capacity_costs.py):
  * Costs are not ready before they were set, and then equal on every TP rank.
  * One sample is expected per yielded batch; a mismatch is an error, never a
    silently shifted curve.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from tqdm import tqdm

from vllm.config.dspark_capacity import DSparkCapacityConfig
from vllm.distributed.parallel_state import get_tp_group, is_global_first_rank
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.dspark.confidence_mirror import PRIOR_CONFIDENCE
from vllm.v1.worker.gpu.spec_decode.dspark.sps_curve import (
    CostSample,
    GraphSizes,
    costs_from_samples,
    costs_from_sps_curve,
    knee_from_costs,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.async_utils import StepTimingSample
    from vllm.v1.worker.gpu.dspark_cudagraph_utils import CapacityCudaGraphManager
    from vllm.v1.worker.gpu.states import RequestState

logger = init_logger(__name__)

# Repeats per profiled size: enough for a median that survives one stall.
NUM_REPEATS = 3
# Sizes timed per depth, and varlen sizes: with linear interpolation between them
# the tables are within a per cent of timing every captured size.
NUM_UNIFORM_POINTS = 20
NUM_VARLEN_POINTS = 36
# Context of the dummy requests, tokens. A graph is timed at its full number of
# requests, more than a trimmed batch of its size has, so a long context
# would charge attention that is not done.
PROFILE_CONTEXT_TOKENS = 128
# Relative throughput that capacity must promise before a batch size activates it.
KNEE_MARGIN = 0.01


@dataclass(frozen=True, slots=True)
class ProfileHooks:
    """What profiling needs from the runner.

    Attributes:
        graphs: The target's graph manager.
        measure_sample_ms: Returns ``(logits rows, ms)`` points of logits and
            sampling, ascending.
        set_depth: Makes the runner's dummy decodes run at a draft depth.
        draft_num_reqs: Returns the request counts with a drafter graph of a depth.
    """

    graphs: "CapacityCudaGraphManager"
    measure_sample_ms: Callable[[], list[tuple[int, float]]]
    set_depth: Callable[[int], None]
    draft_num_reqs: Callable[[int], list[int]]


@dataclass(frozen=True, slots=True)
class _Shape:
    """One profiled batch shape."""

    kind: Literal["uniform", "varlen"]
    depth: int
    num_tokens: int


def thin(sizes: Sequence[int], num_points: int) -> list[int]:
    """Pick about ``num_points`` sizes spread evenly in their logarithm.

    Args:
        sizes: Ascending positive sizes.
        num_points: Points wanted, >= 2. The first and last size always stay.
    """
    if len(sizes) <= num_points:
        return list(sizes)
    wanted = np.geomspace(sizes[0], sizes[-1], num_points)
    nearest = np.searchsorted(np.asarray(sizes), wanted - 1e-9)
    return [sizes[i] for i in sorted(set(np.minimum(nearest, len(sizes) - 1)))]


class CapacityCosts:
    """Step costs and the activation knee of one worker.

    Lifecycle: built with the manager; ``batches_to_profile`` and ``set_samples`` at
    graph capture; read every step.

    Args:
        config: The capacity keys.
        req_states: The runner's request states, for the table sizes.
        depths: Enabled draft depths, ascending, K last.
        activation_batch_size: Explicit knee in requests; 0 for the automatic one.
    """

    def __init__(
        self,
        config: DSparkCapacityConfig,
        req_states: "RequestState",
        *,
        depths: tuple[int, ...],
        activation_batch_size: int = 0,
    ):
        self.config = config
        self.depths = depths
        self.max_num_reqs = req_states.max_num_reqs
        self.max_num_tokens = req_states.max_num_batched_tokens
        self.activation_num_reqs = activation_batch_size or 1
        self._explicit_knee = activation_batch_size > 0
        self._costs: StepCosts | None = None
        self._hooks: ProfileHooks | None = None
        self._shapes: list[_Shape] = []
        self._sample_ms: list[tuple[int, float]] = [(1, 0.0)]
        self.ready = False

    @property
    def step_costs(self) -> StepCosts:
        """The cost tables of curve mode.

        Raises:
            RuntimeError: They have not been set yet.
        """
        if self._costs is None:
            raise RuntimeError("DSpark step costs are read before they were set")
        return self._costs

    @property
    def profiles(self) -> bool:
        """Whether the costs come from timing this worker (``auto``)."""
        return self.config.mode == "curve" and self.config.dspark_sps_curve == "auto"

    def bind(self, hooks: ProfileHooks) -> None:
        """Give access to the runner; its graphs are read when profiling."""
        self._hooks = hooks

    def _profile_shapes(self, hooks: ProfileHooks) -> list[_Shape]:
        shapes: list[_Shape] = []
        for depth in self.depths:
            # The largest batch may lie beyond the graphs: then it runs eagerly.
            reqs = thin(hooks.graphs.uniform_num_reqs(depth), NUM_UNIFORM_POINTS)
            for num_reqs in sorted({*reqs, self.max_num_reqs}, reverse=True):
                num_tokens = num_reqs * (depth + 1)
                if num_tokens <= self.max_num_tokens:
                    shapes.append(_Shape("uniform", depth, num_tokens))
        varlen = hooks.graphs.varlen_num_tokens()
        largest = max(varlen, default=0)
        # Beyond the graphs, up to the largest mixed batch: a few points suffice for
        # a line, and each is a batch that memory profiling has already run.
        tail = (largest + largest // 2, 2 * largest, self.max_num_tokens)
        sizes = {*thin(varlen, NUM_VARLEN_POINTS)}
        sizes |= {min(t, self.max_num_tokens) for t in tail if largest}
        shapes += [
            _Shape("varlen", self.depths[-1], t) for t in sorted(sizes, reverse=True)
        ]
        return shapes

    def batches_to_profile(self) -> Iterator[dict[str, Any]]:
        """Yield dummy-run arguments, one timing each, behind a progress bar."""
        self._shapes = []
        if not self.profiles or self._hooks is None:
            return
        hooks, start = self._hooks, time.perf_counter()
        self._sample_ms = hooks.measure_sample_ms() or self._sample_ms
        repeated = [s for s in self._profile_shapes(hooks) for _ in range(NUM_REPEATS)]
        try:
            for shape in tqdm(
                repeated,
                desc="Profiling step costs",
                disable=not is_global_first_rank(),
            ):
                self._shapes.append(shape)
                hooks.set_depth(shape.depth)
                yield {
                    "num_tokens": shape.num_tokens,
                    "uniform_decode": shape.kind == "uniform",
                    "context_len": PROFILE_CONTEXT_TOKENS,
                }
        finally:
            hooks.set_depth(self.depths[-1])
        logger.info_once(
            "Profiled %d DSpark step shapes in %.1f s",
            len(repeated) // NUM_REPEATS,
            time.perf_counter() - start,
        )

    def set_samples(self, timings: "Sequence[StepTimingSample]") -> None:
        """Turn the timings of the yielded batches into cost tables.

        Args:
            timings: One timing per yielded batch, in order.

        Raises:
            RuntimeError: The number of timings differs from that of the batches.
        """
        if not self.profiles:
            return
        if len(timings) != len(self._shapes):
            raise RuntimeError(
                f"profiled {len(self._shapes)} step shapes but got {len(timings)} "
                "timings; give dspark_sps_curve as a list or a file instead of 'auto'"
            )
        samples = [
            sample
            for shape, timing in zip(self._shapes, timings, strict=True)
            for sample in self._to_samples(shape, timing)
        ]
        assert self._hooks is not None
        graphs = self._hooks.graphs
        self._set_costs(
            costs_from_samples(
                get_tp_group().broadcast_object(samples, src=0),
                depths=self.depths,
                max_num_reqs=self.max_num_reqs,
                max_num_tokens=self.max_num_tokens,
                graph_sizes=GraphSizes(
                    graphs.varlen_num_tokens(),
                    {d: graphs.uniform_num_reqs(d) for d in self.depths},
                    {d: self._hooks.draft_num_reqs(d) for d in self.depths},
                ),
                overhead_ms=self.config.dspark_sps_overhead_ms,
            )
        )

    def _to_samples(
        self, shape: _Shape, timing: "StepTimingSample"
    ) -> Iterator[CostSample]:
        rows, ms = np.asarray(self._sample_ms, dtype=np.float64).T
        # Every token of a decode batch has a logits row.
        verify_ms = timing.forward_ms + float(
            np.interp(timing.num_target_tokens, rows, ms)
        )
        size = (shape.depth, timing.num_reqs, timing.num_target_tokens)
        graph = timing.full_cudagraph
        yield CostSample(shape.kind, *size, verify_ms, graph)
        if graph:
            # Eager target steps leave gaps between the drafter's launches.
            yield CostSample("draft", *size, timing.drafter_ms, True)

    def finish(self) -> None:
        """Complete the costs after capture and let capacity run.

        Raises:
            RuntimeError: ``auto`` was asked for and nothing could be profiled.
        """
        if self.config.mode == "curve" and not self.profiles:
            self._set_costs(
                costs_from_sps_curve(
                    self.config.dspark_sps_curve.points,
                    depths=self.depths,
                    max_num_reqs=self.max_num_reqs,
                    max_num_tokens=self.max_num_tokens,
                    overhead_ms=self.config.dspark_sps_overhead_ms,
                )
            )
        if self.config.mode == "curve" and self._costs is None:
            raise RuntimeError(
                "dspark_sps_curve 'auto' could not profile any step: no FULL decode "
                "graph was captured. Use cudagraph_mode FULL_DECODE_ONLY or "
                "FULL_AND_PIECEWISE, or give the curve as a list or a file."
            )
        self.ready = True

    def _set_costs(self, costs: StepCosts) -> None:
        self._costs = costs
        if not self._explicit_knee:
            full = self.depths[-1]
            prior = np.cumprod(np.full(full, PRIOR_CONFIDENCE))
            self.activation_num_reqs = knee_from_costs(costs, full, prior, KNEE_MARGIN)
        knee = self.activation_num_reqs
        logger.info_once(
            "DSpark capacity: %s knee at %s requests (max_num_seqs %d)",
            "explicit" if self._explicit_knee else "automatic",
            knee if knee <= self.max_num_reqs else "no number of",
            self.max_num_reqs,
        )
