# SPDX-License-Identifier: Apache-2.0
"""Host times are added up by step, by part, and by what the step was."""

from types import SimpleNamespace

import pytest

from benchmarks.sweep import host_times
from benchmarks.sweep.host_times import CAPACITY_PARTS, RUNNER_PARTS, HostTimes
from vllm.v1.worker.gpu.dspark_capacity_model_runner import DSparkCapacityModelRunner
from vllm.v1.worker.gpu.spec_decode.capacity import (
    VarlenCapacityManager,
)
from vllm.v1.worker.gpu.spec_decode.mask_capacity import MaskCapacityManager


class Clock:
    """Seconds that pass only inside parts."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(host_times.time, "perf_counter", lambda: self.now)

    def part(self, microseconds):
        def run():
            self.now += 1e-6 * microseconds
            return microseconds

        return run


@pytest.fixture
def runner(monkeypatch):
    clock = Clock(monkeypatch)
    capacity = SimpleNamespace(plan_step=clock.part(50), finish_step=clock.part(20))
    return SimpleNamespace(
        capacity=capacity,
        _calibrate=clock.part(7),
        _step_plan=SimpleNamespace(active=True),
    )


def test_parts_of_a_step_are_added_up_and_kinds_of_steps_kept_apart(runner):
    times = HostTimes(runner)
    assert runner.capacity.plan_step() == 50, "outside a step: passed on, not counted"
    for active in (True, True, False):
        times.begin_step()
        runner.capacity.plan_step()
        runner._step_plan = SimpleNamespace(active=active)
        if active:
            runner.capacity.finish_step()
            runner._calibrate()
            runner._calibrate()
    found = times.take()
    assert found["active"]["num_steps"] == 2 and found["fixed"]["num_steps"] == 1
    assert found["active"]["p50"] == pytest.approx(84.0)
    assert found["fixed"]["p99"] == pytest.approx(50.0)
    assert found["active"]["parts"] == pytest.approx(
        {"plan_step": 50.0, "finish_step": 20.0, "_calibrate": 14.0}
    )
    assert times.take() == {}


def test_a_part_that_fails_is_counted_and_fails_on(runner):
    def fail():
        raise ValueError("broken")

    runner.capacity.finish_step = fail
    times = HostTimes(runner)
    times.begin_step()
    with pytest.raises(ValueError, match="broken"):
        runner.capacity.finish_step()
    assert times.take()["active"]["parts"] == {"finish_step": 0.0}


def test_every_part_exists_in_the_product():
    managers = (VarlenCapacityManager, MaskCapacityManager)
    for name in CAPACITY_PARTS:
        assert any(hasattr(manager, name) for manager in managers), name
    for name in RUNNER_PARTS:
        assert hasattr(DSparkCapacityModelRunner, name), name
