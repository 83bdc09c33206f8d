# SPDX-License-Identifier: Apache-2.0
"""The seam table: every upstream object that the overlay changes, and nowhere else.

``docs/SEAMS.md`` is generated from this table (``tools/make_seams_doc.py``) and a
test compares the two. Rows are grouped by scope; see :class:`Scope`.
"""

import vllm
from vllm.plugins.dspark_capacity.checks import public_version
from vllm.plugins.dspark_capacity.seam import Scope, Seam, apply
from vllm.plugins.dspark_capacity.seams_rehearsal import REHEARSAL_SEAMS

_RUNNER_TEST = "tests/v1/worker/gpu/test_dspark_capacity_model_runner.py::"

_CONFIG_TEST = "tests/config/test_dspark_speculative.py::"
_CONFIG_CHECK = "vllm.plugins.dspark_capacity.config_check"
_CONFIG_CHECK_TEST = "tests/plugins/dspark_capacity/test_config_check.py::"
_NO_CONFIG_HOOK = "vLLM forbids unknown keys and lets no plugin add a field"
_CONFIG_HOOK = "vLLM lets a plugin extend SpeculativeConfig"

# Modules that use the name in annotations only are not rebound, and its home
# module keeps the original: a pickle of an upstream instance names it there.
_CONFIG_SEAMS: tuple[Seam, ...] = (
    Seam(
        id="config.engine-args",
        target="vllm.engine.arg_utils:SpeculativeConfig",
        kind="subclass",
        scope=Scope.CONFIG,
        replacement="vllm.config.dspark_speculative:DSparkSpeculativeConfig",
        parameters=None,
        reason=_NO_CONFIG_HOOK,
        remove_when=_CONFIG_HOOK,
        test=f"{_CONFIG_TEST}test_every_way_of_starting_reads_our_keys",
    ),
    Seam(
        id="config.public-name",
        target="vllm.config:SpeculativeConfig",
        kind="subclass",
        scope=Scope.CONFIG,
        replacement="vllm.config.dspark_speculative:DSparkSpeculativeConfig",
        parameters=None,
        reason=_NO_CONFIG_HOOK,
        remove_when=_CONFIG_HOOK,
        test=f"{_CONFIG_TEST}test_public_name_builds_our_class",
    ),
    Seam(
        id="config.environ",
        target="vllm.platforms.interface:Platform.validate_environ",
        kind="wrap",
        scope=Scope.ENVIRON,
        replacement=f"{_CONFIG_CHECK}:wrap_validate_environ",
        parameters=("hard_fail",),
        reason="vLLM reports VLLM_* variables outside its own table as unknown",
        remove_when="vLLM lets a plugin declare its environment variables",
        test=f"{_CONFIG_CHECK_TEST}test_our_variables_pass_strict_validation",
    ),
    Seam(
        id="config.vllm-config",
        target="vllm.config.vllm:VllmConfig._validate_adaptive_verification",
        kind="wrap",
        scope=Scope.FRONTEND,
        replacement=f"{_CONFIG_CHECK}:wrap_validate_adaptive_verification",
        parameters=("self",),
        reason="no hook sees the whole config after the platform has completed it",
        remove_when="vLLM calls a plugin or config hook at the end of VllmConfig",
        test=f"{_CONFIG_CHECK_TEST}test_scheduler_follows_async_scheduling",
    ),
)

_RUNNER = "vllm.v1.worker.gpu.model_runner"
_SPEC_DECODE = "vllm.v1.worker.gpu.spec_decode"
_METRICS = "vllm.v1.spec_decode.dspark_capacity_metrics"
_METRICS_TEST = "tests/v1/spec_decode/test_dspark_capacity_metrics.py::"

_WORKER_SEAMS: tuple[Seam, ...] = (
    Seam(
        id="worker.cudagraph-manager",
        target=f"{_RUNNER}:ModelCudaGraphManager",
        kind="subclass",
        scope=Scope.WORKER,
        replacement="vllm.v1.worker.gpu.dspark_cudagraph_utils:CapacityCudaGraphManager",
        parameters=(
            "vllm_config",
            "device",
            "cudagraph_mode",
            "decode_query_len",
            "lora_capture_cases",
            "varlen_decode",
            "ubatch_runner",
        ),
        reason="the runner builds it by name; upstream captures uniform graphs or "
        "varlen ones, never both",
        remove_when="varlen_decode keeps the uniform graphs",
        test=f"{_RUNNER_TEST}test_uniform_and_varlen_graphs_are_both_captured",
    ),
    Seam(
        id="worker.manager-factory",
        target=f"{_RUNNER}:maybe_create_adaptive_verification_manager",
        kind="wrap",
        scope=Scope.WORKER,
        replacement=f"{_SPEC_DECODE}.capacity_factory:wrap_manager_factory",
        parameters={
            "0.32.0": (
                "enable_adaptive_verification",
                "attn_groups",
                "req_states",
                "query_start_loc",
                "num_bonus_tokens",
                "max_total_logits",
                "vllm_config",
                "target_layer_names",
                "additional_attn_cg_support",
            ),
            "0.33.0": (
                "enable_adaptive_verification",
                "attn_groups",
                "req_states",
                "query_start_loc",
                "num_bonus_tokens",
                "max_total_logits",
                "vllm_config",
                "target_layer_names",
                "additional_attn_cg_support",
                "copy_admitted_drafts_to_host",
            ),
        },
        reason="the manager's class cannot be configured",
        remove_when="the runner builds the manager through an overridable method",
        test=f"{_RUNNER_TEST}test_capacity_trims_above_the_knee_and_output_is_equal",
    ),
    Seam(
        id="worker.rejection-sampler",
        target=f"{_RUNNER}:RejectionSampler",
        kind="subclass",
        scope=Scope.WORKER,
        replacement=f"{_SPEC_DECODE}.capacity_rejection_sampler:CapacityRejectionSampler",
        parameters=("sampler", "spec_config", "device", "watermark_key"),
        reason="the runner builds it by name, and nothing lets a caller reject drafts "
        "without a grammar",
        remove_when="the runner passes invalid_drafts from an overridable method",
        test=f"{_RUNNER_TEST}test_mask_mode_rejects_beyond_capacity_and_output_is_equal",
    ),
)

