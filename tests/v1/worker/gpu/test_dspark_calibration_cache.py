# SPDX-License-Identifier: Apache-2.0
"""Calibration outlives the engine through the cost cache."""

from types import SimpleNamespace

import pytest
import torch

from vllm.config.dspark_calibration import CALIBRATION_KEY, ConfidenceCalibration
from vllm.platforms.dspark_rehearsal.graphs import RehearsalEvent
from vllm.v1.worker.gpu import dspark_capacity_model_runner
from vllm.v1.worker.gpu.dspark_capacity_model_runner import DSparkCapacityModelRunner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_costs import CapacityCosts
from vllm.v1.worker.gpu.spec_decode.dspark.cost_cache import CostCache
from vllm.v1.worker.gpu.spec_decode.dspark.online_sts import (
    OnlineSTS,
    calibration_tensor,
)

K, SLOTS, CPU = 3, 4, torch.device("cpu")
START = ConfidenceCalibration.uniform(K)
LEARNED = ConfidenceCalibration(
    ((0.5, 0.6, 0.7), (1.5, 1.6, 1.7)),
    ((0.1, 0.2, 0.3), (-0.1, -0.2, -0.3)),
    ((0.4, 0.5, 0.6), (-0.4, 0.0, 0.9)),
    (40, 7),
)


@pytest.fixture
def cache(tmp_path):
    return CostCache(tmp_path, {"model": "m"})


@pytest.fixture(autouse=True)
def base_shutdowns(monkeypatch):
    """Runners whose base class was shut down."""
    seen = []
    monkeypatch.setattr(
        GPUModelRunner, "shutdown", lambda self: seen.append(self), raising=False
    )
    return seen


@pytest.fixture(autouse=True)
def one_cpu_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", RehearsalEvent)
    group = SimpleNamespace(rank_in_group=0)
    module = CapacityCosts.__module__
    monkeypatch.setattr(f"{module}.get_tp_group", lambda: group)


def make_runner(cache, sections=None):
    """Return a runner with just what keeping and loading touch."""
    costs = object.__new__(CapacityCosts)
    costs._cache, costs.cached_sections = cache, sections or {}
    runner = object.__new__(DSparkCapacityModelRunner)
    runner.capacity = SimpleNamespace(costs=costs)
    logits = torch.zeros(SLOTS, K)
    runner.online_sts = OnlineSTS(
        calibration_tensor(START, CPU), logits, torch.zeros(SLOTS)
    )
    return runner


def test_what_was_learned_is_where_the_next_run_starts(cache, base_shutdowns):
    first = make_runner(cache)
    first.online_sts.load_state_json(LEARNED.to_json())
    first.shutdown()
    assert base_shutdowns == [first]
    second = make_runner(cache, cache.load())
    second._load_calibration()
    assert second.online_sts.current() == first.online_sts.current()
    expected = calibration_tensor(LEARNED, CPU)
    assert torch.equal(second.online_sts.calibration, expected), "the graph's buffer"


def test_a_run_that_learned_nothing_keeps_nothing(cache, base_shutdowns):
    runner = make_runner(cache)
    runner.shutdown()
    assert cache.load() is None
    assert base_shutdowns == [runner]


def test_an_unusable_section_is_ignored_with_a_warning(cache, monkeypatch):
    warnings = []
    record = lambda text, *args: warnings.append(text % args)  # noqa: E731
    monkeypatch.setattr(dspark_capacity_model_runner.logger, "warning", record)
    runner = make_runner(cache, {CALIBRATION_KEY: {"schema": "other"}})
    runner._load_calibration()
    assert runner.online_sts.current() == START
    [warning] = warnings
    assert "Ignoring the calibration" in warning


def test_a_runner_that_failed_early_can_be_shut_down(base_shutdowns):
    runner = object.__new__(DSparkCapacityModelRunner)
    runner.capacity = None
    runner.shutdown()
    assert base_shutdowns == [runner]
