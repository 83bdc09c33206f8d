# SPDX-License-Identifier: Apache-2.0
"""DFlash in real engines: the depth follows the load, nothing is trimmed or lost."""

import json
from pathlib import Path

import pytest

from tests.helpers.depth_logs import DRAFT_MANAGER, TARGET_MANAGER, graphs, settled
from tests.helpers.dflash_draft import write_dflash_draft
from tests.helpers.engine import EngineResult, EngineSpec, run_engines
from tests.helpers.engine_depth import PIN_LENGTH
from vllm.v1.worker.gpu.spec_decode.dspark.plan_cadence import CALM_PLANS

# Two minutes of two idle cores; the first test waits for all engines.
TIMEOUT_S = 1500
pytestmark = [pytest.mark.engine, pytest.mark.timeout(TIMEOUT_S)]

DEPTH = "tests.helpers.engine_depth:"
DFLASH = "tests.helpers.engine_dflash:"
HELDOUT = Path(__file__).parents[3] / "fixtures" / "tiny-dspark" / "heldout.jsonl"

K = 7
ENVIRONMENT = {
    "VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": "1",
    "VLLM_DSPARK_DYNAMIC_DRAFT_MIN_DEPTH": "0",
    # Costs are measured, then not looked at: the tests say what depth to use.
    "VLLM_DSPARK_PROFILE_SIZES": "1",
    "VLLM_DSPARK_PROFILE_REPEATS": "1",
}
PIN_TOKENS = 24
DIP_TOKENS = 60
FUZZ_PROMPTS = 8
FUZZ_STEPS = 100
# Prompts do not fit beside drafts in a step of 24, and three requests of up to five
# blocks do not fit six: rows are truncated, left out, chunked and preempted.
FUZZ_ENGINE = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,  # a draft pass has K + 1 rows a request
    "max_model_len": 160,
    "num_gpu_blocks_override": 7,
    "block_size": 32,
}


def _prompts(count: int) -> list[str]:
    lines = HELDOUT.read_text().splitlines()[:count]
    return [json.loads(line)["prompt"] for line in lines]


def _config(draft: str, **keys) -> dict:
    return {
        "method": "dflash",
        "model": draft,
        "num_speculative_tokens": K,
        "dspark_sps_curve": "auto",
        "dspark_draft_depths": list(range(K + 1)),
        **keys,
    }


def _arms(causal: str, usual: str) -> dict[str, dict]:
    """Return what each engine of this file differs in, by name."""
    pinned, many = _prompts(PIN_LENGTH), _prompts(FUZZ_PROMPTS)
    lengths = [{"max_tokens": 60 + 10 * (i % 4)} for i in range(FUZZ_PROMPTS)]

    def dip(setup: str) -> dict:
        return {
            "prompts": pinned,
            "sampling": {"max_tokens": DIP_TOKENS, "ignore_eos": True},
            "engine": {"max_num_seqs": PIN_LENGTH},
            "speculative_config": _config(usual),
            "worker_setup": DEPTH + setup,
        }

    def fuzz(setup: str, count: int) -> dict:
        return {
            "prompts": many[:count],
            "sampling": lengths[:count],
            "arrivals": [5 * i for i in range(count)],
            "engine": FUZZ_ENGINE,
            "speculative_config": _config(usual),
            "worker_setup": DEPTH + setup,
        }

    return {
        "plain": {"prompts": many, "sampling": lengths},
        "pin": {
            "prompts": pinned * (K + 1),
            "waves": [PIN_LENGTH] * (K + 1),
            "sampling": {"max_tokens": PIN_TOKENS},
            "engine": {"max_num_seqs": PIN_LENGTH},
            "speculative_config": _config(causal),
            "worker_setup": DEPTH + "pin_each_depth",
        },
        "steady": dip("stay_at_full"),
        "dip": dip("dip_to_zero"),
        "fuzz": fuzz("shuffle_depth", FUZZ_PROMPTS),
        "fuzz_fault": fuzz("shuffle_depth_and_shift_logits", 3),
        "free": {
            "prompts": pinned,
            "sampling": {"max_tokens": DIP_TOKENS},
            "engine": {"max_num_seqs": PIN_LENGTH},
            "speculative_config": _config(usual, dspark_draft_depths=[1, 3, K]),
            "worker_setup": DFLASH + "price_by_hand",
        },
    }


