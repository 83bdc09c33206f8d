# SPDX-License-Identifier: Apache-2.0
"""Physical draft depth in real engines: every depth, every change, no loss."""

import json
from pathlib import Path

import pytest

from tests.helpers.depth_logs import DRAFT_MANAGER, TARGET_MANAGER, graphs, settled
from tests.helpers.engine import EngineResult, EngineSpec, dspark, run_engines
from tests.helpers.engine_depth import PIN_LENGTH

# Two minutes of two idle cores; the first test waits for all engines.
TIMEOUT_S = 1500
pytestmark = [pytest.mark.engine, pytest.mark.timeout(TIMEOUT_S)]

DEPTH = "tests.helpers.engine_depth:"
HELDOUT = Path(__file__).parents[3] / "fixtures" / "tiny-dspark" / "heldout.jsonl"

FLAT_CURVE = [[1, 100.0], [512, 100.0]]
STEEP_CURVE = [[1, 100.0], [6, 80.0], [12, 30.0], [24, 10.0]]
ENVIRONMENT = {
    "VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": "1",
    "VLLM_DSPARK_DYNAMIC_DRAFT_MIN_DEPTH": "0",
}
PIN_TOKENS = 24
DIP_TOKENS = 100
FUZZ_PROMPTS = 24
FUZZ_STEPS = 200
# Three requests of K + 1 = 8 tokens do not fit a step of 21, and three of up to five
# blocks do not fit seven: rows are truncated, left out, chunked and preempted.
FUZZ_ENGINE = {
    "max_num_seqs": 3,
    "max_num_batched_tokens": 21,  # 3 K: 0.33 allows so many draft passes
    "max_model_len": 160,
    "num_gpu_blocks_override": 8,
    "block_size": 32,
}


def _prompts(count: int) -> list[str]:
    lines = HELDOUT.read_text().splitlines()[:count]
    return [json.loads(line)["prompt"] for line in lines]


def _config(draft: str, num_speculative_tokens: int, curve: list) -> dict:
    return dspark(
        draft,
        num_speculative_tokens,
        dspark_sps_curve=curve,
        dspark_draft_depths=list(range(num_speculative_tokens + 1)),
    )


def _arms(tiny_draft: str) -> dict[str, dict]:
    """Return what each engine of this file differs in, by name."""
    pinned, many = _prompts(PIN_LENGTH), _prompts(FUZZ_PROMPTS)
    lengths = [{"max_tokens": 40 + 10 * (i % 6)} for i in range(FUZZ_PROMPTS)]

    def pin(num_speculative_tokens: int) -> dict:
        num_depths = num_speculative_tokens + 1
        return {
            "prompts": pinned * num_depths,
            "waves": [PIN_LENGTH] * num_depths,
            "sampling": {"max_tokens": PIN_TOKENS},
            "engine": {"max_num_seqs": PIN_LENGTH},
            "speculative_config": _config(
                tiny_draft, num_speculative_tokens, FLAT_CURVE
            ),
            "worker_setup": DEPTH + "pin_each_depth",
        }

    def dip(setup: str) -> dict:
        return {
            "prompts": pinned,
            "sampling": {"max_tokens": DIP_TOKENS, "ignore_eos": True},
            "engine": {"max_num_seqs": PIN_LENGTH},
            "speculative_config": _config(tiny_draft, 7, FLAT_CURVE),
            "worker_setup": DEPTH + setup,
        }

    def fuzz(setup: str, count: int) -> dict:
        return {
            "prompts": many[:count],
            "sampling": lengths[:count],
            "arrivals": [5 * i for i in range(count)],
            "engine": FUZZ_ENGINE,
            "speculative_config": _config(tiny_draft, 7, STEEP_CURVE),
            "worker_setup": DEPTH + setup,
        }

    return {
        "plain": {"prompts": many, "sampling": lengths},
        "pin7": pin(7),
        "pin5": pin(5),
        "steady": dip("stay_at_full"),
        "dip": dip("dip_to_zero"),
        "dip_without_context": dip("dip_without_context"),
        "fuzz": fuzz("shuffle_depth", FUZZ_PROMPTS),
        "fuzz_fault": fuzz("shuffle_depth_and_shift_logits", 4),
    }


def _spec(target: str, name: str, arm: dict) -> EngineSpec:
    return EngineSpec(
        model=target,
        worker_probe=None if name == "plain" else DEPTH + "depth_log",
        **arm,
    )


@pytest.fixture(scope="module")
def runs(tiny_target, tiny_draft) -> dict[str, EngineResult]:
    """Every engine of this file, in one subprocess."""
    arms = _arms(tiny_draft)
    specs = [_spec(tiny_target, name, arm) for name, arm in arms.items()]
    results = run_engines(specs, env=ENVIRONMENT, timeout_s=TIMEOUT_S)
    return dict(zip(arms, results, strict=True))


