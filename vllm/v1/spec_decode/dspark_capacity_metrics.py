# SPDX-License-Identifier: Apache-2.0
"""Metrics of the capacity feature: what was drafted, verified and accepted.

vLLM's own spec-decode figures keep their meaning (drafts that the target judged);
these add what was drafted, at which depth, and in how many steps capacity acted.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.spec_decode.metrics import (
    SpecDecodingLogging,
    SpecDecodingProm,
    SpecDecodingStats,
)

logger = init_logger(__name__)


@dataclass
class CapacitySpecDecodingStats(SpecDecodingStats):
    """One scheduler step's figures; travels to the frontend with vLLM's own.

    Attributes:
        num_fixed_steps: 1 if the step ran the fixed path, below the knee.
        num_active_steps: 1 if capacity planned the step.
        num_drafted_tokens: Drafts in hand when the step began.
        draft_depth_sum: Depth of those drafts, once per step.
    """

    num_fixed_steps: int = 0
    num_active_steps: int = 0
    num_drafted_tokens: int = 0
    draft_depth_sum: int = 0


STATS_ANNOTATION = CapacitySpecDecodingStats | None


class CapacitySpecDecodingLogging(SpecDecodingLogging):
    """vLLM's periodic log line, followed by one on capacity."""

    def reset(self) -> None:
        """Start a new interval."""
        super().reset()
        self.capacity = CapacitySpecDecodingStats(num_spec_tokens=0)
        self.capacity_start = time.monotonic()

    def observe(self, spec_decoding_stats: SpecDecodingStats) -> None:
        """Add one step's figures."""
        super().observe(spec_decoding_stats)
        if isinstance(spec_decoding_stats, CapacitySpecDecodingStats):
            total, step = self.capacity, spec_decoding_stats
            total.num_fixed_steps += step.num_fixed_steps
            total.num_active_steps += step.num_active_steps
            total.num_drafted_tokens += step.num_drafted_tokens
            total.draft_depth_sum += step.draft_depth_sum
            total.num_draft_tokens += step.num_draft_tokens
            total.num_accepted_tokens += step.num_accepted_tokens

    def log(self, log_fn: Callable[..., Any] = logger.info) -> None:
        """Log the interval and start a new one."""
        total = self.capacity
        super().log(log_fn)
        num_steps = total.num_fixed_steps + total.num_active_steps
        if not num_steps:
            return
        log_fn(
            "DSpark capacity: active in %.0f%% of %d steps, mean draft depth %.2f, "
            "per step drafted %.1f, verified %.1f, accepted %.1f tokens",
            100 * total.num_active_steps / num_steps,
            num_steps,
            total.draft_depth_sum / num_steps,
            total.num_drafted_tokens / num_steps,
            total.num_draft_tokens / num_steps,
            total.num_accepted_tokens / num_steps,
        )


class CapacitySpecDecodingProm(SpecDecodingProm):
    """vLLM's spec-decode counters plus ``vllm:dspark_capacity_*``."""

    def __init__(
        self,
        speculative_config: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *args: Any,
        **kwargs: Any,
    ):
        super().__init__(
            speculative_config, labelnames, per_engine_labelvalues, *args, **kwargs
        )
        self._capacity_counters: dict[str, Any] = {}
        if not getattr(speculative_config, "capacity_enabled", False):
            return
        for name, documentation in (
            ("num_drafted_tokens", "Draft tokens in hand at verification."),
            ("num_verified_tokens", "Draft tokens that the target verified."),
            ("draft_depth_sum", "Sum over steps of the draft depth."),
        ):
            counter = self._counter_cls(
                name=f"vllm:dspark_capacity_{name}",
                documentation=documentation,
                labelnames=labelnames,
            )
            self._capacity_counters[name] = create_metric_per_engine(
                counter, per_engine_labelvalues
            )
        steps = self._counter_cls(
            name="vllm:dspark_capacity_num_steps",
            documentation="Verify steps, by whether capacity was active.",
            labelnames=[*labelnames, "state"],
        )
        for state in ("fixed", "active"):
            self._capacity_counters[state] = {
                engine: steps.labels(*values, state)
                for engine, values in per_engine_labelvalues.items()
            }

    def observe(
        self, spec_decoding_stats: SpecDecodingStats, engine_idx: int = 0
    ) -> None:
        """Add one step's figures to the counters."""
        super().observe(spec_decoding_stats, engine_idx)
        if not self._capacity_counters:
            return
        if not isinstance(spec_decoding_stats, CapacitySpecDecodingStats):
            logger.warning_once(
                "vllm:dspark_capacity_* metrics are unavailable: this process decoded "
                "engine messages before capacity was configured. Create the engine "
                "with dspark_* keys first, or in a process of its own."
            )
            return
        stats = spec_decoding_stats
        for name, value in (
            ("num_drafted_tokens", stats.num_drafted_tokens),
            ("num_verified_tokens", stats.num_draft_tokens),
            ("draft_depth_sum", stats.draft_depth_sum),
            ("fixed", stats.num_fixed_steps),
            ("active", stats.num_active_steps),
        ):
            self._capacity_counters[name][engine_idx].inc(value)
