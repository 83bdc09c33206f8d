# SPDX-License-Identifier: Apache-2.0
"""What only the whole engine configuration tells, checked before weights load.

The checks run inside ``VllmConfig.__post_init__``, after the platform has had its
last word on asynchronous scheduling and CUDA graphs (FRONTEND seam
``config.vllm-config``). The attention metadata builders exist only in a worker,
which checks them itself.

Invariants (pinned by tests/plugins/dspark_capacity/test_config_check.py):
  * A config whose feature is off is not touched.
  * Checking the same config again changes nothing.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config.dspark_capacity import DSparkCapacityConfigError
from vllm.config.dspark_environ import VARIABLES
from vllm.logger import init_logger
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

_SCHEDULER_MODULE = "vllm.v1.core.sched.dspark_capacity_scheduler"
# Limit of the admission kernel; a test compares it with capacity_checks.py.
MAX_NUM_SEQS = 4096
SCHEDULER_CLS = f"{_SCHEDULER_MODULE}.DSparkCapacityScheduler"
ASYNC_SCHEDULER_CLS = f"{_SCHEDULER_MODULE}.DSparkCapacityAsyncScheduler"


def wrap_validate_adaptive_verification(
    original: Callable[["VllmConfig"], None],
) -> Callable[["VllmConfig"], None]:
    """Return ``VllmConfig._validate_adaptive_verification`` with our checks first.

    Args:
        original: Upstream's validator.
    """

    @functools.wraps(original)
    def validate(self: "VllmConfig") -> None:
        check_and_update_vllm_config(self)
        original(self)

    return validate


def wrap_validate_environ(
    original: Callable[[type, bool], None],
) -> Callable[[type, bool], None]:
    """Return ``Platform.validate_environ`` that knows the VLLM_DSPARK_* names.

    Upstream reports every VLLM_* variable missing from its own table as unknown.
    The names are added for the length of the call only: in the table they would
    change the keys of vLLM's compile cache.

    Args:
        original: Upstream's function, without its classmethod wrapper.
    """

    @functools.wraps(original)
    def validate_environ(cls: type, hard_fail: bool) -> None:
        with _known_variables():
            original(cls, hard_fail)

    return validate_environ


@contextlib.contextmanager
def _known_variables() -> Iterator[None]:
    table = envs.environment_variables
    envs.environment_variables = {**table, **dict.fromkeys(VARIABLES)}
    try:
        yield
    finally:
        envs.environment_variables = table


def check_and_update_vllm_config(vllm_config: "VllmConfig") -> None:
    """Refuse what the feature cannot run with and set its scheduler, in place.

    Args:
        vllm_config: Configuration within its own ``__post_init__``. Left alone
            unless its speculative config switches the feature on.

    Raises:
        DSparkCapacityConfigError: LoRA, V1 runner, no full CUDA graphs, an
            attention backend that cannot run trimmed batches, or a scheduler of
            the user's own.
    """
    spec = vllm_config.speculative_config
    if not getattr(spec, "capacity_enabled", False):
        return
    _check_runner(vllm_config)
    _check_size(vllm_config)
    _check_cudagraphs(vllm_config)
    if spec.enable_adaptive_verification:
        _check_attention_backend(vllm_config)
    _set_scheduler(vllm_config)


def _refuse(name: str, value: Any, allowed: str, way_out: str) -> None:
    raise DSparkCapacityConfigError(
        f"{name}={value} does not work with load-aware DSpark capacity: must be "
        f"{allowed}. {way_out}, or drop the dspark_* keys from the speculative config."
    )


def _check_runner(vllm_config: "VllmConfig") -> None:
    if vllm_config.lora_config is not None:
        # LoRA maps tokens to adapters on the host, from widths that the device
        # changes afterwards.
        _refuse("enable_lora", True, "False", "Remove --enable-lora")
    if not vllm_config.use_v2_model_runner:
        _refuse(
            "model runner",
            "V1",
            "V2",
            "Set VLLM_USE_V2_MODEL_RUNNER=1 and remove what it does not support",
        )


def _check_size(vllm_config: "VllmConfig") -> None:
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    if max_num_seqs > MAX_NUM_SEQS:
        _refuse(
            "max_num_seqs",
            max_num_seqs,
            f"at most {MAX_NUM_SEQS}, the largest batch that is ranked",
            f"Set --max-num-seqs to {MAX_NUM_SEQS} or less",
        )


def _check_cudagraphs(vllm_config: "VllmConfig") -> None:
    mode = vllm_config.compilation_config.cudagraph_mode
    if not mode.has_full_cudagraphs():
        _refuse(
            "cudagraph_mode",
            mode.name,
            "FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE",
            "Remove -cc.cudagraph_mode, or set it to one of these",
        )


def _check_attention_backend(vllm_config: "VllmConfig") -> None:
    """Look at an explicitly chosen backend; an automatic choice takes care."""
    backend = vllm_config.attention_config.backend
    if backend is None or current_platform.is_cpu():
        return  # the rehearsal makes CPU attention fit
    try:
        backend_cls = backend.get_class()
    except Exception as e:  # any import failure; selecting it will report it
        logger.info(
            "Attention backend %s is not checked for load-aware DSpark capacity "
            "before start: %r",
            backend.name,
            e,
        )
        return
    if not backend_cls.supports_device_cpu_query_lens_mismatch():
        _refuse(
            "attention_backend",
            backend.name,
            "one that takes query lengths from the device, such as FLASH_ATTN",
            'Choose another, set "dspark_capacity_verification_mode": "mask"',
        )


def _set_scheduler(vllm_config: "VllmConfig") -> None:
    scheduler_config = vllm_config.scheduler_config
    found = scheduler_config.scheduler_cls
    if found not in (None, SCHEDULER_CLS, ASYNC_SCHEDULER_CLS):
        _refuse(
            "scheduler_cls",
            found,
            "unset, because the scheduler carries the draft depth",
            "Remove --scheduler-cls",
        )
    scheduler_config.scheduler_cls = (
        ASYNC_SCHEDULER_CLS if scheduler_config.async_scheduling else SCHEDULER_CLS
    )
