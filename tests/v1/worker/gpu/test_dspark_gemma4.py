# SPDX-License-Identifier: Apache-2.0
"""Gemma4 drafts in real engines: every depth, trimming, no loss."""

import random

import pytest

from tests.helpers.depth_logs import DRAFT_MANAGER, TARGET_MANAGER, graphs, settled
from tests.helpers.engine import EngineResult, EngineSpec, dspark, run_engines
from tests.helpers.engine_depth import PIN_LENGTH
from tests.helpers.gemma4_models import BLOCK_SIZE, write_gemma4_pair

# A minute of an idle core; the first test waits for all engines.
TIMEOUT_S = 1500
pytestmark = [pytest.mark.engine, pytest.mark.timeout(TIMEOUT_S)]

DEPTH = "tests.helpers.engine_depth:"
GEMMA4 = "tests.helpers.engine_gemma4:"
SPIES = "tests.helpers.capacity_spies:"
SPEC = "vllm:spec_decode_num_"

K = BLOCK_SIZE
FLAT_CURVE = [[1, 100.0], [512, 100.0]]
STEEP_CURVE = [[1, 100.0], [6, 80.0], [12, 30.0], [24, 10.0]]
ENVIRONMENT = {
    "VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": "1",
    "VLLM_DSPARK_DYNAMIC_DRAFT_MIN_DEPTH": "0",
}
NUM_PROMPTS = 6
NUM_TOKENS = 34
PIN_TOKENS = 16
DIP_TOKENS = 28
TRIM_TOKENS = 24
FAULT_TOKENS = 12
FUZZ_STEPS = 60
# Prompts do not fit beside drafts in a step of 21, and three requests do not fit the
# blocks: rows are truncated, left out, chunked and preempted.
FUZZ_ENGINE = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 21,
    "num_gpu_blocks_override": 16,
}
# Of the best token over the next one, in nats; rounding moves logits by about 1e-5.
LEAST_LEAD = 1e-2


def _prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [
        [rng.randrange(3, 31) for _ in range(rng.randrange(4, 40))]
        for _ in range(NUM_PROMPTS)
    ]


def _arms(draft: str) -> dict[str, dict]:
    """Return what each engine of this file differs in, by name."""
    prompts, pinned = _prompts(), _prompts()[:PIN_LENGTH]

    def curve(points: list) -> dict:
        depths = list(range(K + 1))
        return dspark(draft, K, dspark_sps_curve=points, dspark_draft_depths=depths)

    def waves(count: int, max_tokens: int, setup: str) -> dict:
        return {
            "prompts": pinned * count,
            "waves": [PIN_LENGTH] * count,
            "sampling": {"max_tokens": max_tokens},
            "engine": {"max_num_seqs": PIN_LENGTH},
            "speculative_config": curve(FLAT_CURVE),
            "worker_setup": setup,
        }

    def fuzz(setup: str, count: int, **sampling) -> dict:
        return {
            "prompts": prompts[:count],
            "sampling": sampling,
            "arrivals": [4 * i for i in range(count)],
            "engine": FUZZ_ENGINE,
            "speculative_config": curve(STEEP_CURVE),
            "worker_setup": DEPTH + setup,
        }

    keys = {"dspark_confidence_threshold": 0.3, "dspark_draft_depths": [K]}
    threshold = dspark(draft, K, **keys)
    shift = "shuffle_depth_and_shift_logits"
    return {
        "plain": {"sampling": {"logprobs": 2}, "worker_probe": None},
        "pin": waves(K + 1, PIN_TOKENS, DEPTH + "pin_each_depth"),
        "dips": waves(3, DIP_TOKENS, GEMMA4 + "steady_dip_fault"),
        "fuzz": fuzz("shuffle_depth", NUM_PROMPTS),
        "fuzz_fault": fuzz(shift, 3, max_tokens=FAULT_TOKENS),
        "trimmed": {
            "sampling": {"max_tokens": TRIM_TOKENS},
            "speculative_config": threshold,
            "worker_setup": DEPTH + "log_depths",
        },
        "shifted": {
            "sampling": {"max_tokens": FAULT_TOKENS},
            "speculative_config": threshold,
            "worker_setup": SPIES + "shift_capacities",
            "worker_probe": SPIES + "record",
        },
    }


