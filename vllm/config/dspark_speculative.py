# SPDX-License-Identifier: Apache-2.0
"""vLLM's speculative config with the ``dspark_*`` keys added.

The class stands in for ``SpeculativeConfig`` where engine arguments are turned
into a configuration (CONFIG rows of the seam table). With the feature off it
behaves as its base class.

Invariants (pinned by tests/config/test_dspark_speculative*.py):
  * An unknown key fails before a checkpoint is opened, naming the nearest one.
  * Switching the feature on sets ``enable_adaptive_verification`` (varlen) and
    the worker class, and refuses what cannot work, before weights are loaded.
  * Instances hold plain values only: unpickling needs this module but neither
    plugins nor a curve file.
"""

import os
from dataclasses import fields
from typing import Any, Literal

from pydantic import SkipValidation, model_validator
from pydantic_core import ArgsKwargs

from vllm import envs
from vllm.config.dspark_capacity import (
    DSPARK_KEYS,
    DSparkCapacityConfig,
    DSparkCapacityConfigError,
    DSparkCapacityEnv,
)
from vllm.config.dspark_environ import REHEARSAL_VARIABLE
from vllm.config.dspark_values import is_int, unknown_name
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(__name__)

WORKER_CLS = "vllm.v1.worker.gpu.dspark_capacity_worker.DSparkCapacityWorker"
# The CPU rehearsal puts its own worker in place of ours.
_REHEARSAL_PREFIX = "vllm.platforms.dspark_"
# Filled in by the engine, never by users: not offered as the nearest key.
_ENGINE_FIELDS = frozenset(
    {
        "target_model_config",
        "target_parallel_config",
        "draft_model_config",
        "draft_parallel_config",
    }
)
# Limits of the admission kernel; a test compares them with capacity_checks.py.
MAX_DRAFT_TOKENS = 16
# Drafts of method dflash that vLLM drafts with the plain DFlash speculator; the
# others (DFlash2, XPress, LiLiCorr) choose among candidates in one of their own.
DFLASH_ARCHITECTURES = frozenset(
    {
        "DFlashDraftModel",
        "MuseGlimmerAssistantModel",
        "DFlashMuseGlimmerAssistantModel",
        "DFlashLagunaForCausalLM",
    }
)
# What keys about confidences may say beside a draft that reports none.
_DEPTH_ONLY_VALUES = {
    "dspark_capacity_verification_mode": ("varlen",),
    "dspark_confidence_temperature": (1.0,),
    "dspark_online_sts": (None, False),
}
# DeepSeek's drafts have a confidence head unless they say otherwise; all other
# DSpark drafts say so (``enable_confidence_head`` in their config.json).
_HEAD_BY_DEFAULT = frozenset({"DSparkDraftModel", "DSparkV41DraftModel"})


