# SPDX-License-Identifier: Apache-2.0
"""CPU rehearsal: vLLM's V2 GPU model runner on a machine without a GPU.

With ``VLLM_DSPARK_CPU_REHEARSAL=1`` the real scheduler, the real
``vllm.v1.worker.gpu`` runner and its Triton kernels run on the CPU build of vLLM:
Triton executes kernels in its interpreter, CUDA graphs are imitated (a graph keeps
the closure that it captured, and a replay reruns it on the same static buffers),
and CUDA events read the wall clock. It works in ``LLM(...)``, with
multiprocessing, in every process of ``vllm serve`` and with tensor parallelism.

What it shows: dispatch, padding, graph selection, buffer layout, scheduling,
losslessness. What it cannot show: speed, stream races and run-ahead (streams are
no-ops and asynchronous scheduling is off), and host values frozen into a graph (a
replay reads Python attributes again, a CUDA graph does not).

The variable is enough where the distribution's ``triton.backends`` entry point
(``vllm_dspark_triton_cpu``) is installed; it and :func:`prepare_environment` set
the rest (see ``REQUIRED_ENVIRONMENT`` and ``DEFAULT_ENVIRONMENT``).

Engine settings that suit it: ``dtype="float32"``, ``block_size=32`` (a multiple of
32), ``max_model_len<=512``, ``max_num_seqs<=8``, ``max_num_batched_tokens<=512``,
``num_gpu_blocks_override=64`` or more, and
``compilation_config={"cudagraph_capture_sizes": [...]}`` with few sizes: each
captured shape costs 0.1 to 0.5 s at start. ``head_dim`` must be at least 32.
``enforce_eager=True`` runs without graphs.

Invariants (pinned by tests/platforms/test_dspark_cpu_rehearsal.py):
  * Nothing is changed unless the variable is set.
  * Greedy output equals the run without speculation.
  * A setting that contradicts the rehearsal is an error, never overridden.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.plugins.dspark_capacity.seam import Scope

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

REHEARSAL_VARIABLE = "VLLM_DSPARK_CPU_REHEARSAL"
REHEARSAL_WORKER = "vllm.platforms.dspark_rehearsal.worker.RehearsalWorker"
# Workers whose place the rehearsal worker takes: it builds their runner itself.
REPLACED_WORKERS = (
    "vllm.v1.worker.cpu_worker.CPUWorker",
    "vllm.v1.worker.gpu.dspark_capacity_worker.DSparkCapacityWorker",
)
# Children inherit these; TorchDynamo would compile under a fake Triton backend.
REQUIRED_ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
# GiB. CPUWorker skips its memory-sizing run when the KV cache size is explicit.
DEFAULT_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}
_OMP_BIND = "VLLM_CPU_OMP_THREADS_BIND"


class RehearsalError(RuntimeError):
    """The CPU rehearsal cannot run as configured."""


def install() -> None:
    """Turn this process into a rehearsal process. Idempotent.

    Call before any ``vllm.v1.worker.gpu`` module is imported; the general plugin
    does so in every process when ``VLLM_DSPARK_CPU_REHEARSAL=1``.

    Raises:
        RehearsalError: Not vLLM's CPU platform, an environment variable that
            contradicts the rehearsal, or Triton loaded without its interpreter.
        SeamError: The running vLLM does not fit a rehearsal row.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise RehearsalError(
            f"{REHEARSAL_VARIABLE}=1, but vLLM runs on the platform "
            f"'{current_platform.device_type or 'unknown'}'; allowed: the CPU build. "
            f"Unset {REHEARSAL_VARIABLE} to use the accelerator, or run pip install "
            "'.[cpu]' (from a checkout) in an environment of its own."
        )
    prepare_environment()
    _require_interpreter()

    from vllm.plugins.dspark_capacity import seams

    seams.install(Scope.REHEARSAL)


def prepare_environment() -> None:
    """Set what this process and its children need, in place.

    Raises:
        RehearsalError: A required variable is set to a contradicting value.
    """
    for name, value in REQUIRED_ENVIRONMENT.items():
        found = os.environ.setdefault(name, value)
        if found != value:
            raise RehearsalError(
                f"{name}={found} contradicts {REHEARSAL_VARIABLE}=1; allowed: "
                f"{value}. Run `unset {name}` and start again."
            )
    for name, value in DEFAULT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:  # it read TORCHDYNAMO_DISABLE when it was imported
        dynamo.config.disable = True


