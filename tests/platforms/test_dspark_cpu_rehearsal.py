# SPDX-License-Identifier: Apache-2.0
"""Rules of the CPU rehearsal that need no engine."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vllm.platforms
from tests.helpers.config_models import clean_plugin_state
from vllm.config import CompilationMode
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import dspark_cpu_rehearsal as rehearsal
from vllm.plugins.dspark_capacity import seam, seams

if not vllm.platforms.current_platform.is_cpu():
    pytest.skip("the rehearsal is for vLLM's CPU build", allow_module_level=True)

from vllm.platforms.dspark_rehearsal import graphs, kernels
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor


@pytest.fixture
def clean_environment(monkeypatch):
    names = [*rehearsal.REQUIRED_ENVIRONMENT, *rehearsal.DEFAULT_ENVIRONMENT]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_required_variables_are_set_for_children(clean_environment):
    rehearsal.prepare_environment()
    for name, value in rehearsal.REQUIRED_ENVIRONMENT.items():
        assert os.environ[name] == value


@pytest.mark.parametrize("name", rehearsal.REQUIRED_ENVIRONMENT)
def test_a_contradicting_variable_is_an_error_that_names_it(clean_environment, name):
    clean_environment.setenv(name, "0")
    with pytest.raises(rehearsal.RehearsalError, match=f"{name}=0.*unset {name}"):
        rehearsal.prepare_environment()


def test_the_users_own_default_is_kept(clean_environment):
    clean_environment.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    rehearsal.prepare_environment()
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "3"


def test_a_gpu_platform_is_an_error(monkeypatch):
    gpu = SimpleNamespace(is_cpu=lambda: False, device_type="cuda")
    monkeypatch.setattr(vllm.platforms, "current_platform", gpu)
    with pytest.raises(rehearsal.RehearsalError, match="platform 'cuda'"):
        rehearsal.install()


@pytest.mark.engine
def test_missing_interpreter_is_an_error_with_the_fix():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = "from vllm.platforms.dspark_cpu_rehearsal import install; install()"
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert "export VLLM_DSPARK_CPU_REHEARSAL=1 TRITON_INTERPRET=1" in run.stderr


@pytest.mark.parametrize(
    ("ranks", "cores", "binding"),
    [
        (1, [0, 1], "nobind"),
        (2, [0, 1], "0|1"),
        (2, [3, 4, 5, 6, 7], "3,4|5,6"),
        (4, [0, 1], "nobind"),
    ],
)
def test_ranks_get_cores_of_their_own(ranks, cores, binding):
    assert rehearsal.default_omp_bind(ranks, cores) == binding


@dataclass
class Config:
    """The part of VllmConfig that the rehearsal touches."""

    worker_cls: str
    use_v2_model_runner: bool = True
    compilation_config: Any = field(
        default_factory=lambda: SimpleNamespace(
            mode=CompilationMode.VLLM_COMPILE, cudagraph_capture_sizes=[8, 16]
        )
    )
    kernel_config: Any = field(
        default_factory=lambda: SimpleNamespace(enable_jit_warmup=True)
    )

    def __post_init__(self):
        self.parallel_config = SimpleNamespace(worker_cls=self.worker_cls, world_size=1)


def clear_sizes(cls, vllm_config):
    """As CpuPlatform does."""
    vllm_config.compilation_config.cudagraph_capture_sizes = []


@pytest.mark.parametrize("worker", rehearsal.REPLACED_WORKERS)
def test_config_keeps_capture_sizes_and_takes_the_rehearsal_worker(worker):
    config = Config(worker)
    rehearsal.wrap_check_and_update_config(clear_sizes)(object, config)
    assert config.compilation_config.cudagraph_capture_sizes == [8, 16]
    assert config.compilation_config.mode == CompilationMode.NONE
    assert config.parallel_config.worker_cls == rehearsal.REHEARSAL_WORKER
    assert config.kernel_config.enable_jit_warmup is False


def test_a_foreign_worker_is_an_error_not_replaced():
    with pytest.raises(rehearsal.RehearsalError, match="worker_cls=my.Worker"):
        rehearsal.wrap_check_and_update_config(clear_sizes)(object, Config("my.Worker"))


def test_a_declined_v2_runner_is_an_error():
    config = Config(rehearsal.REHEARSAL_WORKER, use_v2_model_runner=False)
    with pytest.raises(rehearsal.RehearsalError, match="V2 model runner"):
        rehearsal.wrap_check_and_update_config(clear_sizes)(object, config)


class Manager:
    """Captures two shapes the way CudaGraphManager.capture does."""

    def __init__(self):
        self.graphs = {}

    def capture(self, create_forward_fn, progress_bar_desc=""):
        for num_reqs in (1, 2):
            desc = BatchExecutionDescriptor(CUDAGraphMode.FULL, 8 * num_reqs, num_reqs)
            create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
            forward = create_forward_fn(desc, warmup=False)
            graph = graphs.RehearsalGraph()
            with graphs.RecordGraph(graph, (0, 0), stream=None):
                forward(CUDAGraphMode.NONE)
            self.graphs[num_reqs] = graph


def test_a_replay_runs_the_closure_captured_under_its_descriptor():
    manager, ran = Manager(), []

    def create(desc, warmup):
        return lambda mode: ran.append(
            (desc.num_reqs, warmup, graphs.replay_serial(), mode)
        )

    graphs.wrap_capture(Manager.capture)(manager, create)
    assert [entry[2] for entry in ran] == [0] * 4, "no replay while capturing"
    ran.clear()
    manager.graphs[2].replay()
    manager.graphs[1].replay()
    assert [entry[:2] for entry in ran] == [(2, False), (1, False)]
    assert 0 < ran[0][2] < ran[1][2], "every replay has a serial of its own"
    assert {entry[3] for entry in ran} == {CUDAGraphMode.NONE}
    assert graphs.replay_serial() == 0
    assert [key.num_tokens for key in graphs.replay_log][-2:] == [16, 8]


def test_a_capture_outside_the_manager_is_an_error():
    with (
        pytest.raises(RuntimeError, match=r"outside CudaGraphManager\.capture"),
        graphs.RecordGraph(graphs.RehearsalGraph()),
    ):
        pass


def test_a_graph_without_capture_cannot_be_replayed():
    with pytest.raises(RuntimeError, match="never captured"):
        graphs.RehearsalGraph().replay()


@pytest.fixture
def worker_rows():
    """The rows that a rehearsal worker installs, and no others."""
    with clean_plugin_state():
        seams.install(seam.Scope.REHEARSAL_WORKER)
        yield


@pytest.mark.parametrize(("module", "name"), [(torch, "Event"), (torch.cuda, "Event")])
def test_events_of_a_worker_have_a_time(worker_rows, module, name):
    first, last = (getattr(module, name)(enable_timing=True) for _ in range(2))
    first.record()
    last.record()
    assert first.elapsed_time(last) > 0.0


def test_events_measure_wall_clock_milliseconds():
    first, last = graphs.RehearsalEvent(enable_timing=True), graphs.RehearsalEvent()
    before = time.perf_counter()
    first.record()
    time.sleep(0.002)
    last.record()
    outer_ms = (time.perf_counter() - before) * 1e3
    # Exact bounds, not a timing claim: sleep never returns early.
    assert 2.0 <= first.elapsed_time(last) <= outer_ms
    assert last.query()


class DraftLayers:
    """The attributes that ``_normalize_context_k`` reads."""

    def __init__(self, weights):
        self._k_norm_weights, self._rms_norm_eps = weights, 1e-6


def torch_rms_norm(keys, weight):
    return keys * torch.rsqrt(keys.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def test_each_draft_layer_gets_its_own_k_norm():
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(3, 64, generator=generator) + 0.5
    keys = torch.randn(3, 5, 2, 64, generator=generator)
    layers = DraftLayers(weights)
    wrap = kernels.wrap_normalize_context_k
    upstream = DFlashQwen3Model._normalize_context_k
    upstream = getattr(upstream, "__wrapped__", upstream)
    want = torch_rms_norm(keys, weights[:, None, None, :])
    torch.testing.assert_close(wrap(upstream)(layers, keys), want)
    # The day this fails vLLM has mended its kernel: remove the seam.
    torch.testing.assert_close(
        upstream(layers, keys)[1], torch_rms_norm(keys[1], weights[0])
    )


def test_draft_layers_of_a_worker_get_their_own_k_norm(worker_rows):
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    weights = torch.tensor([1.0, 3.0])[:, None].expand(2, 64).contiguous()
    keys = torch.ones(2, 1, 1, 64)
    normed = DFlashQwen3Model._normalize_context_k(DraftLayers(weights), keys)
    torch.testing.assert_close(normed, weights[:, None, None, :])


def test_a_shared_k_norm_is_left_to_vllm():
    def original(layers, keys):
        return "vLLM's"

    layers = DraftLayers(torch.ones(64))
    wrapped = kernels.wrap_normalize_context_k(original)
    assert wrapped(layers, torch.ones(2, 1, 1, 64)) == "vLLM's"


libdevice = kernels.InterpreterLibdevice


@triton.jit
def _log1p_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, libdevice.log1p(tl.load(x_ptr + offsets)))


def test_log1p_in_the_interpreter_is_log_of_one_plus_x():
    x = torch.tensor([0.0, -0.5, 1e-8, -1.0, 3.0, float("inf"), -2.0, 7.0])
    out = torch.empty_like(x)
    _log1p_kernel[(1,)](x, out, BLOCK=8)
    torch.testing.assert_close(out, torch.log1p(x), equal_nan=True)


class Metadata:
    scheduler_metadata = "at capture"


def test_attention_is_planned_anew_once_per_replay_and_never_outside():
    plans = []

    def build(builder, common_prefix_len, common, fast_build=False):
        plans.append(common)
        metadata = Metadata()
        metadata.scheduler_metadata = f"plan {len(plans)}"
        return metadata

    def forward(impl, layer, q, k, v, cache, metadata, output):
        return metadata.scheduler_metadata

    metadata = kernels.wrap_build(build)(None, 0, "buffers")
    output = torch.full((2, 2), float("nan"))
    seen = []

    def layer_forward():
        run = kernels.wrap_forward(forward)
        seen.append(run(None, None, None, None, None, None, metadata, output))

    layer_forward()
    assert seen == ["plan 1"] and output.isnan().all()
    graph = graphs.RehearsalGraph()
    graphs._state.pending = (
        graphs.GraphKey("Test", 8, 1, 8, None),
        lambda mode: (layer_forward(), layer_forward()),
    )
    graph.record_pending()
    graph.replay()
    graph.replay()
    assert seen == ["plan 1", "plan 2", "plan 2", "plan 3", "plan 3"]
    assert plans == ["buffers"] * 3
    assert (output == 0).all(), "rows that no request owns stay finite"