def _spec(target: str, name: str, arm: dict) -> EngineSpec:
    probe = DFLASH + "depths_and_prior"
    return EngineSpec(
        model=target, worker_probe=None if name == "plain" else probe, **arm
    )


@pytest.fixture(scope="module")
def runs(tiny_target, tiny_draft, tmp_path_factory) -> dict[str, EngineResult]:
    """Every engine of this file, in one subprocess."""
    root = tmp_path_factory.mktemp("drafts")
    causal = write_dflash_draft(tiny_draft, root / "causal", causal=True)
    usual = write_dflash_draft(tiny_draft, root / "usual", causal=False)
    arms = _arms(causal, usual)
    specs = [_spec(tiny_target, name, arm) for name, arm in arms.items()]
    results = run_engines(specs, env=ENVIRONMENT, timeout_s=TIMEOUT_S)
    return dict(zip(arms, results, strict=True))


def _log(run: EngineResult) -> list[dict]:
    return run.probes[0]["log"]


def test_a_dflash_engine_chooses_depths_and_has_nothing_to_trim_with(runs):
    for name, run in runs.items():
        if name != "plain":
            probe = run.probes[0]
            assert probe["manager"] == "DepthCapacityManager"
            assert probe["speculator"] == "DepthDFlashSpeculator"
            assert not probe["calibrates"] and probe["num_varlen_graphs"] == 0
            assert all(record["budget"] is None for record in probe["log"])


@pytest.mark.parametrize("depth", range(K + 1))
def test_every_pinned_depth_gives_the_greedy_output(runs, depth):
    run, plain = runs["pin"], runs["plain"]
    steps = settled(_log(run), depth)
    assert len(steps) >= 3, "premise: the pin was served"
    assert {record["depth"] for record in steps} == {depth}
    widths = {width for _, _, width in graphs(steps, TARGET_MANAGER)}
    assert widths == {depth + 1}, "premise: the target ran graphs of this depth"
    if depth > 0:
        drafted = graphs(steps, DRAFT_MANAGER)
        assert len(drafted) == len(steps), "premise: each step replays a draft graph"
        # The last token, known already, and one row per draft.
        assert {width for _, _, width in drafted} == {1 + depth}
        rows = [record["draft_rows"] for record in steps]
        assert rows == [[n * (1 + depth)] for _, n, _ in drafted]

    wave = slice(PIN_LENGTH * depth, PIN_LENGTH * (depth + 1))
    for tokens, expected in zip(run.tokens[wave], plain.tokens, strict=False):
        assert tokens[0] == expected[0][:PIN_TOKENS]


def _drafts_by_place(log: list[dict], depth: int) -> dict[tuple[int, int], list[int]]:
    """Map (prompt, tokens so far) to the drafts that a pinned run made there."""
    return {
        (int(request.split("-")[0]) % PIN_LENGTH, length): drafts
        for record in settled(log, depth)
        for request, length, drafts in record["drafts"]
    }


@pytest.mark.parametrize("depth", range(1, K))
def test_a_shallow_draft_is_the_beginning_of_the_full_one(runs, depth):
    # Of a causal draft: what is drafted does not depend on how much follows.
    log = _log(runs["pin"])
    shallow, full = _drafts_by_place(log, depth), _drafts_by_place(log, K)
    common = sorted(shallow.keys() & full.keys())
    assert len(common) >= 3, "premise: both depths drafted at the same places"
    assert len({tuple(full[place]) for place in common}) > 1, "premise"
    assert [shallow[p] for p in common] == [full[p][:depth] for p in common]