def _require_interpreter() -> None:
    if importlib.util.find_spec("triton") is None:
        raise RehearsalError(
            f"{REHEARSAL_VARIABLE}=1 needs Triton, which is not installed. Run "
            "pip install '.[cpu]' (from a checkout)."
        )
    from triton.language import standard
    from triton.runtime.interpreter import InterpretedFunction

    from vllm.triton_utils import HAS_TRITON

    if not isinstance(standard.sum, InterpretedFunction):
        raise RehearsalError(
            "Triton was imported before TRITON_INTERPRET=1 was set, so its "
            "interpreter is off in this process. Run "
            f"`export {REHEARSAL_VARIABLE}=1 TRITON_INTERPRET=1` and start again."
        )
    if not HAS_TRITON:
        raise RehearsalError(
            "vLLM disabled Triton: no active backend named 'cpu'. Install the entry "
            "point vllm_dspark_triton_cpu (group triton.backends): python "
            "tools/link_overlay.py, or pip install '.[cpu]' (from a checkout)."
        )


def wrap_check_and_update_config(original: Callable[..., None]) -> Callable[..., None]:
    """Keep what ``CpuPlatform`` clears and put in the rehearsal worker.

    Args:
        original: ``CpuPlatform.check_and_update_config`` without its binding.

    Returns:
        The replacement, ``(cls, vllm_config) -> None``, updating in place.
    """

    @functools.wraps(original)
    def check_and_update_config(cls: type, vllm_config: "VllmConfig") -> None:
        capture_sizes = vllm_config.compilation_config.cudagraph_capture_sizes
        original(cls, vllm_config)
        vllm_config.compilation_config.cudagraph_capture_sizes = capture_sizes
        _adapt_config(vllm_config)

    return check_and_update_config


def _adapt_config(vllm_config: "VllmConfig") -> None:
    from vllm.config import CompilationMode

    # Nothing may be compiled; the mode also spares the warm-up run of CPUWorker.
    vllm_config.compilation_config.mode = CompilationMode.NONE
    vllm_config.kernel_config.enable_jit_warmup = False
    parallel_config = vllm_config.parallel_config
    if parallel_config.worker_cls in REPLACED_WORKERS:
        parallel_config.worker_cls = REHEARSAL_WORKER
    if parallel_config.worker_cls != REHEARSAL_WORKER:
        raise RehearsalError(
            f"worker_cls={parallel_config.worker_cls} cannot run in the CPU "
            f"rehearsal; allowed: auto or {REHEARSAL_WORKER}. Leave out "
            f"--worker-cls, or unset {REHEARSAL_VARIABLE}."
        )
    if not vllm_config.use_v2_model_runner:
        raise RehearsalError(
            "the CPU rehearsal needs the V2 model runner, which vLLM declined for "
            f"this model. Use another model or unset {REHEARSAL_VARIABLE}."
        )
    os.environ.setdefault(
        _OMP_BIND, default_omp_bind(parallel_config.world_size, _cores())
    )


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def default_omp_bind(num_ranks: int, cores: list[int]) -> str:
    """Return a thread binding that does not let ranks fight over cores.

    Args:
        num_ranks: Worker processes on this machine.
        cores: Cores that this process may use, ascending.

    Returns:
        ``nobind`` for one rank or too few cores, else one core list a rank, as
        in ``0|1``. Unbound ranks fight over cores: with two ranks on two cores
        the project's prototype took 0.47 s a step unbound and 0.15 s bound.
    """
    if num_ranks == 1 or len(cores) < num_ranks:
        return "nobind"
    share = len(cores) // num_ranks
    groups = (cores[r * share : (r + 1) * share] for r in range(num_ranks))
    return "|".join(",".join(map(str, group)) for group in groups)


def wrap_support_static_graph_mode(original: Callable[..., bool]) -> Callable[..., Any]:
    """Report that the platform captures graphs, so that vLLM plans for them."""

    @functools.wraps(original)
    def support_static_graph_mode(cls: type) -> bool:
        return True

    return support_static_graph_mode
