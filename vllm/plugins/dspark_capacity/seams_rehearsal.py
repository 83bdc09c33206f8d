# SPDX-License-Identifier: Apache-2.0
"""The part of the seam table that makes the GPU runner run on a CPU.

Read by :mod:`vllm.plugins.dspark_capacity.seams`, which is the whole table. These rows
are applied under ``VLLM_DSPARK_CPU_REHEARSAL=1`` only.
"""

from vllm.plugins.dspark_capacity.seam import Scope, Seam

_CPU_PLATFORM = "vllm.platforms.cpu:CpuPlatform"
_CPU_ATTN = "vllm.v1.attention.backends.cpu_attn"
_CUDAGRAPH_UTILS = "vllm.v1.worker.gpu.cudagraph_utils"
_REHEARSAL_CONFIG = "vllm.platforms.dspark_cpu_rehearsal"
_GRAPHS = "vllm.platforms.dspark_rehearsal.graphs"
_KERNELS = "vllm.platforms.dspark_rehearsal.kernels"
_REHEARSAL_TEST = "tests/platforms/test_dspark_cpu_rehearsal.py::"
_ENGINE_TEST = "tests/platforms/test_dspark_cpu_rehearsal_engine.py::"
_NO_GRAPHS_ON_CPU = "vLLM has no graph capture on a CPU"
_CPU_GRAPHS = "vLLM captures graphs on its CPU platform"
_RUNNER_TEST = "tests/v1/worker/gpu/test_dspark_capacity_model_runner.py::"