def _spec(target: str, arm: dict) -> EngineSpec:
    sampling = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    engine = {"skip_tokenizer_init": True, "max_model_len": 128}
    common = {
        "model": target,
        "prompts": _prompts(),
        "process_setup": GEMMA4 + "target_class",
        "worker_probe": GEMMA4 + "log_and_classes",
    }
    merged = {
        "sampling": sampling | arm.get("sampling", {}),
        "engine": engine | arm.get("engine", {}),
    }
    return EngineSpec(**(common | arm | merged))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, EngineResult]:
    """Every engine of this file, in one subprocess."""
    target, draft = write_gemma4_pair(tmp_path_factory.mktemp("gemma4"))
    arms = _arms(draft)
    specs = [_spec(target, arm) for arm in arms.values()]
    results = run_engines(specs, env=ENVIRONMENT, timeout_s=TIMEOUT_S)
    return dict(zip(arms, results, strict=True))


def _log(run: EngineResult) -> list[dict]:
    return run.probes[0]["log"]


def _is_greedy(run: EngineResult, plain: EngineResult, period: int = 1000) -> bool:
    """Whether every output is the beginning of the one without speculation.

    Args:
        run: Its request i has the prompt of the plain run's request i % period.
        plain: The run without speculation.
        period: Number of prompts in a wave, where they are served in waves.
    """
    return all(
        tokens == plain.tokens[i % period][0][: len(tokens)]
        for i, [tokens] in enumerate(run.tokens)
    )


def test_the_greedy_token_leads_by_more_than_rounding(runs):
    run = runs["plain"]
    pairs = [sorted(at.values()) for [per_token] in run.logprobs for at in per_token]
    assert min(best - next_best for next_best, best in pairs) > LEAST_LEAD
    outputs = [tokens for [tokens] in run.tokens]
    assert len({tuple(tokens[-8:]) for tokens in outputs}) == NUM_PROMPTS
    assert all(len(set(tokens)) > 8 for tokens in outputs), "premise: no short cycle"


@pytest.mark.parametrize("arm", ["pin", "dips", "fuzz", "fuzz_fault", "trimmed"])
def test_a_gemma4_draft_with_both_heads_serves(runs, arm):
    probe = runs[arm].probes[0]
    assert probe["draft"] == ["Gemma4DSparkForCausalLM", "Gemma4DSparkModel"]
    assert probe["heads"] == {"confidence_head": True, "markov_head": True}
    assert "Gemma4ForCausalLM" in probe["target"]
    assert probe["speculator"] == "DepthDSparkSpeculator"
    assert probe["manager"] == "VarlenCapacityManager"
    assert probe["head_sizes"] == [32, 64] and probe["windows"] == [None, 16]


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
        assert {width for _, _, width in drafted} == {depth}
        rows = [record["draft_rows"] for record in steps]
        assert rows == [[n * depth] for _, n, _ in drafted]

    wave = slice(PIN_LENGTH * depth, PIN_LENGTH * (depth + 1))
    for [tokens], [expected] in zip(run.tokens[wave], plain.tokens, strict=False):
        assert tokens == expected[:PIN_TOKENS]


def _first_drafts(log: list[dict], depth: int, row: int) -> dict[int, int]:
    """Map tokens so far to the first draft that one row of a pinned run got there."""
    return {
        length: drafts[0]
        for record in log
        for request, length, drafts in record["drafts"]
        if record["reported"] == len(drafts) == depth
        and int(request.split("-")[0]) % PIN_LENGTH == row
    }


