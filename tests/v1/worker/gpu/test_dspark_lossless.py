# SPDX-License-Identifier: Apache-2.0
"""Sampled output of real engines against the target's exact law.

The interpreter affords hundreds of draws of the bundled models; the twenty thousand
draws of the same kernels are in spec_decode/test_lossless_sampling.py.
"""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from tokenizers import Tokenizer

from tests.helpers.engine import EngineResult, EngineSpec, dspark, run_engines

TIMEOUT_S = 1500
pytestmark = [pytest.mark.engine, pytest.mark.timeout(TIMEOUT_S)]

DEPTH = "tests.helpers.engine_depth:"
HELDOUT = Path(__file__).parents[3] / "fixtures" / "tiny-dspark" / "heldout.jsonl"
ENVIRONMENT = {
    "VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": "1",
    "VLLM_DSPARK_DYNAMIC_DRAFT_MIN_DEPTH": "0",
}
# Some drafts of eight requests pay, not all of them.
CURVE = [[1, 100.0], [8, 91.0], [16, 77.0], [32, 50.0], [64, 22.0]]
DEPTHS = [0, 1, 3, 7]
TEMPERATURE = 0.8
NUM_SAMPLES = 160
NUM_TOKENS = 5
# Contexts with fewer draws say little and cost a target run each.
LEAST_DRAWS = 25
LEAST_EXPECTED = 5.0
LEAST_P_VALUE = 1e-3
# What the fault must be told from chance by; few draws, and most tokens are nearly
# certain after their context.
FAULT_P_VALUE = 1e-6

Context = tuple[int, ...]


def draws_by_context(run: EngineResult) -> dict[Context, Counter]:
    """Count each token by the tokens of its sample before it.

    The first token comes from the prefill; every later one went through a draft,
    a resampling or a bonus draw.
    """
    draws: dict[Context, Counter] = {}
    for [*samples] in run.tokens:
        for tokens in samples:
            for end in range(1, len(tokens)):
                draws.setdefault(tuple(tokens[:end]), Counter())[tokens[end]] += 1
    return {c: n for c, n in draws.items() if n.total() >= LEAST_DRAWS}


def law_of(logprobs: dict[str, float]) -> dict[int, float]:
    """Return the sampled law from the target's raw log-probabilities."""
    weights = {int(t): np.exp(lp / TEMPERATURE) for t, lp in logprobs.items()}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def chi_square(counts: Counter, law: dict[int, float]) -> tuple[float, int]:
    """Return statistic and degrees of freedom; rare tokens share one cell."""
    num_draws = counts.total()
    common = [t for t, p in law.items() if p * num_draws >= LEAST_EXPECTED]
    observed = [counts[t] for t in common]
    expected = [law[t] * num_draws for t in common]
    rest = num_draws - sum(expected)
    if rest >= LEAST_EXPECTED or not common:
        observed, expected = [*observed, num_draws - sum(observed)], [*expected, rest]
    else:
        least = int(np.argmin(expected))
        observed[least] += num_draws - sum(observed)
        expected[least] += rest
    terms = (np.array(observed) - expected) ** 2 / np.array(expected)
    return float(terms.sum()), len(expected) - 1


@pytest.fixture(scope="module")
def prompt(tiny_target) -> list[int]:
    """A description, as token ids: its sentences leave much choice."""
    rows = [json.loads(line) for line in HELDOUT.read_text().splitlines()[:20]]
    text = next(row["prompt"] for row in rows if row["kind"] == "description")
    return Tokenizer.from_file(f"{tiny_target}/tokenizer.json").encode(text).ids


@pytest.fixture(scope="module")
def sampled(tiny_target, tiny_draft, prompt) -> dict[str, EngineResult]:
    """Many samples of one prompt at changing depths, right and with a fault."""
    config = dspark(
        tiny_draft,
        7,
        dspark_sps_curve=CURVE,
        dspark_draft_depths=DEPTHS,
        draft_sample_method="probabilistic",
    )
    setups = {"right": "shuffle_depth", "fault": "shuffle_depth_and_sharpen"}
    specs = [
        EngineSpec(
            model=tiny_target,
            prompts=[prompt],
            sampling={
                "temperature": TEMPERATURE,
                "max_tokens": NUM_TOKENS,
                "n": NUM_SAMPLES,
                "ignore_eos": True,
            },
            speculative_config=config,
            worker_setup=DEPTH + setup,
            worker_probe=DEPTH + "depth_log",
        )
        for setup in setups.values()
    ]
    results = run_engines(specs, env=ENVIRONMENT, timeout_s=TIMEOUT_S)
    return dict(zip(setups, results, strict=True))


@pytest.fixture(scope="module")
def laws(tiny_target, prompt, sampled) -> dict[Context, dict[int, float]]:
    """The target's law after every context that was drawn from often."""
    contexts = sorted({c for run in sampled.values() for c in draws_by_context(run)})
    vocab_size = json.loads(Path(tiny_target, "config.json").read_text())["vocab_size"]
    [plain] = run_engines(
        [
            EngineSpec(
                model=tiny_target,
                prompts=[[*prompt, *context] for context in contexts],
                sampling={"max_tokens": 1, "logprobs": vocab_size},
                engine={"max_logprobs": vocab_size},
            )
        ],
        timeout_s=TIMEOUT_S,
    )
    rows = [logprobs[0] for [logprobs] in plain.logprobs]
    assert all(len(row) == vocab_size for row in rows)
    return {c: law_of(row) for c, row in zip(contexts, rows, strict=True)}


def p_value(run: EngineResult, laws: dict) -> float:
    draws = draws_by_context(run)
    parts = [chi_square(counts, laws[context]) for context, counts in draws.items()]
    statistic, degrees = (sum(column) for column in zip(*parts, strict=True))
    assert degrees >= 10, "premise: the contexts leave a choice"
    return float(stats.chi2.sf(statistic, degrees))


def test_premise_all_depths_trimmed_steps_and_rejections_took_part(sampled):
    run = sampled["right"]
    log = run.probes[0]
    assert {record["depth"] for record in log} == set(DEPTHS)
    assert sum(record["budget"] is not None for record in log) > 5
    accepted = run.metrics["vllm:spec_decode_num_accepted_tokens"]
    assert 50 < accepted < run.metrics["vllm:spec_decode_num_draft_tokens"] - 50
    assert len(run.tokens[0]) == NUM_SAMPLES
    assert sum(n.total() for n in draws_by_context(run).values()) > 200


def test_engine_frequencies_match_the_target(sampled, laws):
    assert p_value(sampled["right"], laws) > LEAST_P_VALUE


def test_a_wrong_temperature_at_verification_is_noticed(sampled, laws):
    assert p_value(sampled["fault"], laws) < FAULT_P_VALUE