@config
class DSparkSpeculativeConfig(SpeculativeConfig):
    """Configuration for speculative decoding, with load-aware DSpark capacity.

    The fields are checked as in :class:`DSparkCapacityConfig`, which documents
    them; pydantic does not touch them, because it would turn "0.5" and true into
    numbers.
    """

    dspark_sps_curve: SkipValidation[Any] = None
    """Engine speed by load: null, "auto", a JSON file or [[tokens, steps_per_s],
    ...]. "auto" switches everything on."""
    dspark_confidence_threshold: SkipValidation[float] = 0.0
    """Verify drafts whose survival probability is at least this, in [0, 1]. 0:
    off."""
    dspark_budget_frac: SkipValidation[float] = 1.0
    """Verify this fraction of all drafts, the best ones, in [0, 1]. 1: off."""
    dspark_capacity_verification_mode: SkipValidation[Literal["varlen", "mask"]] = (
        "varlen"
    )
    """Leave rejected slots out of the batch (varlen) or ignore them (mask)."""
    dspark_confidence_temperature: SkipValidation[float] = 1.0
    """Divides every confidence logit, in [0.01, 100]; with online STS, at first. 1:
    as trained."""
    dspark_online_sts: SkipValidation[bool | None] = None
    """Calibrate confidences while serving. null: on with "auto"."""
    dspark_sps_overhead_ms: SkipValidation[float] = 0.0
    """Milliseconds >= 0 added to every step of the curve."""
    dspark_draft_depths: SkipValidation[list[int] | None] = None
    """Draft depths that may be used, K among them. null: a default set."""
    dspark_sps_cache: SkipValidation[str] = "off"
    """Directory that keeps measured curves between starts, or "off"."""

    # The decorator would generate one that prints whole model configs to the log.
    __repr__ = SpeculativeConfig.__repr__

    @model_validator(mode="before")
    @classmethod
    def _read_keys(cls, data: Any) -> Any:
        """Check all names and our values before any checkpoint is opened."""
        if not isinstance(data, ArgsKwargs):
            return data
        given = dict(data.kwargs or {})
        _check_names(given, {f.name for f in fields(cls)})
        ours = {k: v for k, v in given.items() if k in DSPARK_KEYS}
        capacity = DSparkCapacityConfig.from_keys(ours)
        if capacity.enabled:
            _check_method(given.get("method"))
            _check_num_tokens(given.get("num_speculative_tokens"))
            # Normalised: depths sorted, a curve file replaced by its content.
            given.update({k: capacity.to_keys()[k] for k in ours})
            if given.get("method") != "dflash":
                adaptive = _resolve_adaptive(capacity, given)
                given["enable_adaptive_verification"] = adaptive
        return ArgsKwargs(data.args, given)

    def __post_init__(self) -> None:
        """Complete the config as upstream does; with the feature on, check it."""
        super().__post_init__()
        capacity = self.capacity_config
        if capacity.enabled:
            # Also checks the list of depths and the environment against K.
            capacity.resolve_depths(self.num_speculative_tokens)
            capacity.start_calibration(self.num_speculative_tokens)
            _check_acceptance(self, capacity)
            _check_draft(self, capacity)
            _warn_of_untrained_positions(self)
            _check_target(self)
            _take_worker(self)
            from vllm.plugins.dspark_capacity.seam import Scope
            from vllm.plugins.dspark_capacity.seams import install

            install(Scope.FRONTEND)

    @property
    def capacity_config(self) -> DSparkCapacityConfig:
        """The checked keys, built anew at each access: keep the result."""
        return DSparkCapacityConfig.from_keys(
            {k: getattr(self, k) for k in DSPARK_KEYS}
        )

    @property
    def reports_confidences(self) -> bool:
        """Whether the draft says how sure it is of each token; DFlash does not."""
        return self.method != "dflash"

    @property
    def capacity_enabled(self) -> bool:
        """Whether the keys switch load-aware capacity on."""
        return self.capacity_config.enabled


def _check_names(given: dict[str, Any], known: set[str]) -> None:
    for name in given:
        if name not in known:
            # Among our own keys the nearest one is surely ours.
            prefix = "dspark_" if name.startswith("dspark") else ""
            offered = {k for k in known - _ENGINE_FIELDS if k.startswith(prefix)}
            raise unknown_name(name, offered, what="speculative_config key")


def _resolve_adaptive(capacity: DSparkCapacityConfig, given: dict[str, Any]) -> bool:
    """Return ``enable_adaptive_verification`` for the verification mode.

    varlen rides on upstream's varlen graphs, which this flag selects; mask keeps
    upstream's fixed-width graphs, which it would remove.

    Raises:
        DSparkCapacityConfigError: The user set the flag to the other value.
    """
    mode = capacity.dspark_capacity_verification_mode
    needed = mode == "varlen"
    wanted = given.get("enable_adaptive_verification", needed)
    if wanted is not needed:
        other = "mask" if needed else "varlen"
        raise DSparkCapacityConfigError(
            f"enable_adaptive_verification={wanted} contradicts "
            f"dspark_capacity_verification_mode={mode!r} of the {capacity.mode} mode, "
            f"which needs {needed}. Leave enable_adaptive_verification out or set "
            f'"dspark_capacity_verification_mode": "{other}".'
        )
    return needed


