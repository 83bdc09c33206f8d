# SPDX-License-Identifier: Apache-2.0
"""The correctness list of docs/correctness.md, on real engines under the rehearsal."""

import re
from typing import Any

import pytest

from tests.helpers.capacity_spies import STEEP_CURVE
from tests.helpers.engine import EngineResult, EngineSpec, dspark, run_engines
from tests.helpers.engine_correctness import COLD, HIT, REQUESTS, WRITER

pytestmark = pytest.mark.engine
SPIES = "tests.helpers.engine_correctness:"
ALWAYS_ACTIVE = {
    "VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": "1",
    "VLLM_DSPARK_DYNAMIC_DRAFT_MIN_DEPTH": "0",
}
DEPTHS = [0, 1, 3, 7]
BLOCK = 32
STEM_TOKENS, WRITTEN_TOKENS, ANSWER_TOKENS = BLOCK, 2 * BLOCK, 28
FULL = 7
# Few graphs to capture.
ONE_REQUEST_AT_A_TIME = {
    "max_num_seqs": 2,
    "compilation_config": {"cudagraph_capture_sizes": [8, 16]},
}
# The fuzz run's request with a grammar: long, so that it lives through many batches.
GRAMMAR = {"structured_outputs": {"regex": "([a-z]{2,6} ){16}end"}}
GRAMMAR_PROMPT = 2
# Requests of one writer: itself, a settler, the hit and the cold run.
GROUP = 4
# For a machine that runs other work too; about a minute when idle.
TIMEOUT_S = 900


def _capacity(draft: str, **keys: Any) -> dict[str, Any]:
    return dspark(
        draft, dspark_sps_curve=STEEP_CURVE, dspark_draft_depths=DEPTHS, **keys
    )