@pytest.mark.parametrize(
    ("num_speculative_tokens", "depth"),
    [(7, depth) for depth in range(8)] + [(5, depth) for depth in range(6)],
)
def test_every_pinned_depth_gives_the_greedy_output(
    runs, num_speculative_tokens, depth
):
    run, plain = runs[f"pin{num_speculative_tokens}"], runs["plain"]
    steps = settled(run.probes[0], depth)
    assert len(steps) >= 3, "premise: the pin was served"
    assert {record["depth"] for record in steps} == {depth}
    widths = {width for _, _, width in graphs(steps, TARGET_MANAGER)}
    assert widths == {depth + 1}, "premise: the target ran graphs of this depth"
    if depth > 0:
        drafted = graphs(steps, DRAFT_MANAGER)
        assert len(drafted) == len(steps), "premise: each step replays a draft graph"
        assert {width for _, _, width in drafted} == {depth}

    wave = slice(PIN_LENGTH * depth, PIN_LENGTH * (depth + 1))
    for tokens, expected in zip(run.tokens[wave], plain.tokens, strict=False):
        assert tokens[0] == expected[0][:PIN_TOKENS]


def test_pinned_runs_verify_exactly_the_drafts_of_their_depth(runs):
    for record in settled(runs["pin7"].probes[0], 3):
        assert set(record["scheduled"]) <= {0, 1, 2, 3}, "cut at max_tokens only"
        assert all(len(drafts) == 3 for _, _, drafts in record["drafts"])


def test_a_random_depth_every_step_gives_the_greedy_output(runs):
    run = runs["fuzz"]
    log = run.probes[0]
    assert len(log) >= FUZZ_STEPS
    assert {record["depth"] for record in log} == set(range(8))
    changes = sum(a["depth"] != b["depth"] for a, b in zip(log, log[1:], strict=False))
    assert changes > FUZZ_STEPS / 2
    mixed = [r for r in log if r["prefilling"] and any(r["scheduled"])]
    assert len(mixed) > 10, "premise: prefills and drafts share steps"
    widths = [set(r["scheduled"]) for r in log if not r["prefilling"]]
    assert any(len(w) > 1 for w in widths), "premise: drafts of two depths in one step"
    assert any(r["budget"] is not None for r in log), "premise: some steps trim"
    assert run.metrics["vllm:num_preemptions"] > 0
    assert run.tokens == runs["plain"].tokens


def test_the_depth_comes_from_the_scheduler_never_from_the_worker_itself(runs):
    # Every rank gets the same scheduler output, so all of them draft alike.
    log = runs["fuzz"].probes[0]
    told = [record["reported"] for record in log[:-1]]
    assert [record["told"] for record in log[1:]] == told
    assert all(r["depth"] == (0 if r["skips"] else r["told"]) for r in log)
    own = [record["reported"] for record in log[1:]]
    assert own != told, "premise: the worker's own wish is another one by then"
    for record in log:
        assert {len(drafts) for _, _, drafts in record["drafts"]} == {record["depth"]}


def test_the_fuzz_notices_a_shifted_row(runs):
    assert runs["fuzz_fault"].tokens != runs["plain"].tokens[:4]


def _drafts_by_position(log: list[dict], first_step: int) -> dict:
    """Map (request, tokens so far) to the K drafts made there."""
    return {
        (request.split("-")[0], length): drafts
        for record in log[first_step:]
        for request, length, drafts in record["drafts"]
        if len(drafts) == 7
    }


def _common_drafts(runs, arm: str) -> list[tuple[list[int], list[int]]]:
    """Pair the drafts of ``arm`` after its dip with those of the steady run."""
    log = runs[arm].probes[0]
    last_dip = max(i for i, record in enumerate(log) if record["depth"] == 0)
    steady = _drafts_by_position(runs["steady"].probes[0], 0)
    after = _drafts_by_position(log, last_dip + 1)
    return [(after[key], steady[key]) for key in sorted(after.keys() & steady.keys())]


def test_depth_zero_keeps_the_context_so_that_drafts_do_not_worsen(runs):
    dips = sum(record["depth"] == 0 for record in runs["dip"].probes[0])
    assert dips >= 5, "premise: several tokens were decoded without drafts"
    pairs = _common_drafts(runs, "dip")
    assert len(pairs) >= 3, "premise: both runs drafted at the same positions"
    # Equal drafts at equal positions of equal outputs: equal acceptance.
    assert all(after == steady for after, steady in pairs)
    assert runs["dip"].tokens == runs["steady"].tokens


def test_drafts_worsen_when_depth_zero_stores_no_context(runs):
    assert runs["dip_without_context"].tokens == runs["steady"].tokens
    pairs = _common_drafts(runs, "dip_without_context")
    assert any(after != steady for after, steady in pairs)
