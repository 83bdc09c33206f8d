# SPDX-License-Identifier: Apache-2.0
"""Admission is one launch, never compiles while serving, and fits CUDA graphs."""

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from tests.helpers.admission import DEVICE, on_device, run
from vllm.v1.worker.gpu.spec_decode.dspark import capacity
from vllm.v1.worker.gpu.spec_decode.dspark.capacity import (
    admit_drafts_reference,
    assign_capacities,
    warm_up,
)
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_reference import (
    CONFIDENCE_FAMILIES,
    make_admission_inputs,
)

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs an NVIDIA GPU")


class CountedKernel:
    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append(grid)


class CountedTorch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def test_admission_is_one_launch_and_no_torch_operation(monkeypatch):
    kernel = CountedKernel()
    monkeypatch.setattr(capacity, "_admit_drafts_kernel", kernel)
    tensors = on_device(make_admission_inputs(33, 7))
    outs = [torch.empty(64, dtype=torch.int32, device=DEVICE) for _ in range(3)]
    with CountedTorch() as operations:
        capacity.admit_drafts(
            *tensors,
            50,
            num_bonus_tokens=1,
            fill_budget=True,
            capacities_out=outs[0],
            cu_num_logits_out=outs[1],
            query_start_loc_out=outs[2],
        )
        assert operations.calls == []
        torch.empty(1)
        assert len(operations.calls) == 1, "the counter must see operations"
    assert kernel.launches == [(1,)]


def compiled_kernel():
    """Return the kernel as a JITFunction, also where Triton interprets."""
    kernel = capacity._admit_drafts_kernel
    if isinstance(kernel, JITFunction):
        return kernel
    options = ("do_not_specialize", "do_not_specialize_on_alignment")
    return JITFunction(kernel.fn, **{name: kernel.kwargs[name] for name in options})


def specialization_key(kernel, **changes):
    """Return what a compiled variant is looked up by, as Triton's launcher does."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    scalars = dict.fromkeys(capacity._RUNTIME_ARGS, 7)
    buffer = torch.empty(64, dtype=torch.int32)
    pointers = dict.fromkeys(capacity._TENSOR_ARGS, buffer)
    blocks = {"ROW_BLOCK": 64, "STEP_BLOCK": 8}
    return str(bind(**(pointers | scalars | blocks | changes))[1])


def test_no_scalar_value_or_alignment_makes_a_new_specialization():
    kernel = compiled_kernel()
    base = specialization_key(kernel)
    for name in capacity._RUNTIME_ARGS:
        for value in (0, 1, 2, 15, 16, 17, 4096, 2**30):
            assert specialization_key(kernel, **{name: value}) == base, (name, value)
    buffer = torch.empty(64, dtype=torch.int32)
    assert buffer.data_ptr() % 16 == 0
    for name in capacity._TENSOR_ARGS:
        assert specialization_key(kernel, **{name: buffer[1:]}) == base, name
    # The premise: the key does tell variants apart.
    assert specialization_key(kernel, idx_mapping_ptr=buffer.long()) != base
    assert specialization_key(kernel, ROW_BLOCK=256) != base


def test_every_runtime_argument_is_exempt_from_specialization():
    for param in compiled_kernel().params:
        if param.name in capacity._TENSOR_ARGS:
            assert param.do_not_specialize_on_alignment
        elif not param.is_constexpr:
            assert param.do_not_specialize, param.name


def blocks_launched(monkeypatch, action):
    seen = set()

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, ROW_BLOCK, STEP_BLOCK, num_warps: seen.add(
                (args[1].dtype, ROW_BLOCK, STEP_BLOCK, num_warps)
            )

    with monkeypatch.context() as patch:
        patch.setattr(capacity, "_admit_drafts_kernel", Recorder())
        action()
    return seen


@pytest.mark.parametrize("num_steps", [1, 7, 8, 9, 16])
@pytest.mark.parametrize("max_num_reqs", [1, 64, 65, 256, 300, 1024, 1025, 4096])
def test_warm_up_compiles_every_variant_that_serving_reaches(
    monkeypatch, max_num_reqs, num_steps
):
    def serve():
        for num_reqs in {1, 64, 65, 256, 257, 1024, 1025, max_num_reqs}:
            if num_reqs <= max_num_reqs:
                inputs = make_admission_inputs(num_reqs, num_steps)
                probs, slots, scheduled, _ = on_device(inputs)
                assign_capacities(probs, slots.long(), scheduled, 3)

    warmed = blocks_launched(
        monkeypatch, lambda: warm_up(max_num_reqs, num_steps, DEVICE)
    )
    assert blocks_launched(monkeypatch, serve) == warmed


@gpu
@needs_cuda
def test_serving_after_warm_up_compiles_nothing(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_cache_hook",
        lambda *args, **kwargs: compiled.append(kwargs.get("repr")),
    )
    capacity._admit_drafts_kernel.device_caches.clear()
    warm_up(1024, 7, DEVICE, idx_dtype=torch.int32)
    assert len(compiled) == 3  # row blocks 64, 256, 1024
    for num_reqs, num_steps in ((1, 1), (1, 7), (16, 7), (17, 5), (256, 7), (1000, 8)):
        inputs = make_admission_inputs(num_reqs, num_steps)
        for budget in (0, 1, 16, 17, inputs.num_drafts):
            for fill_budget in (False, True):
                run(capacity.admit_drafts, inputs, budget, fill_budget=fill_budget)
    assert len(compiled) == 3


@gpu
@needs_cuda
@pytest.mark.parametrize("family", sorted(CONFIDENCE_FAMILIES))
def test_graph_replay_reads_current_confidences(admit_drafts, family):
    first = make_admission_inputs(256, 7, family="random", seed=1)
    second = make_admission_inputs(256, 7, family=family, seed=2)
    tensors = on_device(first)
    outs = [torch.zeros(300, dtype=torch.int32, device=DEVICE) for _ in range(3)]
    names = ("capacities_out", "cu_num_logits_out", "query_start_loc_out")
    options = dict(zip(names, outs, strict=True))
    options |= {"num_bonus_tokens": 1, "fill_budget": True}
    warm_up(256, 7, DEVICE, idx_dtype=torch.int32, admit=admit_drafts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        admit_drafts(*tensors, 500, **options)
    for static, new in zip(tensors, on_device(second), strict=True):
        static.copy_(new)
    graph.replay()
    expected = [torch.zeros_like(out) for out in outs]
    admit_drafts_reference(
        *on_device(second), 500, **options | dict(zip(names, expected, strict=True))
    )
    for out, reference in zip(outs, expected, strict=True):
        assert torch.equal(out, reference)


@gpu
@needs_cuda
def test_repeated_runs_are_bitwise_equal(admit_drafts):
    inputs = make_admission_inputs(1024, 16, family="tied")
    first = run(admit_drafts, inputs, 5000, fill_budget=True)
    assert all(
        run(admit_drafts, inputs, 5000, fill_budget=True) == first for _ in range(50)
    )