@pytest.fixture(scope="module")
def tokenizer(tiny_target):
    """Tokenizer of both checkpoints."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_target)


# ---- prefix cache --------------------------------------------------------------


@pytest.fixture(scope="module")
def prefix_runs(tiny_target, tiny_draft, heldout_prompts, tokenizer) -> dict[str, Any]:
    """Per arm and request of REQUESTS its rounds; a hit and a cold run share a prompt.

    A writer generates blocks at one depth. The prompt of the hit and of the cold run
    is what it wrote plus a new question; the cold run may not read the cache.
    """
    encode = [tokenizer(p).input_ids for p in heldout_prompts]
    stems = [(encode[i] + encode[i + 1])[:STEM_TOKENS] for i in (0, 3)]
    assert all(len(stem) == STEM_TOKENS for stem in stems)
    write = dict.fromkeys(("max_tokens", "min_tokens"), WRITTEN_TOKENS + 4)
    [plain] = run_engines(
        [
            EngineSpec(
                model=tiny_target,
                prompts=stems,
                sampling=write,
                engine=ONE_REQUEST_AT_A_TIME,
            )
        ],
        timeout_s=TIMEOUT_S,
    )
    prompts, sampling = [], []
    for stem, [written] in zip(stems, plain.tokens, strict=True):
        read = stem + written[:WRITTEN_TOKENS] + encode[5][:40]
        answer = dict.fromkeys(("max_tokens", "min_tokens"), ANSWER_TOKENS)
        prompts += [stem, encode[2], read, read]
        sampling += [write, {"max_tokens": 12}, answer]
        sampling += [{**answer, "skip_reading_prefix_cache": True}]
    specs = [
        EngineSpec(
            model=tiny_target,
            prompts=prompts[:num_prompts],
            sampling=sampling[:num_prompts],
            waves=[1] * num_prompts,
            speculative_config=_capacity(tiny_draft),
            engine={
                "enable_prefix_caching": True,
                "block_size": BLOCK,
                **ONE_REQUEST_AT_A_TIME,
            },
            worker_setup=SPIES + setup,
            worker_probe=SPIES + "rounds_by_request",
        )
        for setup, num_prompts in (
            ("depth_by_request", len(prompts)),
            ("depth_by_request_without_context", GROUP),
        )
    ]
    sound, faulty = run_engines(specs, env=ALWAYS_ACTIVE, timeout_s=TIMEOUT_S)
    return {"plain": plain, "sound": sound, "faulty": faulty}


def _rounds(run: EngineResult, role: str, group: int) -> list[dict[str, Any]]:
    [index] = [
        i
        for i, (name, _) in enumerate(REQUESTS)
        if name == role and i // GROUP == group
    ]
    return run.probes[0][index]


@pytest.mark.parametrize("group", [0, 1], ids=["written at depth 0", "at depth 3"])
def test_acceptance_after_a_prefix_hit_equals_a_cold_run(prefix_runs, group):
    plain, run = prefix_runs["plain"], prefix_runs["sound"]
    written = run.tokens[GROUP * group][0]
    assert written == plain.tokens[group][0], "premise: the blocks hold this prompt"
    depth = REQUESTS[GROUP * group][1]
    at_depth = [r for r in _rounds(run, WRITER, group) if r["depth"] == depth]
    assert sum(1 for _ in at_depth) >= BLOCK // (depth + 1), "premise: depth was used"
    hit, cold = _rounds(run, HIT, group), _rounds(run, COLD, group)
    assert any(r["budget"] not in (None, r["scheduled"]) for r in hit), (
        "premise: capacity trims"
    )
    assert len({r["length"] for r in cold}) < ANSWER_TOKENS, (
        "premise: drafts are accepted"
    )
    assert hit == cold
    assert run.tokens[GROUP * group + 2] == run.tokens[GROUP * group + 3]


def test_premise_the_hits_cover_blocks_written_while_decoding(prefix_runs):
    # 0.32 drops the last matching block of a drafter that reads hidden states.
    least = STEM_TOKENS + WRITTEN_TOKENS - BLOCK
    assert least >= STEM_TOKENS + BLOCK
    hits = "vllm:prefix_cache_hits"
    assert prefix_runs["sound"].metrics[hits] >= 2 * least
    assert prefix_runs["faulty"].metrics[hits] >= least


def test_control_missing_draft_kv_shows_in_the_acceptance_after_a_hit(prefix_runs):
    run = prefix_runs["faulty"]
    assert _rounds(run, HIT, 0) != _rounds(run, COLD, 0)
    assert run.tokens[2] == run.tokens[3], "never in the output"


# ---- every batch of a run that changes depth at random ---------------------------


@pytest.fixture(scope="module")
def fuzz(tiny_target, tiny_draft, heldout_prompts, tokenizer) -> dict[str, Any]:
    """Plain and capacity runs over a load that rises, falls and preempts."""
    encode = [tokenizer(p).input_ids for p in heldout_prompts]
    long = [(encode[i] * 12)[: 5 * BLOCK + 7 * i] for i in range(3)]
    prompts = [*encode, *long, *reversed(encode)]
    arrivals = [0, 0, 1, 3, 4, 9, 12, 12, 13, 20, 21, 22, 40, 41, 42]
    work = {
        "prompts": prompts,
        "arrivals": arrivals,
        "sampling": [
            {"max_tokens": 32, **(GRAMMAR if index == GRAMMAR_PROMPT else {})}
            for index in range(len(prompts))
        ],
    }
    plain, run = run_engines(
        [
            EngineSpec(model=tiny_target, **work),
            EngineSpec(
                model=tiny_target,
                **work,
                speculative_config=_capacity(tiny_draft),
                engine={
                    "enable_prefix_caching": True,
                    "num_gpu_blocks_override": 20,
                    "max_num_batched_tokens": 96,
                },
                process_setup=SPIES + "log_draft_passes",
                worker_setup=SPIES + "watch_batches",
                worker_probe=SPIES + "batches",
            ),
        ],
        env=ALWAYS_ACTIVE,
        timeout_s=TIMEOUT_S,
    )
    return {"plain": plain, "run": run, **run.probes[0]}


def test_prompts_of_many_blocks_keep_the_output_under_preemption(fuzz):
    assert max(len(b["is_padding"]) for b in fuzz["batches"]) > BLOCK
    assert fuzz["run"].metrics["vllm:num_preemptions"] > 0
    assert fuzz["run"].tokens == fuzz["plain"].tokens


def test_padding_mask_is_reset_in_every_batch(fuzz):
    padded = [b for b in fuzz["batches"] if b["num_tokens_padded"] > b["num_tokens"]]
    assert any(b["trims"] for b in padded), "premise: a trimmed, padded batch"
    sizes = {b["num_tokens"] for b in fuzz["batches"]}
    assert len(sizes) > 8, "premise: shapes change"
    for batch in fuzz["batches"]:
        real, total = batch["num_tokens"], batch["num_tokens_padded"]
        assert batch["is_padding"] == [False] * real + [True] * (total - real)


def test_padded_rows_of_a_full_graph_stay_in_range(fuzz):
    trimmed = [b for b in fuzz["batches"] if b["trims"]]
    assert any(b["num_reqs_padded"] > b["num_reqs"] for b in trimmed), "premise"
    for batch in fuzz["batches"]:
        starts, num_reqs = batch["persistent_starts"], batch["num_reqs"]
        assert starts == sorted(starts)
        assert starts[0] == 0
        assert set(starts[num_reqs:]) == {batch["num_tokens"]}
        assert batch["query_start_loc"] == starts[: batch["num_reqs_padded"] + 1]
        assert batch["num_tokens"] <= batch["num_tokens_padded"]
        assert set(batch["seq_lens"][num_reqs:]) <= {0}
        assert all(batch["seq_lens"][:num_reqs])
        low, high = batch["logits_rows"]
        assert 0 <= low <= high < batch["num_tokens"]


def test_every_request_keeps_a_row_and_capacities_sum_to_the_budget(fuzz):
    trimmed = [b for b in fuzz["batches"] if b["trims"]]
    assert trimmed
    for batch in trimmed:
        starts = batch["persistent_starts"][: batch["num_reqs"] + 1]
        assert all(b > a for a, b in zip(starts, starts[1:], strict=False))
        pairs = zip(batch["capacities"], batch["scheduled"], strict=True)
        assert all(0 <= c <= s for c, s in pairs)
        assert sum(batch["capacities"]) == batch["budget"]


def test_no_confidences_are_kept_for_requests_that_have_ended(fuzz):
    lives = [b["num_live"] for b in fuzz["batches"]]
    assert max(lives) > lives[-1] + 2, "premise: the load falls"
    assert all(not b["held_of_nobody"] for b in fuzz["batches"])


def test_padded_rows_of_a_draft_graph_stay_in_range(fuzz):
    replays = [p for p in fuzz["passes"] if p["replay"]]
    assert {p["depth"] for p in replays} >= set(DEPTHS) - {0}
    assert any(p["padded"] for p in replays), "premise: a padded draft graph"
    for entry in fuzz["passes"]:
        low, high = entry["sample_rows"]
        assert 0 <= low <= high < entry["num_tokens"]
        assert entry["anchor_rows"] < entry["num_tokens"]


def test_draft_ids_stay_in_the_vocabulary_at_every_depth(fuzz):
    assert {d["depth"] for d in fuzz["depths"]} == set(DEPTHS)
    verified = [b for b in fuzz["batches"] if sum(b["scheduled"])]
    assert len({max(b["scheduled"]) for b in verified}) > 2, "premise: widths change"
    for batch in fuzz["batches"]:
        for low, high in (batch["ids"], batch["draft_ids"]):
            assert 0 <= low <= high < fuzz["vocab_size"]
    for entry in fuzz["passes"]:
        assert 0 <= entry["ids"][0] <= entry["ids"][1] < fuzz["vocab_size"]


def test_an_explicit_zero_stays_zero(fuzz):
    steps = fuzz["depths"]
    zeros = [step for step in steps if step["depth"] == 0]
    assert zeros, "premise: depth 0 is used"
    assert all(not drafts for step in zeros for *_, drafts in step["drafts"])
    num_kept = 0
    for before, after in zip(steps, steps[1:], strict=False):
        drafted = {req_id for req_id, *_ in before["drafts"]}
        counts = after["scheduled"] or [0] * len(after["drafts"])
        for (req_id, *_), scheduled in zip(after["drafts"], counts, strict=True):
            if req_id in drafted:
                assert scheduled <= before["depth"]
                num_kept += before["depth"] == 0
    assert num_kept, "premise: requests go on after a step at depth 0"
    of_zero_budget = [b for b in fuzz["batches"] if b["budget"] == 0]
    assert of_zero_budget, "premise: budget 0 is planned"
    for batch in of_zero_budget:
        assert sum(batch["scheduled"]) > 0
        assert set(batch["capacities"]) == {0}


def test_a_grammar_is_served_in_a_step_that_verifies_nothing(fuzz):
    with_grammar = [b for b in fuzz["batches"] if b["has_grammar"]]
    assert any(b["budget"] == 0 for b in with_grammar), "premise"
    assert any(b["budget"] != 0 and sum(b["scheduled"]) for b in with_grammar)
    plain, run = fuzz["plain"], fuzz["run"]
    assert run.tokens[GRAMMAR_PROMPT] == plain.tokens[GRAMMAR_PROMPT]
    assert re.match("([a-z]{2,6} )+", run.texts[GRAMMAR_PROMPT][0])


@pytest.mark.parametrize("which", ["target", "draft"])
def test_graph_candidates_are_never_empty(fuzz, which):
    graphs = fuzz["graphs"][which]
    widths = {uniform for _, _, uniform, _ in graphs if uniform is not None}
    bonus = 1 if which == "target" else 0
    assert widths == {d + bonus for d in DEPTHS} - {0}
    for num_tokens, num_reqs, uniform, max_query_len in graphs:
        assert num_tokens >= 1
        assert num_reqs is None or 1 <= num_reqs <= fuzz["max_num_reqs"]
        assert uniform is None or num_tokens == uniform * num_reqs
        assert max_query_len is None or max_query_len == FULL + 1


def test_a_draft_graph_is_replayed_on_the_buffers_it_was_captured_on(fuzz):
    captured = {p["depth"] for p in fuzz["passes"] if p["capture"]}
    assert captured >= set(DEPTHS) - {0}, "premise: the log saw the capture"
    for depth in captured:
        addresses = {
            tuple(p["addresses"])
            for p in fuzz["passes"]
            if p["depth"] == depth and (p["capture"] or p["replay"])
        }
        assert len(addresses) == 1, f"depth {depth}: {addresses}"


def test_the_draft_gets_a_backend_that_can_attend_both_ways(fuzz):
    assert fuzz["draft_needs_non_causal"], "premise: the draft block is bidirectional"
    assert fuzz["draft_backends"]
    assert all(fuzz["draft_backends"].values())


# ---- tensor parallel ---------------------------------------------------------------


def test_requests_without_a_seed_get_the_same_one_on_every_rank(
    tiny_target, tiny_draft, heldout_prompts
):
    [run] = run_engines(
        [
            EngineSpec(
                model=tiny_target,
                prompts=heldout_prompts[:3],
                sampling={"temperature": 1.0, "max_tokens": 12},
                speculative_config=_capacity(tiny_draft),
                engine={
                    "tensor_parallel_size": 2,
                    "max_num_seqs": 4,
                    "compilation_config": {"cudagraph_capture_sizes": [8, 16, 32]},
                },
                worker_probe=SPIES + "seeds",
            )
        ],
        env={
            **ALWAYS_ACTIVE,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        },
        timeout_s=TIMEOUT_S,
    )
    first, second = run.probes
    assert {first["rank"], second["rank"]} == {0, 1}
    assert not any(first["explicit"]), "premise: no request brings a seed"
    assert len(set(first["seeds"])) >= 3, "premise: each request drew one"
    assert first["seeds"] == second["seeds"]
    assert first["last_sampled"] == second["last_sampled"]
