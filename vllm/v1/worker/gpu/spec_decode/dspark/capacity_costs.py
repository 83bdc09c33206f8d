# SPDX-License-Identifier: Apache-2.0
"""Where a worker's step costs come from, and the knee that follows from them.

A given curve is used as it is; ``auto`` prices the batches that capacity serves
(:mod:`.cost_profile`), or takes what an equal configuration measured before from the
cache. Threshold and fraction modes need no costs.

Invariants (pinned by tests/.../dspark/test_capacity_costs.py):
  * Costs are not ready before they were set, and then equal on every TP rank.
  * One sample is expected per yielded batch; a mismatch is an error, never a
    silently shifted curve.
  * With a usable cache entry nothing is timed; only rank 0 reads or writes one.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from vllm.config.dspark_capacity import DSparkCapacityConfig, SpsCurveInput
from vllm.distributed.parallel_state import get_tp_group, is_global_first_rank
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.dspark.context_costs import split_context
from vllm.v1.worker.gpu.spec_decode.dspark.cost_cache import COSTS_SECTION, CostCache
from vllm.v1.worker.gpu.spec_decode.dspark.cost_profile import (
    SHORT_CONTEXT_TOKENS,
    ProfileHooks,
    ProfileOptions,
    ProfileShape,
    flat_samples,
    profile_shapes,
)
from vllm.v1.worker.gpu.spec_decode.dspark.knee import (
    KNEE_MARGIN,
    knee_from_costs,
    knee_from_curve,
)
from vllm.v1.worker.gpu.spec_decode.dspark.sps_curve import (
    CostSample,
    GraphSizes,
    costs_from_samples,
    costs_from_sps_curve,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import (
    TABLE_KEYS,
    StepCosts,
)
from vllm.v1.worker.gpu.spec_decode.dspark.survival_history import PRIOR_CONFIDENCE

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.async_utils import StepTimingSample
    from vllm.v1.worker.gpu.states import RequestState

logger = init_logger(__name__)


class CapacityCosts:
    """Step costs and the activation knee of one worker.

    Lifecycle: built with the manager; bound, ``batches_to_profile`` and
    ``set_samples`` at graph capture; read every step.

    Args:
        config: The capacity keys.
        req_states: The runner's request states, for the table sizes.
        depths: Enabled draft depths, ascending, K last.
        activation_batch_size: Explicit knee in requests; 0 for the automatic one.
        options: How thoroughly to profile.

    Attributes:
        cached_sections: Rank 0's cache entry, equal on every rank; empty without one.
            Sections other than ``costs`` are there for whoever saved them.
    """

    def __init__(
        self,
        config: DSparkCapacityConfig,
        req_states: "RequestState",
        *,
        depths: tuple[int, ...],
        activation_batch_size: int = 0,
        options: ProfileOptions | None = None,
    ):
        self.config = config
        self.depths = depths
        self.max_num_reqs = req_states.max_num_reqs
        self.max_num_tokens = req_states.max_num_batched_tokens
        self.activation_num_reqs = activation_batch_size or 1
        self._explicit_knee = activation_batch_size > 0
        self._options = options or ProfileOptions()
        self._costs: StepCosts | None = None
        self._hooks: ProfileHooks | None = None
        self._cache: CostCache | None = None
        self.cached_sections: dict[str, Any] = {}
        self._has_cached_costs = False
        self._shapes: list[ProfileShape] = []
        self._sample_ms: list[tuple[int, float]] = [(1, 0.0)]
        self.profile_s = 0.0
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

    @property
    def measured(self) -> bool:
        """Whether the costs were measured, so that serving may correct them.

        A curve of whole steps is the operator's word; it cannot tell depths apart,
        so a measured step could not be compared with it.
        """
        return self._costs is not None and not self._costs.whole_step

    def bind(self, hooks: ProfileHooks, cache: CostCache | None = None) -> None:
        """Give access to the runner, whose graphs are read when profiling.

        Args:
            hooks: The runner's side.
            cache: This configuration's cache entry; None keeps nothing. Read on
                rank 0 and sent to the others.
        """
        self._hooks, self._cache = hooks, cache
        if cache is None:
            return
        group, found = get_tp_group(), None
        if group.rank_in_group == 0:
            sections = cache.load() or {}
            found = sections, self._costs_of(sections) is not None
        self.cached_sections, self._has_cached_costs = group.broadcast_object(
            found, src=0
        )

    def save_sections(self, sections: dict[str, Any]) -> None:
        """Keep sections for the next start, on rank 0; nothing without a cache."""
        if self._cache is not None and get_tp_group().rank_in_group == 0:
            self._cache.save(sections)

    def _costs_of(self, sections: dict[str, Any]) -> StepCosts | None:
        """Return an entry's costs; damaged ones are discarded with a warning."""
        if COSTS_SECTION not in sections:
            return None
        try:
            costs = StepCosts.from_json(sections[COSTS_SECTION])
            costs = costs.fitted(self.depths, self.max_num_reqs, self.max_num_tokens)
        except ValueError as error:
            assert self._cache is not None
            self._cache.discard(f"its costs are unusable ({error})")
            return None
        return replace(costs, overhead_ms=self.config.dspark_sps_overhead_ms)

    def batches_to_profile(self) -> Iterator[dict[str, Any]]:
        """Yield dummy-run arguments, one timing each, behind a progress bar."""
        self._shapes = []
        if not self.profiles or self._hooks is None or self._has_cached_costs:
            return
        hooks, start = self._hooks, time.perf_counter()
        self._sample_ms = hooks.measure_sample_ms() or self._sample_ms
        shapes = profile_shapes(
            hooks,
            depths=self.depths,
            max_num_reqs=self.max_num_reqs,
            max_num_tokens=self.max_num_tokens,
            num_reqs=self._options.num_reqs,
        )
        num_runs = self._options.warmup + self._options.repeats
        try:
            for shape in tqdm(
                [s for s in shapes for _ in range(num_runs)],
                desc="Profiling step costs",
                disable=not is_global_first_rank(),
            ):
                self._shapes.append(shape)
                hooks.set_depth(shape.depth)
                yield shape.dummy_run()
        finally:
            hooks.set_depth(self.depths[-1])
        self.profile_s = time.perf_counter() - start
        logger.info_once(
            "Profiled %d DSpark step shapes in %.1f s", len(shapes), self.profile_s
        )

    def set_samples(self, timings: "Sequence[StepTimingSample]") -> None:
        """Turn the timings of the yielded batches into cost tables.

        Args:
            timings: One timing per yielded batch, in order.

        Raises:
            RuntimeError: The number of timings differs from that of the batches.
        """
        if not self.profiles or self._hooks is None:
            return
        if self._has_cached_costs:
            cached = self._costs_of(self.cached_sections)
            assert cached is not None, "every rank reads what rank 0 has read"
            self._set_costs(cached)
            return
        if len(timings) != len(self._shapes):
            raise RuntimeError(
                f"profiled {len(self._shapes)} step shapes but got {len(timings)} "
                "timings; give dspark_sps_curve as a list or a file instead of 'auto'"
            )
        num_runs = self._options.warmup + self._options.repeats
        samples = [
            sample
            for i, (shape, timing) in enumerate(zip(self._shapes, timings, strict=True))
            if i % num_runs >= self._options.warmup
            for sample in shape.samples(timing, self._sample_ms)
        ]
        costs = self._from_samples(get_tp_group().broadcast_object(samples, src=0))
        self.save_sections({COSTS_SECTION: costs.to_json()})
        self._set_costs(replace(costs, overhead_ms=self.config.dspark_sps_overhead_ms))

    def _from_samples(self, samples: list[CostSample]) -> StepCosts:
        assert self._hooks is not None
        graphs = self._hooks.graphs
        split = split_context(
            samples, depths=self.depths, max_num_reqs=self.max_num_reqs
        )
        kept = split.samples
        if not graphs.varlen_num_tokens():
            kept = [*kept, *flat_samples(kept, self.max_num_tokens)]
        costs = costs_from_samples(
            kept,
            depths=self.depths,
            max_num_reqs=self.max_num_reqs,
            max_num_tokens=self.max_num_tokens,
            graph_sizes=GraphSizes(
                graphs.varlen_num_tokens(),
                {d: graphs.uniform_num_reqs(d) for d in self.depths},
                {d: self._hooks.draft_num_reqs(d) for d in self.depths},
            ),
        )
        return replace(
            costs, verify_context_ms=split.verify_ms, draft_context_ms=split.draft_ms
        )

    def finish(self) -> None:
        """Complete the costs after capture and let capacity run.

        Raises:
            RuntimeError: ``auto`` was asked for and nothing could be profiled.
        """
        if isinstance(self.config.dspark_sps_curve, SpsCurveInput):
            self._set_costs(self._given_costs(self.config.dspark_sps_curve))
        if self.config.mode == "curve" and self._costs is None:
            raise RuntimeError(
                "dspark_sps_curve 'auto' could not profile any step: no FULL decode "
                "graph was captured. Use cudagraph_mode FULL_DECODE_ONLY or "
                "FULL_AND_PIECEWISE, or give the curve as a list or a file."
            )
        self.ready = True

    def _given_costs(self, curve: SpsCurveInput) -> StepCosts:
        """Return a file's full tables where they fit, else what its points say."""
        overhead_ms = self.config.dspark_sps_overhead_ms
        # Any table: one with a misspelt name must not pass for a file without them.
        if not set(TABLE_KEYS).isdisjoint(curve.document or ()):
            try:
                costs = StepCosts.from_json(curve.document)
                costs = costs.fitted(
                    self.depths, self.max_num_reqs, self.max_num_tokens
                )
                return replace(costs, overhead_ms=costs.overhead_ms + overhead_ms)
            except ValueError as error:
                logger.warning_once(
                    "dspark_sps_curve (%s): using its points of whole steps, not its "
                    "full cost tables, because %s",
                    curve.origin,
                    str(error),
                )
        return costs_from_sps_curve(
            curve.points,
            depths=self.depths,
            max_num_reqs=self.max_num_reqs,
            max_num_tokens=self.max_num_tokens,
            overhead_ms=overhead_ms,
        )

    def _automatic_knee(self, costs: StepCosts) -> int:
        full = self.depths[-1]
        if costs.whole_step:
            assert isinstance(self.config.dspark_sps_curve, SpsCurveInput)
            return knee_from_curve(
                self.config.dspark_sps_curve.points,
                full,
                max_num_reqs=self.max_num_reqs,
                overhead_ms=costs.overhead_ms,
            )
        prior = np.cumprod(np.full(full, PRIOR_CONFIDENCE))
        return knee_from_costs(costs, full, prior, KNEE_MARGIN, SHORT_CONTEXT_TOKENS)

    def _set_costs(self, costs: StepCosts) -> None:
        self._costs = costs
        if not self._explicit_knee:
            self.activation_num_reqs = self._automatic_knee(costs)
        knee = self.activation_num_reqs
        logger.info_once(
            "DSpark capacity: %s knee at %s requests (max_num_seqs %d)",
            "explicit" if self._explicit_knee else "automatic",
            knee if knee <= self.max_num_reqs else "no number of",
            self.max_num_reqs,
        )
