# SPDX-License-Identifier: Apache-2.0
"""Chooses the capacity manager: varlen where attention allows it, else mask; depth
alone for drafts without confidences."""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.config.dspark_environ import DSparkCapacityEnv
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.capacity import (
    CapacityManager,
    VarlenCapacityManager,
)
from vllm.v1.worker.gpu.spec_decode.depth_capacity import DepthCapacityManager
from vllm.v1.worker.gpu.spec_decode.mask_capacity import MaskCapacityManager

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.dspark_capacity_model_runner import (
        DSparkCapacityModelRunner,
    )

logger = init_logger(__name__)


def wrap_manager_factory(
    original: Callable[..., Any],
) -> Callable[..., Any]:
    """Seam: build our varlen manager wherever upstream would build its own.

    Upstream's factory runs first, for its checks of the attention backends; what it
    builds is dropped. Where it refuses, the reason is logged and None makes the
    runner fall back to mask mode.

    Args:
        original: ``maybe_create_adaptive_verification_manager``.

    Returns:
        A factory with the same keyword arguments.
    """

    def maybe_create_capacity_manager(**kwargs: Any) -> Any:
        speculative_config = kwargs["vllm_config"].speculative_config
        if not getattr(speculative_config, "capacity_enabled", False):
            # Another engine of this process, without capacity.
            return original(**kwargs)
        try:
            upstream = original(**kwargs)
        except ValueError as e:
            logger.warning_once(
                "DSpark capacity falls back to "
                "dspark_capacity_verification_mode='mask': %s",
                str(e),
            )
            return None
        if upstream is None:
            return None
        return VarlenCapacityManager(
            speculative_config.capacity_config,
            DSparkCapacityEnv.from_environ(os.environ),
            req_states=kwargs["req_states"],
            query_start_loc=kwargs["query_start_loc"],
            # vLLM 0.33 takes a fourth result from reallocate_drafts.
            reports_admitted_counts=hasattr(
                adaptive_verification, "AdmittedDraftCounts"
            ),
            num_bonus_tokens=kwargs["num_bonus_tokens"],
            max_total_logits=kwargs["max_total_logits"],
        )

    return maybe_create_capacity_manager


def create_fixed_shape_manager(
    runner: "DSparkCapacityModelRunner",
) -> MaskCapacityManager | DepthCapacityManager:
    """Build the manager of batches that keep their shape.

    For drafts with confidences that is the mask manager, and the varlen flags are
    taken back.

    Args:
        runner: Runner whose KV cache and samplers exist.

    Raises:
        ValueError: The model brings a rejection sampler of its own, which cannot be
            told which drafts to reject.
    """
    if not runner.speculative_config.reports_confidences:
        return _build(DepthCapacityManager, runner)
    if not hasattr(runner.rejection_sampler, "capacity_invalid_drafts"):
        raise ValueError(
            "dspark_capacity_verification_mode='mask' needs vLLM's rejection sampler,"
            f" but this model uses {type(runner.rejection_sampler).__name__}. Use "
            "'varlen' with an attention backend that supports it, or remove the "
            "dspark_* keys."
        )
    runner.speculative_config.enable_adaptive_verification = False
    runner.speculator.enable_adaptive_verification = False
    return _build(MaskCapacityManager, runner)


def _build(cls: type[CapacityManager], runner: "DSparkCapacityModelRunner") -> Any:
    return cls(
        runner.speculative_config.capacity_config,
        DSparkCapacityEnv.from_environ(os.environ),
        req_states=runner.req_states,
        num_bonus_tokens=runner.model_state.num_new_sampled_tokens_per_step,
        # Nothing is compacted, so the sampler may verify in as many chunks as it likes.
        max_total_logits=sys.maxsize,
    )