@pytest.mark.parametrize("depth", range(1, K))
def test_first_drafts_hardly_depend_on_the_depth_in_any_row(runs, depth):
    # The last token decides most of a draft; one of another row gives other drafts.
    log = _log(runs["pin"])
    for row in range(PIN_LENGTH):
        shallow, full = (_first_drafts(log, d, row) for d in (depth, K))
        common = shallow.keys() & full.keys()
        assert len(common) >= 5, "premise: both depths drafted at the same places"
        equal = sum(shallow[length] == full[length] for length in common)
        assert equal > 0.75 * len(common)


def test_some_drafts_are_accepted_and_some_are_rejected(runs):
    for arm in ("pin", "fuzz", "trimmed"):
        metrics = runs[arm].metrics
        accepted = metrics[SPEC + "accepted_tokens_per_pos"]
        assert all(count > 0 for count in accepted[:2])
        assert sum(accepted) < 0.8 * metrics[SPEC + "draft_tokens"]


def test_a_random_depth_every_step_gives_the_greedy_output(runs):
    run = runs["fuzz"]
    log = _log(run)
    assert len(log) >= FUZZ_STEPS
    assert {record["depth"] for record in log} == set(range(K + 1))
    changes = sum(a["depth"] != b["depth"] for a, b in zip(log, log[1:], strict=False))
    assert changes > FUZZ_STEPS / 2
    mixed = [r for r in log if r["prefilling"] and any(r["scheduled"])]
    assert len(mixed) > 5, "premise: prefills and drafts share steps"
    assert any(r["budget"] is not None for r in log), "premise: some steps trim"
    assert run.metrics["vllm:num_preemptions"] > 0
    assert _is_greedy(run, runs["plain"])


def test_the_fuzz_notices_a_shifted_row(runs):
    assert not _is_greedy(runs["fuzz_fault"], runs["plain"])


def test_trimming_by_the_confidence_head_gives_the_greedy_output(runs):
    run = runs["trimmed"]
    trimmed = [record for record in _log(run) if record["budget"] is not None]
    assert sum(record["budget"] > 0 for record in trimmed) >= 10
    budgets = {record["budget"] for record in trimmed}
    assert len(budgets) > 3, "premise: budgets follow the confidences"
    assert all(r["budget"] < sum(r["scheduled"]) for r in trimmed)
    widths = {width for _, _, width in graphs(trimmed, TARGET_MANAGER)}
    assert widths == {None}, "premise: trimmed steps ran varlen graphs"
    assert _is_greedy(run, runs["plain"])


def test_a_capacity_shifted_by_one_changes_the_output(runs):
    steps = runs["shifted"].probes[0]["steps"]
    assert any(step["budget"] is not None for step in steps), "premise"
    assert not _is_greedy(runs["shifted"], runs["plain"])


def _drafts_of_wave(runs, wave: int) -> dict[tuple[int, int], list[int]]:
    """Map (prompt, tokens so far) to the K drafts made there, after any dip."""
    log = [r for r in _log(runs["dips"]) if r["wave"] == wave]
    # Not the last steps, whose drafts nobody can use.
    dips = [i for i, r in enumerate(log) if r["depth"] == 0 and not r["skips"]]
    assert bool(dips) == (wave > 0)
    assert len(dips) >= 5 or wave == 0, "premise: tokens were decoded without drafts"
    return {
        (int(request.split("-")[0]) % PIN_LENGTH, length): drafts
        for record in log[max(dips, default=-1) + 1 :]
        for request, length, drafts in record["drafts"]
        if len(drafts) == K
    }


def test_depth_zero_keeps_the_context_so_that_drafts_do_not_worsen(runs):
    steady, after = _drafts_of_wave(runs, 0), _drafts_of_wave(runs, 1)
    common = sorted(steady.keys() & after.keys())
    assert len(common) >= 3, "premise: both waves drafted at the same places"
    assert [after[place] for place in common] == [steady[place] for place in common]
    assert _is_greedy(runs["dips"], runs["plain"], PIN_LENGTH)


def test_drafts_worsen_when_depth_zero_stores_no_context(runs):
    steady, after = _drafts_of_wave(runs, 0), _drafts_of_wave(runs, 2)
    common = steady.keys() & after.keys()
    assert any(after[place] != steady[place] for place in common)