_WORKER_SEAMS += (
    Seam(
        id="worker.speculator",
        target=f"{_SPEC_DECODE}.dspark.speculator:DSparkSpeculator",
        kind="subclass",
        scope=Scope.WORKER,
        replacement=f"{_SPEC_DECODE}.dspark.depth_speculator:DepthDSparkSpeculator",
        parameters=("vllm_config", "device"),
        reason="init_speculator builds it by name; upstream always drafts K positions",
        remove_when="DFlashSpeculator.propose drafts num_speculative_tokens positions",
        test="tests/v1/worker/gpu/test_dspark_depth.py::"
        "test_every_pinned_depth_gives_the_greedy_output",
    ),
)

_WORKER_SEAMS += (
    Seam(
        id="worker.dflash-speculator",
        target=f"{_SPEC_DECODE}.dflash.speculator:DFlashSpeculator",
        kind="subclass",
        scope=Scope.WORKER,
        replacement=f"{_SPEC_DECODE}.dspark.depth_speculator:DepthDFlashSpeculator",
        parameters=("vllm_config", "device"),
        reason="init_speculator builds it by name; upstream always drafts K positions",
        remove_when="DFlashSpeculator.propose drafts num_speculative_tokens positions",
        test="tests/v1/worker/gpu/test_dspark_dflash.py::"
        "test_every_pinned_depth_gives_the_greedy_output",
    ),
)

_FRONTEND_SEAMS: tuple[Seam, ...] = (
    Seam(
        id="frontend.stats-type",
        target="vllm.v1.metrics.stats:SchedulerStats.__annotations__[spec_decoding_stats]",
        kind="rebind",
        scope=Scope.FRONTEND,
        replacement=f"{_METRICS}:STATS_ANNOTATION",
        parameters=None,
        reason="the message decoder drops fields that the declared type lacks",
        remove_when="SchedulerStats carries free-form speculative decoding figures",
        test=f"{_METRICS_TEST}test_capacity_figures_survive_the_engine_message",
    ),
    Seam(
        id="frontend.prometheus",
        target="vllm.v1.metrics.loggers:PrometheusStatLogger._spec_decoding_cls",
        kind="subclass",
        scope=Scope.FRONTEND,
        replacement=f"{_METRICS}:CapacitySpecDecodingProm",
        parameters=(
            "speculative_config",
            "labelnames",
            "per_engine_labelvalues",
            "is_diffusion",
        ),
        reason="a class attribute is the extension point, but no config sets it",
        remove_when="a plugin can add counters to the Prometheus logger",
        test=f"{_METRICS_TEST}test_counters_separate_drafted_verified_and_accepted",
    ),
    Seam(
        id="frontend.log-line",
        target="vllm.v1.metrics.loggers:SpecDecodingLogging",
        kind="subclass",
        scope=Scope.FRONTEND,
        replacement=f"{_METRICS}:CapacitySpecDecodingLogging",
        parameters=("is_diffusion",),
        reason="the logger builds it by name",
        remove_when="a plugin can add a line to the statistics log",
        test=f"{_METRICS_TEST}test_log_line_reports_capacity",
    ),
)

SEAMS: tuple[Seam, ...] = (
    *_CONFIG_SEAMS,
    *_FRONTEND_SEAMS,
    *_WORKER_SEAMS,
    *REHEARSAL_SEAMS,
)


def install(scope: Scope) -> tuple[str, ...]:
    """Verify and install every row of one scope in this process.

    Args:
        scope: Process role whose rows to install.

    Returns:
        Ids installed by this call; empty when they were in place already.

    Raises:
        SeamError: The running vLLM does not fit a row; nothing was changed.
    """
    # Rows are keyed by release; a local suffix would match none, unchecked.
    version = public_version(vllm.__version__)
    return apply((s for s in SEAMS if s.scope is scope), version)
