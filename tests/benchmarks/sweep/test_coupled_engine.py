# SPDX-License-Identifier: Apache-2.0
"""Coupled acceptance in real engines: fixed depth, and capacity that trims."""

from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.acceptance.draws import request_seed
from benchmarks.acceptance.world import sigmoid
from tests.helpers.coupled_engine import WORLD
from tests.helpers.engine import EngineResult, EngineSpec, dspark, run_engines

pytestmark = pytest.mark.engine
K, NUM_REQS, NUM_TOKENS = 7, 6, 48
HELPER = "tests.helpers.coupled_engine:"


@pytest.fixture(scope="module")
def arms(tiny_target, tiny_draft) -> Iterator[dict[str, EngineResult]]:
    """Run the fixed arm and capacity at half the drafts, on the same requests."""
    synthetic = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0] * K,
    }
    configs = {
        "fixed": dspark(tiny_draft, K, **synthetic),
        "capacity": dspark(
            tiny_draft,
            K,
            dspark_budget_frac=0.5,
            dspark_draft_depths=[K],
            **synthetic,
        ),
    }
    specs = [
        EngineSpec(
            model=tiny_target,
            prompts=[[5 + i, 7, 11, 13] for i in range(NUM_REQS)],
            sampling=[
                {
                    "max_tokens": NUM_TOKENS,
                    "ignore_eos": True,
                    "seed": request_seed(3, i),
                }
                for i in range(NUM_REQS)
            ],
            speculative_config=config,
            process_setup=HELPER + "coupled",
            worker_probe=HELPER + "record",
        )
        for config in configs.values()
    ]
    env = {"VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": "1"}
    yield dict(zip(configs, run_engines(specs, env=env), strict=True))


def judged(result):
    rows = np.array(result.probes[0]["judged"])
    return rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]


@pytest.mark.parametrize("arm", ["fixed", "capacity"])
def test_every_round_accepts_exactly_what_the_world_says(arms, arm):
    seeds, first, widths, accepted = judged(arms[arm])
    assert len(seeds) > 60 and len(set(seeds)) == NUM_REQS
    if arm == "capacity":
        assert len(set(widths)) > 3  # trimmed, unevenly
    else:
        assert set(widths) == {K}
    logits = WORLD.true_logits(seeds, first)
    expected = WORLD.accepted_prefix(logits, seeds, first, widths)
    np.testing.assert_array_equal(accepted, expected)
    assert 0 < accepted.sum() < widths.sum()


def test_the_confidence_head_reports_the_distorted_truth(arms):
    known = {request_seed(3, i) for i in range(NUM_REQS)}
    rows = [r for r in arms["capacity"].probes[0]["reported"] if r[0] in known]
    assert len(rows) > 60
    seeds, first = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    expected = sigmoid(WORLD.reported(WORLD.true_logits(seeds, first)))
    np.testing.assert_allclose([r[2] for r in rows], expected, atol=2e-5)


def test_arms_are_in_the_same_world(arms):
    fixed, capacity = (
        {(s, p): a for s, p, *_, a in zip(*judged(arms[a]), strict=True)}
        for a in ("fixed", "capacity")
    )
    shared = fixed.keys() & capacity.keys()
    assert len(shared) > NUM_REQS
    # Trimming may only end a round earlier, at the same position.
    assert all(capacity[k] <= fixed[k] for k in shared)
    assert [len(t[0]) for a in arms.values() for t in a.tokens] == [
        NUM_TOKENS
    ] * NUM_REQS * 2