REHEARSAL_SEAMS: tuple[Seam, ...] = (
    Seam(
        id="rehearsal.config",
        target=f"{_CPU_PLATFORM}.check_and_update_config",
        kind="wrap",
        scope=Scope.REHEARSAL,
        replacement=f"{_REHEARSAL_CONFIG}:wrap_check_and_update_config",
        parameters=("vllm_config",),
        reason="the CPU platform clears the capture sizes and names its own worker",
        remove_when=_CPU_GRAPHS,
        test=f"{_ENGINE_TEST}test_greedy_output_equals_no_speculation",
    ),
    Seam(
        id="rehearsal.static-graphs",
        target=f"{_CPU_PLATFORM}.support_static_graph_mode",
        kind="wrap",
        scope=Scope.REHEARSAL,
        replacement=f"{_REHEARSAL_CONFIG}:wrap_support_static_graph_mode",
        parameters=(),
        reason="a platform without graphs gets cudagraph_mode NONE",
        remove_when=_CPU_GRAPHS,
        test=f"{_ENGINE_TEST}test_greedy_output_equals_no_speculation",
    ),
    Seam(
        id="rehearsal.model-runner",
        target="vllm.v1.worker.cpu.model_runner:CPUModelRunner",
        kind="rebind",
        scope=Scope.REHEARSAL_WORKER,
        replacement="vllm.platforms.dspark_rehearsal.worker:build_model_runner",
        parameters=("vllm_config", "device"),
        reason="CPUWorker.init_device imports the runner class inside the function",
        remove_when="CPUWorker.init_device calls _make_model_runner",
        test=f"{_RUNNER_TEST}test_capacity_trims_above_the_knee_and_output_is_equal",
    ),
    Seam(
        id="rehearsal.graph-pool",
        target=f"{_CPU_PLATFORM}.get_global_graph_pool",
        kind="wrap",
        scope=Scope.REHEARSAL_WORKER,
        replacement=f"{_GRAPHS}:wrap_get_global_graph_pool",
        parameters=("self",),
        reason=_NO_GRAPHS_ON_CPU,
        remove_when=_CPU_GRAPHS,
        test=f"{_ENGINE_TEST}test_greedy_output_equals_no_speculation",
    ),
    Seam(
        id="rehearsal.cuda-graph",
        target="torch.cuda:CUDAGraph",
        kind="rebind",
        scope=Scope.REHEARSAL_WORKER,
        replacement=f"{_GRAPHS}:RehearsalGraph",
        parameters=None,
        reason=_NO_GRAPHS_ON_CPU,
        remove_when=_CPU_GRAPHS,
        test=f"{_ENGINE_TEST}test_greedy_output_equals_no_speculation",
    ),
    Seam(
        id="rehearsal.cuda-graph-context",
        target="torch.cuda:graph",
        kind="rebind",
        scope=Scope.REHEARSAL_WORKER,
        replacement=f"{_GRAPHS}:RecordGraph",
        parameters=None,
        reason=_NO_GRAPHS_ON_CPU,
        remove_when=_CPU_GRAPHS,
        test=f"{_ENGINE_TEST}test_greedy_output_equals_no_speculation",
    ),
    Seam(
        id="rehearsal.cuda-event",
        target="torch.cuda:Event",
        kind="rebind",
        scope=Scope.REHEARSAL_WORKER,
        replacement=f"{_GRAPHS}:RehearsalEvent",
        parameters=None,
        reason="vLLM's CPU placeholder for events has no elapsed_time",
        remove_when="vLLM's CPU event placeholder measures time",
        test=f"{_REHEARSAL_TEST}test_events_of_a_worker_have_a_time",
    ),
    Seam(
        id="rehearsal.event",
        target="torch:Event",
        kind="rebind",
        scope=Scope.REHEARSAL_WORKER,
        replacement=f"{_GRAPHS}:RehearsalEvent",
        parameters=None,
        reason="vLLM's CPU placeholder for events has no elapsed_time",
        remove_when="vLLM's CPU event placeholder measures time",
        test=f"{_REHEARSAL_TEST}test_events_of_a_worker_have_a_time",
    ),
    Seam(
        id="rehearsal.graph-capture",
        target=f"{_CUDAGRAPH_UTILS}:graph_capture",
        kind="rebind",
        scope=Scope.REHEARSAL_WORKER,
        replacement=f"{_GRAPHS}:graph_capture",
        parameters=("device",),
        reason="it asserts a CUDA communicator in the tensor-parallel group",
        remove_when=_CPU_GRAPHS,
        test=f"{_ENGINE_TEST}test_two_ranks_in_processes_give_the_output_of_one",
    ),
    Seam(
        id="rehearsal.capture",
        target=f"{_CUDAGRAPH_UTILS}:CudaGraphManager.capture",
        kind="wrap",
        scope=Scope.REHEARSAL_WORKER,
        replacement=f"{_GRAPHS}:wrap_capture",
        parameters=("self", "create_forward_fn", "progress_bar_desc"),
        reason="an imitated graph needs the closure that is being captured",
        remove_when=_CPU_GRAPHS,
        test=f"{_ENGINE_TEST}test_greedy_output_equals_no_speculation",
    ),
    Seam(
        id="rehearsal.attention-graph-support",
        target=f"{_CPU_ATTN}:CPUAttentionMetadataBuilder._cudagraph_support",
        kind="rebind",
        scope=Scope.REHEARSAL_WORKER,
        replacement=f"{_KERNELS}:GRAPH_SUPPORT",
        parameters=None,
        reason="CPU attention declares that it cannot be captured",
        remove_when=_CPU_GRAPHS,
        test=f"{_ENGINE_TEST}test_greedy_output_equals_no_speculation",
    ),
    Seam(
        id="rehearsal.attention-build",
        target=f"{_CPU_ATTN}:CPUAttentionMetadataBuilder.build",
        kind="wrap",
        scope=Scope.REHEARSAL_WORKER,
        replacement=f"{_KERNELS}:wrap_build",
        parameters=("self", "common_prefix_len", "common_attn_metadata", "fast_build"),
        reason="CPU attention plans from tensor values, which a replay changes",
        remove_when=_CPU_GRAPHS,
        test=f"{_ENGINE_TEST}test_greedy_output_equals_no_speculation",
    ),
    Seam(
        id="rehearsal.attention-forward",
        target=f"{_CPU_ATTN}:CPUAttentionBackendImpl.forward",
        kind="wrap",
        scope=Scope.REHEARSAL_WORKER,
        replacement=f"{_KERNELS}:wrap_forward",
        parameters=(
            "self",
            "layer",
            "query",
            "key",
            "value",
            "kv_cache",
            "attn_metadata",
            "output",
            "output_scale",
            "output_block_scale",
        ),
        reason="CPU attention plans from tensor values, which a replay changes",
        remove_when=_CPU_GRAPHS,
        test=f"{_ENGINE_TEST}test_greedy_output_equals_no_speculation",
    ),
    Seam(
        id="rehearsal.libdevice",
        target="vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils:tldevice",
        kind="rebind",
        scope=Scope.REHEARSAL_WORKER,
        replacement=f"{_KERNELS}:InterpreterLibdevice",
        parameters=None,
        reason="Triton's interpreter has no libdevice",
        remove_when="Triton's interpreter implements libdevice.log1p",
        test=f"{_ENGINE_TEST}test_sampled_speculation_runs",
    ),
    Seam(
        id="rehearsal.top-k-top-p",
        target="vllm.v1.sample.ops.topk_topp_sampler:HAS_TRITON",
        kind="rebind",
        scope=Scope.REHEARSAL_WORKER,
        replacement=f"{_KERNELS}:TOP_K_TOP_P_HAS_TRITON",
        parameters=None,
        reason="the top-k/top-p kernel does not run in Triton's interpreter",
        remove_when="vLLM takes its torch code on a CPU by itself",
        test=f"{_ENGINE_TEST}test_sampled_speculation_runs",
    ),
    Seam(
        id="rehearsal.draft-k-norm",
        target=(
            "vllm.model_executor.models.qwen3_dflash:"
            "DFlashQwen3Model._normalize_context_k"
        ),
        kind="wrap",
        scope=Scope.REHEARSAL_WORKER,
        replacement=f"{_KERNELS}:wrap_normalize_context_k",
        parameters=("self", "all_k"),
        reason="the CPU rms_norm reads only the first row of a per-layer weight",
        remove_when="vLLM's CPU rms_norm takes a weight with several rows",
        test=f"{_REHEARSAL_TEST}test_draft_layers_of_a_worker_get_their_own_k_norm",
    ),
)
