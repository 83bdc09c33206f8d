# SPDX-License-Identifier: Apache-2.0
"""Online STS in a real engine with a distorted head: it learns, and loses nothing."""

import pytest

from tests.helpers.engine import EngineResult, EngineSpec, dspark, run_engines
from tests.helpers.engine_sts import DISTORTION

TIMEOUT_S = 1500
pytestmark = [pytest.mark.engine, pytest.mark.timeout(TIMEOUT_S)]
STS = "tests.helpers.engine_sts:"
K = 7
KNEE = 3
CURVE = [[1, 1000.0], [8, 500.0], [16, 250.0], [32, 100.0], [64, 25.0]]
# Four greedy requests, a sampled one and one that a grammar steers. They end one
# after the other, so that the batch falls below the knee.
SAMPLING = [
    *({"max_tokens": n, "ignore_eos": True} for n in (40, 50, 60, 90)),
    {"temperature": 1.0, "seed": 7, "max_tokens": 50, "ignore_eos": True},
    {"structured_outputs": {"regex": "(Yes|No), [a-z]{30}"}, "max_tokens": 40},
]
GREEDY = range(4)


@pytest.fixture(scope="module")
def runs(tiny_target, tiny_draft, heldout_prompts) -> list[EngineResult]:
    """Without speculation; calibrated; and calibrated from a wrong start."""
    common = {
        "model": tiny_target,
        "prompts": heldout_prompts,
        "sampling": SAMPLING,
    }
    config = dspark(
        tiny_draft,
        K,
        dspark_sps_curve=CURVE,
        dspark_draft_depths=[3, K],
        dspark_online_sts=True,
        dspark_confidence_temperature=0.9,
    )
    specs = [
        EngineSpec(**common),
        EngineSpec(
            speculative_config=config,
            worker_setup=STS + "distort_and_watch",
            worker_probe=STS + "sts_log",
            **common,
        ),
    ]
    env = {
        "VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": str(KNEE),
        "VLLM_DSPARK_STS_LOG_INTERVAL": "0.001",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    return run_engines(specs, env=env, timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def seen(runs) -> dict:
    [probe] = runs[1].probes
    return probe


def test_greedy_output_is_that_without_speculation(runs):
    plain, calibrated = runs
    assert calibrated.num_replays > 0, "premise"
    for i in GREEDY:
        assert calibrated.tokens[i] == plain.tokens[i]


def test_rows_are_graded_by_class(seen):
    num_greedy, num_sampled = map(len, seen["accepted"])
    assert num_greedy > num_sampled > 0
    for accepted, verified in zip(seen["accepted"], seen["verified"], strict=True):
        assert all(0 <= a <= v <= K for a, v in zip(accepted, verified, strict=True))
    assert min(seen["verified"][0]) < K, "premise: some rows were trimmed"
    assert any(a > 0 for a in seen["accepted"][0]), "premise: drafts are accepted"


def test_the_temperature_moves_towards_the_distortion(seen):
    scale, start = seen["calibration"][0][0], 1 / 0.9
    # The head was made four times too flat: only sharper scales undo that.
    assert seen["mean_logit"][0] < 8 * DISTORTION, "premise: logits of 4 became 1"
    assert scale[0] > start + 0.2
    state = seen["state"]["classes"]["greedy"]
    assert state["temperature"][0] == pytest.approx(1 / scale[0], rel=0.2)


def test_the_replayed_graph_applies_the_scales_in_force(seen):
    steps = seen["steps"]
    moved = [step for step in steps if step["moved"] > 0.1]
    assert moved, "premise: steps were drafted with other scales than the start's"
    assert max(step["error"] for step in steps) < 1e-4
    assert all(step["same_address"] for step in steps)


def test_below_the_knee_nothing_is_observed(seen):
    steps = seen["steps"]
    idle = [step for step in steps if not step["active"]]
    assert len(idle) > 3, "premise: some steps are below the knee"
    assert not any(step["observed"] for step in idle)
    active = [step for step in steps if step["active"]]
    assert all(step["observed"] == 1 for step in active)


def test_rows_of_a_grammar_are_excluded(seen):
    assert sum(step["excluded"] for step in seen["steps"]) > 3
