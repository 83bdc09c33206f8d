# SPDX-License-Identifier: Apache-2.0
"""One real engine of the rehearsal under every traffic of the sweep tool."""

import pytest

from benchmarks import sweep_concurrency
from benchmarks.sweep.engine import EngineSetup, Load
from benchmarks.sweep.traffic import LengthRange, Traffic
from benchmarks.sweep_concurrency import ArmProcess
from tests.helpers.coupled_engine import WORLD
from tests.helpers.engine import ENGINE_DEFAULTS, REHEARSAL_ENVIRONMENT

pytestmark = pytest.mark.engine
PROMPT, OUTPUT = LengthRange(4, 12), LengthRange(6, 20)
# The sweep sets this one itself.
LLM = {k: v for k, v in ENGINE_DEFAULTS.items() if k != "disable_log_stats"}


@pytest.fixture(scope="module")
def arm(tiny_target, tiny_draft):
    """Start an engine that holds depth 7, with its knee at one request."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in REHEARSAL_ENVIRONMENT.items():
            patch.setenv(name, value)
        process = ArmProcess(
            EngineSetup(
                arm="pinned7",
                target=tiny_target,
                draft=tiny_draft,
                full_depth=7,
                world=WORLD,
                llm=LLM,
                environ={"VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": "1"},
            )
        )
    try:
        setup = process.receive(sweep_concurrency.START_LIMIT_S)
        assert setup["costs"]["draft_ms"].keys() == {"7"}
        yield process
    finally:
        process.stop()


def serve(arm, traffic, concurrency=4):
    return arm.serve(Load(concurrency, PROMPT, OUTPUT, 0, traffic=traffic))


def test_drain_yields_the_drawn_lengths_twice_alike(arm):
    load = Load(3, PROMPT, OUTPUT, 0, return_tokens=True)
    first, second = arm.serve(load), arm.serve(load)
    assert first["tokens"] == second["tokens"] and first["num_steps"] > 3
    assert first["num_steps"] == second["num_steps"]  # the same draws
    assert len({len(t) for t in first["tokens"]}) > 1


def test_every_traffic_is_served_and_measured(arm):
    # The first two end by requests: a busy machine serves few steps a second.
    counted = {
        "steady": Traffic("steady", 1e6, (4,), max_requests=8),
        "open": Traffic("open", 1e3, arrival_rate=4.0, max_requests=5),
    }
    timed = {
        "change": Traffic("change", 4, (1, 6)),
        "churn": Traffic("churn", 6, (6,)),
    }
    served = {kind: serve(arm, t) for kind, t in (counted | timed).items()}
    for kind, result in served.items():
        assert result["num_steps"] > 0, kind
        assert result["figures"]["throughput"][1] == "tok/s"
    for kind in counted:
        assert served[kind]["figures"]["throughput"][0] > 0
        assert served[kind]["num_active"] > 0
        host = served[kind]["host_us"]["active"]
        assert host["num_steps"] == served[kind]["num_active"]
        assert {"plan_step", "finish_step"} <= host["parts"].keys()
        assert 0.0 < max(host["parts"].values()) <= host["p99"]
    assert served["open"]["figures"]["ttft p99"][0] > 0
    assert "phase 1 (C=6) steady" in served["change"]["figures"]
    assert "aborted" in served["churn"]["figures"]
    # Nothing of an aborted load is left: the next one is as if it were the first.
    load = Load(3, PROMPT, OUTPUT, 0, return_tokens=True)
    assert [len(t) for t in arm.serve(load)["tokens"]] == [
        len(t) for t in arm.serve(load)["tokens"]
    ]
