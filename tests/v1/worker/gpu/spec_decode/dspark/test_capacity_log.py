# SPDX-License-Identifier: Apache-2.0
"""The periodic log line."""

import logging

import pytest

from vllm.v1.worker.gpu.spec_decode.dspark import capacity_log as module
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_log import CapacityLog

STEP = {"num_decodes": 8, "knee": 6, "num_drafts": 56, "ratio": 1.25}


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the module reads, in a list of one."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def lines(monkeypatch):
    """What was logged."""
    found = []

    def info(text, *args):
        found.append(text % args)

    monkeypatch.setattr(module.logger, "info", info)
    assert module.logger.name.startswith("vllm."), "vLLM's handlers get it"
    assert isinstance(module.logger, logging.Logger)
    return found


def test_line_holds_means_since_the_last_one(clock, lines):
    log = CapacityLog(10.0)
    log.note(**STEP | {"num_decodes": 4}, depth=None, draft_budget=None)
    log.note(**STEP, depth=7, draft_budget=None)
    assert lines == []
    clock[0] += 10.0
    log.note(**STEP, depth=3, draft_budget=28)
    [line] = lines
    assert "6.7 decode requests (knee 6), 2 of 3 steps active" in line
    assert "depth 5.0, 42.0 of 56.0 drafts verified" in line
    assert line.endswith("step time 1.25")
    clock[0] += 10.0
    log.note(**STEP | {"ratio": None}, depth=3, draft_budget=28)
    assert "1 of 1 steps active" in lines[1] and "not compared" in lines[1]


def test_no_line_before_the_interval_is_over_and_one_after_a_pause(clock, lines):
    log = CapacityLog(10.0)
    for _ in range(100):
        clock[0] += 0.09
        log.note(**STEP, depth=None, draft_budget=None)
    assert lines == []
    clock[0] += 1000.0
    log.note(**STEP, depth=None, draft_budget=None)
    log.note(**STEP, depth=None, draft_budget=None)
    assert len(lines) == 1
    assert "0 of 101 steps active" in lines[0]
