# SPDX-License-Identifier: Apache-2.0
"""Capture costs, apart for fixed K and for what capacity adds."""

from types import SimpleNamespace

import pytest

from tests.helpers.capacity_cases import DEVICE  # noqa: F401  (torch.cuda names)
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import dspark_capture_meter as module
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.dspark_capture_meter import (
    FIXED,
    CaptureMeter,
    MeteredCapture,
    describe_capture,
)

K, WIDTH = 7, 8


def desc(*, uniform=None, query=None, mode=CUDAGraphMode.FULL):
    return SimpleNamespace(
        cg_mode=mode, uniform_token_count=uniform, max_query_len=query
    )


CAPTURED = {
    FIXED: [desc(mode=CUDAGraphMode.PIECEWISE), desc(), desc(uniform=WIDTH)],
    "depth 2": [desc(uniform=3)],
    "depth 0": [desc(uniform=1)],
    "varlen": [desc(query=WIDTH), desc(query=WIDTH)],
}


class Manager(MeteredCapture):
    def __init__(self):
        self.decode_query_len = WIDTH
        self.vllm_config = SimpleNamespace(num_speculative_tokens=K)


@pytest.fixture
def machine(monkeypatch):
    """A clock and a memory that every capture of a graph uses up."""
    state = SimpleNamespace(seconds=0.0, free=100 << 30, made=[], num_queries=0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: state.seconds)

    def get_memory_info():
        state.num_queries += 1
        return state.free, 0

    monkeypatch.setattr(module.torch.accelerator, "get_memory_info", get_memory_info)

    def capture(self, create_forward_fn):
        for found in (d for descs in CAPTURED.values() for d in descs):
            for warmup in (True, False):
                create_forward_fn(found, warmup=warmup)(found.cg_mode)

    monkeypatch.setattr(CudaGraphManager, "capture", capture)

    def create(found, warmup):
        def forward(mode):
            state.made.append((found, warmup, mode))
            state.seconds += 0.5
            state.free -= 1 << 29

        return forward

    state.create = create
    return state


def test_every_graph_counts_once_in_its_share(machine):
    manager = Manager()
    manager.capture(machine.create)
    shares = manager.capture_meter.shares
    assert {n: s.num_graphs for n, s in shares.items()} == {
        name: len(descs) for name, descs in CAPTURED.items()
    }
    assert len(machine.made) == 14, "the base's calls went through, warm-up and all"
    assert sum(s.seconds for s in shares.values()) == machine.seconds
    assert sum(s.num_bytes for s in shares.values()) == 7 << 30
    assert shares["varlen"].num_bytes == 2 << 30, "two graphs of seven"
    assert machine.num_queries == 2


def test_another_capture_starts_afresh(machine):
    manager = Manager()
    manager.capture(machine.create)
    manager.capture(machine.create)
    assert sum(s.num_graphs for s in manager.capture_meter.shares.values()) == 7


def test_line_sets_what_capacity_adds_beside_fixed_k(machine):
    target, drafter = Manager(), Manager()
    target.capture(machine.create)
    drafter.capture(machine.create)
    line = describe_capture((target, drafter, None), 3.44)
    assert line.startswith("fixed K needs 6 graphs, 6.0 s, 6.00 GiB; capacity adds 8 ")
    assert "8 graphs, 8.0 s, 8.00 GiB (depth 0: 2 graphs, 2.0 s, 2.00 GiB; " in line
    assert line.endswith("and 3.4 s of timing of step costs")
    assert "no timing of step costs" in describe_capture((target,), 0.0)


def test_stopping_twice_counts_once(machine):
    meter = CaptureMeter()
    meter.stop()
    meter.start("x")
    meter.stop()
    meter.stop()
    assert meter.shares["x"].num_graphs == 1


def test_memory_that_others_gave_back_meanwhile_is_called_unknown(machine):
    def create_and_free(found, warmup):
        machine.free += 1 << 31
        return machine.create(found, warmup)

    manager = Manager()
    manager.capture(create_and_free)
    line = describe_capture([manager], 0.0)
    assert "memory unknown" in line and "GiB" not in line
