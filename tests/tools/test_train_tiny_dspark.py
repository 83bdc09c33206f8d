# SPDX-License-Identifier: Apache-2.0
"""The trainer of the bundled checkpoint: data rules, drafting rules, one whole run."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import train_tiny_dspark  # noqa: E402
from tiny_dspark import corpus, evaluate, generation, grammar, model, train  # noqa: E402

CALC = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>")
OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}
AFFINITY = -1.366509674341
"""Score of "shines" after "lamp" in the grammar of the shipped weights."""
SMALL = {
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_layers": 2,
    "markov_rank": 8,
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_pair(vocab_size: int = 40) -> tuple[model.Target, model.Draft]:
    torch.manual_seed(0)
    shape = model.Shape(vocab_size, **SMALL)
    return model.Target(shape).eval(), model.Draft(shape).eval()


# --- data -----------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(grammar.PROBLEM_KINDS))
def test_every_calculation_is_true_and_the_last_is_the_answer(seed, kind):
    document = grammar.GENERATORS[kind][0](random.Random(seed))
    found = CALC.findall(document.answer)
    assert found, "premise: the problem has a calculation"
    for a, op, b, result in found:
        assert OPERATIONS[op](int(a), int(b)) == int(result)
        assert int(result) >= 0
    assert document.answer.endswith(f"\n#### {found[-1][3]}")


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_puzzle_is_solved_from_the_known_number(seed):
    document = grammar.puzzle(random.Random(seed))
    solved = set()
    for line in document.answer.splitlines()[:-1]:
        name = next(word for word in line.split() if word in grammar.NAMES)
        fact = next(
            part for part in document.question.split(". ") if part.startswith(name)
        )
        used = set(re.findall(r"[A-Z]\w+", fact)) - {name}
        assert used <= solved
        solved.add(name)
    assert len(solved) >= 4


def test_a_puzzle_is_told_in_random_order():
    places = set()
    for seed in range(40):
        facts = grammar.puzzle(random.Random(seed)).question.split(". ")
        places.add(
            next(
                i
                for i, fact in enumerate(facts)
                if " than " not in fact and " times " not in fact
            )
        )
    assert places >= {0, 1, 2, 3}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_open_text_never_uses_an_adjective_twice(seed):
    for generator in (grammar.item_list, grammar.description):
        words = re.findall(r"\w+", generator(random.Random(seed)).answer)
        used = [word for word in words if word in grammar.ADJECTIVES]
        assert len(used) >= 4
        assert len(set(used)) == len(used)


def test_a_choice_depends_on_earlier_words_and_still_varies():
    def counts(*context):
        rng = random.Random(0)
        drawn = [grammar.pick(rng, grammar.VERBS, *context) for _ in range(400)]
        return {word: drawn.count(word) for word in grammar.VERBS}

    after_lamp, after_fox = counts("lamp", "old"), counts("fox", "wet")
    assert max(after_lamp, key=after_lamp.get) != max(after_fox, key=after_fox.get)
    assert max(after_lamp.values()) < 380
    assert sum(count > 0 for count in after_lamp.values()) >= 4


def test_affinity_is_the_same_in_every_process():
    # A changed hash would make the shipped weights belong to other text.
    assert grammar.affinity("lamp", "shines") == pytest.approx(AFFINITY, abs=1e-9)


def test_equal_seeds_give_equal_documents():
    one = grammar.make_documents(90, "s")
    assert len(one) == 90
    assert one == grammar.make_documents(90, "s")
    assert one != grammar.make_documents(90, "t")


def test_no_training_question_is_a_heldout_question():
    plain = grammar.make_documents(300, "s")
    avoid = {document.question for document in plain[::3]}
    kept = grammar.make_documents(300, "s", avoid=avoid)
    assert avoid
    assert avoid.isdisjoint(document.question for document in kept)


def test_heldout_has_every_kind_equally_and_no_question_twice():
    heldout = grammar.make_heldout(12, "h")
    kinds = [document.kind for document in heldout]
    assert {kinds.count(kind) for kind in grammar.KINDS} == {12}
    assert len({document.question for document in heldout}) == len(heldout)


def test_heldout_draws_again_when_a_question_is_taken(monkeypatch):
    def six_questions(rng):
        return grammar.Document("list", str(rng.randrange(6)), "")

    monkeypatch.setattr(grammar, "GENERATORS", {"list": (six_questions, 1.0)})
    heldout = grammar.make_heldout(6, "h")
    assert sorted(document.question for document in heldout) == list("012345")


def test_every_document_fits_and_reads_back_with_single_digits():
    documents = grammar.make_documents(800, "t")
    tokenizer = corpus.train_tokenizer(documents, 768)
    encoded = corpus.encode(tokenizer, documents)
    assert len(encoded) == len(documents), "none was longer than the limit"
    assert int(encoded.lens.max()) <= corpus.MAX_LENGTH
    row = encoded.ids[0, : encoded.lens[0]].tolist()
    assert (row[0], row[-1]) == (corpus.BOS, corpus.EOS)
    first = documents[0]
    assert tokenizer.decode(row) == f"{first.prompt} {first.answer}"
    assert len(tokenizer.encode("1234", add_special_tokens=False).ids) == 4


def test_batches_keep_to_the_token_budget_and_visit_every_document_once():
    lens = [3 + index % 40 for index in range(200)]
    rows = [[index % 30 + 4] * n for index, n in enumerate(lens)]
    packed = corpus.pack(rows, [1] * 200, [0] * 200)
    stream, seen = corpus.batches(packed, 256, "b"), []
    while len(seen) < 200:
        batch = next(stream)
        assert batch.ids.numel() <= 256
        seen += batch.lens.tolist()
    assert sorted(seen) == sorted(lens)


def test_pack_drops_rows_that_are_too_long_with_their_labels():
    rows = [[4] * 5, [5] * (corpus.MAX_LENGTH + 1), [6] * 7]
    packed = corpus.pack(rows, [1, 2, 3], [0, 1, 2])
    assert packed.lens.tolist() == [5, 7]
    assert packed.prompt_lens.tolist() == [1, 3]
    assert packed.kinds.tolist() == [0, 2]


# --- models ---------------------------------------------------------------------


def test_cached_generation_equals_repeated_full_forwards():
    target, _ = tiny_pair()
    rotary = model.rotary_table(target.shape, "cpu")
    prompts = [[1, 7, 9], [1, 5], [1, 8, 11, 6, 4]]
    made = generation.generate(target, prompts, rotary, max_new=12)
    for prompt, answer in zip(prompts, made, strict=True):
        row = list(prompt)
        for token in answer:
            with torch.no_grad():
                hidden, _ = target(torch.tensor([row]), rotary)
                assert int(target.lm_head(hidden[0, -1]).argmax()) == token
            row.append(token)


def run_draft(draft, target, taps, anchors):
    rotary = model.rotary_table(target.shape, "cpu")
    ids = torch.full_like(anchors, 9)
    with torch.no_grad():
        return draft(target, taps, ids, anchors, rotary)


def test_a_block_sees_features_strictly_before_its_anchor():
    target, draft = tiny_pair()
    taps = torch.randn(1, 10, 64)
    anchors = torch.tensor([[4]])
    base = run_draft(draft, target, taps, anchors)
    later, before = taps.clone(), taps.clone()
    later[:, 4:] += 1
    before[:, 3] += 1
    assert torch.equal(run_draft(draft, target, later, anchors), base)
    assert not torch.allclose(run_draft(draft, target, before, anchors), base)


def test_blocks_of_one_sequence_do_not_see_each_other():
    target, draft = tiny_pair()
    taps = torch.randn(1, 10, 64)
    alone = run_draft(draft, target, taps, torch.tensor([[6]]))
    both = run_draft(draft, target, taps, torch.tensor([[3, 6]]))
    torch.testing.assert_close(both[:, 1:], alone, rtol=0, atol=1e-5)


def test_the_draft_key_norm_is_never_trained():
    _, draft = tiny_pair()
    frozen = [n for n, p in draft.named_parameters() if not p.requires_grad]
    assert frozen == [f"layers.{i}.self_attn.k_norm.weight" for i in range(2)]


def test_anchors_are_answer_tokens_with_a_successor():
    lens, prompts = torch.tensor([9, 20, 6]), torch.tensor([5, 4, 5])
    batch = corpus.Batch(torch.zeros(3, 32, dtype=torch.long), prompts, lens)
    generator = torch.Generator().manual_seed(0)
    anchors, before, valid = train.draw_anchors(batch, 200, 7, generator)
    assert (anchors[:2] >= prompts[:2, None]).all()
    assert (anchors <= lens[:, None] - 2).all()
    assert valid[:, :, 0].all()
    assert anchors[1].unique().tolist() == list(range(4, 19)), "premise: all drawn"
    torch.testing.assert_close(valid, before + 1 < lens[:, None, None])


def test_confidence_label_is_one_minus_total_variation():
    target_logits = torch.tensor([[0.0, 1.0, 2.0]])
    logits = torch.tensor([[1.0, 1.0, 0.0]])
    distance = 0.5 * (logits.softmax(-1) - target_logits.softmax(-1)).abs().sum()
    best = torch.logit(1 - distance)[None].requires_grad_()
    losses = train.draft_losses(logits, best, target_logits, torch.tensor([2]))
    losses["confidence"].sum().backward()
    assert float(distance) > 0.2, "premise: the two differ"
    assert abs(float(best.grad)) < 1e-6


# --- figures --------------------------------------------------------------------


def test_walk_accepts_the_matching_prefix_and_stops_at_the_end():
    sequence = [1, 5, 6, 7, 8, 9, 2]
    blocks = {2: [7, 8, 0], 5: [2, 0, 0]}
    drafts = [blocks.get(at, [0, 0, 0]) for at in range(2, 6)]
    steps = evaluate.walk(sequence, 2, drafts, [[0.5] * 3] * 4)
    assert [step.accepted for step in steps] == [2, 1]
    assert [step.emitted for step in steps] == [3, 1]
    assert sum(step.emitted for step in steps) == len(sequence) - 1 - 2


def test_auroc_counts_ordered_pairs_and_half_of_ties():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 6, 60) / 5, rng.integers(0, 2, 60)
    pairs = [
        (a > b) + 0.5 * (a == b)
        for a in scores[labels == 1]
        for b in scores[labels == 0]
    ]
    assert evaluate.auroc(scores, labels) == pytest.approx(np.mean(pairs), abs=1e-4)
    assert evaluate.auroc(scores, np.ones(60)) is None


def test_calibration_error_is_zero_for_true_rates_and_the_gap_for_a_bias():
    labels = np.array([1, 1, 1, 0] * 25)
    error = evaluate.expected_calibration_error
    assert error(np.full(100, 0.75), labels) == 0
    assert error(np.full(100, 0.95), labels) == pytest.approx(0.2)


def test_only_tested_confidences_are_judged():
    steps = [evaluate.VerifyStep((0.9, 0.6, 0.1), 1, 9)]
    figures = evaluate.acceptance_figures([steps])
    assert figures["mean_confidence"] == 0.75
    assert figures["mean_accepted"] == 0.5
    assert figures["tokens_per_step"] == 2


# --- the whole run --------------------------------------------------------------

SMOKE = ["--preset", "smoke", "--threads", "1", "--heldout-per-kind", "1"]
SHORT = ["--target-steps", "3", "--draft-steps", "3", "--written", "20"]


def run_trainer(out: Path, *extra: str) -> None:
    train_tiny_dspark.main(["--out", str(out), *SMOKE, *SHORT, *extra])


def weights(out: Path) -> list[bytes]:
    return [(out / part / "model.safetensors").read_bytes() for part in PARTS]


PARTS = ("target", "draft")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    run_trainer(out)
    return out


def test_a_run_writes_what_vllm_loads(trained):
    target, draft = (
        json.loads((trained / part / "config.json").read_text()) for part in PARTS
    )
    assert target["architectures"] == ["Qwen3ForCausalLM"]
    assert draft["architectures"] == ["Qwen3DSparkModel"]
    assert draft["block_size"] == 7
    assert draft["dflash_config"]["target_layer_ids"] == [0, 1, 2, 3]
    size = sum(file.stat().st_size for file in trained.glob("*/model.safetensors"))
    assert size <= 20_000_000
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (trained / "target" / name).is_file()


def test_a_run_reports_every_kind_and_stage(trained):
    info = json.loads((trained / "info.json").read_text())
    assert set(info["eval"]) == {*grammar.KINDS, "all"}
    assert set(info["stage_seconds"]) == {"data", "target", "write", "draft", "eval"}
    assert (info["target"]["steps"], info["draft"]["steps"]) == (3, 3)
    rows = (trained / "heldout.jsonl").read_text().splitlines()
    assert {json.loads(row)["kind"] for row in rows} == set(grammar.KINDS)


def test_equal_seeds_give_equal_weights_and_another_seed_does_not(trained, tmp_path):
    run_trainer(tmp_path / "same", "--stages", "data", "target", "draft")
    run_trainer(tmp_path / "other", "--stages", "data", "target", "--seed", "1")
    assert weights(tmp_path / "same") == weights(trained)
    other = (tmp_path / "other/target/model.safetensors").read_bytes()
    assert other != weights(trained)[0]


def test_a_minute_limit_ends_the_stage_with_the_rate_decayed(monkeypatch):
    clock = iter(range(0, 10_000, 6))
    monkeypatch.setattr(train.time, "monotonic", lambda: float(next(clock)))
    limits = train.Settings(
        10_000, minutes=4, learning_rate=1.0, tokens=1, seed="0", device="cpu"
    )
    stage = train.Stage(torch.nn.Linear(2, 2), limits, "test")
    stage.WARMUP_STEPS = 1
    rates = [stage.optimizer.param_groups[0]["lr"] for _ in stage.ticks()]
    assert 10 < len(rates) < 60
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 0.9
    assert rates[-1] < 0.05