def _refuse(name: str, value: Any, allowed: str, way_out: str) -> None:
    raise DSparkCapacityConfigError(
        f"{name}={value!r} does not work with load-aware DSpark capacity: must be "
        f"{allowed}. {way_out}, or drop the dspark_* keys from the speculative config."
    )


def has_confidence_head(spec: SpeculativeConfig) -> bool:
    """Return whether the draft checkpoint announces a confidence head.

    Weights are not looked at; the worker checks that they were loaded.

    Args:
        spec: Completed config with method dspark.

    Source: the DSpark model classes, ``model_executor/models/qwen3_dspark.py``
    and ``models/deepseek_v4/nvidia/dspark.py`` at v0.33.0.
    """
    hf_config = spec.draft_model_config.hf_config
    # Upstream gives these architectures to whatever draft it does not recognise, a
    # plain model included, so only a DeepSeek target vouches for them.
    by_default = bool(
        _HEAD_BY_DEFAULT & set(spec.draft_model_config.architectures)
    ) and spec.target_model_config.hf_config.model_type.startswith("deepseek_v4")
    return bool(getattr(hf_config, "enable_confidence_head", by_default))


def _check_num_tokens(num_tokens: Any) -> None:
    """Check K as it was given; None leaves it to the draft's block size."""
    if num_tokens is not None and not is_int(num_tokens):
        # Upstream would take true for 1 and "7" for 7.
        _refuse(
            "num_speculative_tokens",
            num_tokens,
            f"an integer in [1, {MAX_DRAFT_TOKENS}], not {type(num_tokens).__name__}",
            "Give a number, for example 7",
        )
    if num_tokens is not None and num_tokens > MAX_DRAFT_TOKENS:
        _refuse(
            "num_speculative_tokens",
            num_tokens,
            f"at most {MAX_DRAFT_TOKENS}, the widest batch row that is ranked",
            f"Set num_speculative_tokens to {MAX_DRAFT_TOKENS} or less",
        )


def _check_method(method: Any) -> None:
    """Check a method, before upstream's own checks of its architectures."""
    if method not in (None, "dspark", "dflash"):
        _refuse(
            "method",
            method,
            '"dspark", with a draft that has a confidence head, or "dflash", whose '
            "depth alone follows the load",
            "Use such a draft (others can use upstream's own \"enable_adaptive_"
            'verification": true, which estimates acceptance)',
        )


def _check_draft(spec: DSparkSpeculativeConfig, capacity: DSparkCapacityConfig) -> None:
    _check_method(spec.method)
    _check_num_tokens(spec.num_speculative_tokens)
    if not spec.reports_confidences:
        _check_depth_only(spec, capacity)
    elif not has_confidence_head(spec):
        is_target = spec.model == spec.target_model_config.model
        _refuse(
            "model",
            spec.model,
            "a DSpark checkpoint with a confidence head (enable_confidence_head: true "
            "in its config.json)"
            + (", and this is the target itself" if is_target else ""),
            'Give "model", the draft, in --speculative-config'
            if is_target
            else "Use such a draft (without one, upstream's own \"enable_adaptive_"
            'verification": true estimates acceptance)',
        )
    if spec.num_speculative_tokens_per_batch_size is not None:
        _refuse(
            "num_speculative_tokens_per_batch_size",
            spec.num_speculative_tokens_per_batch_size,
            "unset, because the draft depth is chosen every step",
            "Use dspark_draft_depths to limit the depths",
        )


def _warn_of_untrained_positions(spec: DSparkSpeculativeConfig) -> None:
    """Say that the draft was trained for fewer positions than it is asked for.

    vLLM takes such a K, and the output stays right; acceptance there is poor.
    """
    hf_config = spec.draft_model_config.hf_config
    names = ("block_size", "dspark_block_size")
    found = [getattr(hf_config, name, None) for name in names]
    block_size = next((size for size in found if is_int(size)), None)
    if block_size is not None and spec.num_speculative_tokens > block_size:
        logger.warning_once(
            "num_speculative_tokens=%d is more than the draft's block size %d: it was "
            "not trained for the positions beyond, whose drafts are hardly ever "
            "accepted. Set num_speculative_tokens to %d or less.",
            spec.num_speculative_tokens,
            block_size,
            block_size,
        )