def test_a_random_depth_every_step_gives_the_greedy_output(runs):
    run = runs["fuzz"]
    log = _log(run)
    assert len(log) >= FUZZ_STEPS
    assert {record["depth"] for record in log} == set(range(K + 1))
    changes = sum(a["depth"] != b["depth"] for a, b in zip(log, log[1:], strict=False))
    assert changes > FUZZ_STEPS / 2
    mixed = [r for r in log if r["prefilling"] and any(r["scheduled"])]
    assert len(mixed) > 5, "premise: prefills and drafts share steps"
    widths = [set(r["scheduled"]) for r in log if not r["prefilling"]]
    # vLLM 0.33, the release that skips useless drafts, gives the requests of a step
    # one width unless the token budget cuts one, and a draft pass needs it for all.
    is_one_width = any(r["skips"] for r in log)
    assert is_one_width or any(len(w) > 1 for w in widths), (
        "premise: drafts of two depths in one step"
    )
    assert run.metrics["vllm:num_preemptions"] > 0
    assert run.metrics["vllm:spec_decode_num_accepted_tokens"] > 0
    assert run.tokens == runs["plain"].tokens


def test_the_fuzz_notices_a_shifted_row(runs):
    run = runs["fuzz_fault"]
    assert run.tokens != runs["plain"].tokens[: len(run.tokens)]


def _full_drafts(log: list[dict], first_step: int) -> dict:
    return {
        (request.split("-")[0], length): drafts
        for record in log[first_step:]
        for request, length, drafts in record["drafts"]
        if len(drafts) == K
    }


def test_depth_zero_keeps_the_context_so_that_drafts_do_not_worsen(runs):
    log = _log(runs["dip"])
    # Not the last steps, whose drafts nobody can use.
    dips = [i for i, r in enumerate(log) if r["depth"] == 0 and not r["skips"]]
    assert len(dips) >= 5, "premise: several tokens were decoded without drafts"
    after = _full_drafts(log, dips[-1] + 1)
    steady = _full_drafts(_log(runs["steady"]), 0)
    common = sorted(after.keys() & steady.keys())
    assert len(common) >= 3, "premise: both runs drafted at the same positions"
    # Equal drafts at equal positions of equal outputs: equal acceptance.
    assert [after[key] for key in common] == [steady[key] for key in common]
    assert runs["dip"].tokens == runs["steady"].tokens


def test_the_depth_falls_as_poor_acceptance_is_learned(runs):
    run = runs["free"]
    probe, log = run.probes[0], _log(run)
    drafted = [record["depth"] for record in log if not record["skips"]]
    assert drafted[0] == K, "premise: with the assumed acceptance K pays"
    assert max(drafted[-10:]) < K
    # The first step has prompts only, which are no load; later ones may be quiet.
    published = [record["publishes"] for record in log]
    assert probe["num_published"] == sum(published)
    loaded = [not record["prefilling"] for record in log]
    assert 0 < sum(published) < sum(loaded), "premise: some steps are quiet"
    assert published[:CALM_PLANS] == loaded[:CALM_PLANS]
    # What the sampler accepted, as the engine's own counters have it.
    first = run.metrics["vllm:spec_decode_num_accepted_tokens_per_pos"][0]
    mean = first / run.metrics["vllm:spec_decode_num_drafts"]
    assert mean < 0.3, "premise: the draft is a poor one"
    assert probe["prior"][0] == pytest.approx(mean, abs=0.25)
    assert all(t == p[: len(t)] for t, p in _pairs(run, runs["plain"]))


def _pairs(run: EngineResult, plain: EngineResult) -> list[tuple[list, list]]:
    return [
        (a[0][:40], b[0][:40]) for a, b in zip(run.tokens, plain.tokens, strict=False)
    ]