def _check_depth_only(
    spec: DSparkSpeculativeConfig, capacity: DSparkCapacityConfig
) -> None:
    """Check a draft without confidences, of which only the depth can be chosen."""
    architectures = set(spec.draft_model_config.architectures)
    if not architectures <= DFLASH_ARCHITECTURES:
        _refuse(
            "architectures",
            sorted(architectures),
            f'one of {", ".join(sorted(DFLASH_ARCHITECTURES))} with method "dflash"',
            "Use such a draft",
        )
    if spec.enable_adaptive_verification:
        # Also where upstream found out the method, which the keys were read without.
        _refuse(
            "enable_adaptive_verification",
            True,
            "False for a DFlash draft, whose depth is chosen and which is not trimmed",
            'Leave the key out and set "method": "dflash"',
        )
    if capacity.dspark_sps_curve != "auto":
        _refuse(
            "dspark_sps_curve",
            spec.dspark_sps_curve,
            '"auto" for a DFlash draft, which reports no confidences to trim by: its '
            "depth is chosen by measured costs",
            'Set "dspark_sps_curve": "auto" in place of a curve, threshold or fraction',
        )
    for name, allowed in _DEPTH_ONLY_VALUES.items():
        if (value := getattr(capacity, name)) not in allowed:
            _refuse(
                name,
                value,
                f"{allowed[0]!r} for a DFlash draft, which reports no confidences",
                "Leave the key out",
            )
    if len(capacity.dspark_draft_depths or (0, 1)) == 1:
        _refuse(
            "dspark_draft_depths",
            list(capacity.dspark_draft_depths),
            "several depths for a DFlash draft, of which only the depth is chosen",
            "Add depths or leave the key out",
        )


def _check_acceptance(
    spec: DSparkSpeculativeConfig, capacity: DSparkCapacityConfig
) -> None:
    if capacity.dspark_online_sts and spec.rejection_sample_method == "synthetic":
        raise DSparkCapacityConfigError(
            "dspark_online_sts=True would have no effect: with "
            "rejection_sample_method='synthetic', acceptance says nothing about "
            "confidences. Allowed here: null or false. Leave the key out, or use real "
            "acceptance."
        )


def _check_target(spec: DSparkSpeculativeConfig) -> None:
    env = DSparkCapacityEnv.from_environ(os.environ)
    if current_platform.is_cpu() and not env.cpu_rehearsal:
        _refuse(
            "platform",
            "cpu",
            "a GPU, or a CPU under the rehearsal",
            f"Set {REHEARSAL_VARIABLE}=1 and TRITON_INTERPRET=1 to rehearse",
        )
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        _refuse("VLLM_USE_V2_MODEL_RUNNER", 0, "1 or unset", "Unset it")
    if spec.target_model_config.enforce_eager:
        _refuse(
            "enforce_eager",
            True,
            "False, because depth and budget are chosen among CUDA graphs",
            "Remove --enforce-eager",
        )
    parallel = spec.target_parallel_config
    for name in (
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if (size := getattr(parallel, name)) > 1:
            _refuse(name, size, "1", f"Set {name} to 1 (tensor parallelism works)")
    if parallel.enable_batch_sharded_sampling:
        _refuse(
            "enable_batch_sharded_sampling",
            True,
            "unset, because the logits of each request are counted on the device",
            "Remove --enable-batch-sharded-sampling",
        )


def _take_worker(spec: DSparkSpeculativeConfig) -> None:
    parallel = spec.target_parallel_config
    if parallel.worker_cls == "auto":
        parallel.worker_cls = WORKER_CLS
    elif parallel.worker_cls != WORKER_CLS and not parallel.worker_cls.startswith(
        _REHEARSAL_PREFIX
    ):
        _refuse(
            "worker_cls",
            parallel.worker_cls,
            f'"auto" or "{WORKER_CLS}", which the feature runs in',
            "Remove --worker-cls",
        )
