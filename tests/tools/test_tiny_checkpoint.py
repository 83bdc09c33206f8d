# SPDX-License-Identifier: Apache-2.0
"""The bundled checkpoint: its files, its figures, and its card agree."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import train_tiny_dspark  # noqa: E402
from tiny_dspark import corpus, grammar  # noqa: E402

BUNDLE = ROOT / "tests" / "fixtures" / "tiny-dspark"
CARD = (BUNDLE / "MODEL_CARD.md").read_text()
INFO = json.loads((BUNDLE / "info.json").read_text())
CONFIGS = {
    part: json.loads((BUNDLE / part / "config.json").read_text())
    for part in ("target", "draft")
}
PER_KIND = 84
MAX_BYTES = 20_000_000
COLUMNS = ("tokens_per_step", "confidence_auroc", "confidence_ece")


def table(heading: str) -> dict[str, list[str]]:
    """Return the rows of the first table under ``heading``, by their first cell."""
    section = CARD.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    block = re.search(r"(?:^\|.*\n?)+", section, re.MULTILINE)
    assert block, f"no table under {heading}"
    cells = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in block[0].splitlines()[2:]
    ]
    return {row[0]: row[1:] for row in cells}


@pytest.fixture(scope="module")
def heldout() -> list[dict[str, str]]:
    lines = (BUNDLE / "heldout.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# --- files ----------------------------------------------------------------------


def test_the_card_lists_every_file_with_its_size_and_hash():
    found = {
        str(path.relative_to(BUNDLE)): [
            f"{path.stat().st_size:,}",
            hashlib.sha256(path.read_bytes()).hexdigest(),
        ]
        for path in BUNDLE.rglob("*")
        if path.is_file() and path.name != "MODEL_CARD.md"
    }
    assert len(found) == 9
    assert table("Files") == found


def test_all_files_together_stay_within_20_megabytes():
    sizes = [path.stat().st_size for path in BUNDLE.rglob("*") if path.is_file()]
    assert sum(sizes) <= MAX_BYTES
    assert (BUNDLE / "heldout.jsonl").stat().st_size <= 200_000


def test_both_configs_are_what_vllm_loads():
    target, draft = CONFIGS["target"], CONFIGS["draft"]
    assert target["architectures"] == ["Qwen3ForCausalLM"]
    assert target["num_hidden_layers"] == draft["num_target_layers"] == 4
    expected = {
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": 2,
        "block_size": 7,
        "target_layer_ids": [0, 1, 2, 3],
        "mask_token_id": corpus.MASK,
        "dflash_config": {
            "mask_token_id": corpus.MASK,
            "target_layer_ids": [0, 1, 2, 3],
        },
        "markov_rank": 64,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    assert {key: draft[key] for key in expected} == expected
    shared = target.keys() & draft.keys() - {"architectures", "num_hidden_layers"}
    assert {key: target[key] for key in shared} == {key: draft[key] for key in shared}


def test_weights_are_float32_of_the_sizes_on_the_card():
    models = table("Models")
    for part in CONFIGS:
        weights = load_file(BUNDLE / part / "model.safetensors")
        assert {value.dtype for value in weights.values()} == {np.dtype("float32")}
        assert all(np.isfinite(value).all() for value in weights.values())
        count = sum(value.size for value in weights.values())
        assert models["parameters"][list(CONFIGS).index(part)] == f"{count:,}"


def test_the_draft_key_norms_are_all_ones():
    weights = load_file(BUNDLE / "draft" / "model.safetensors")
    norms = [f"layers.{i}.self_attn.{{}}_norm.weight" for i in range(2)]
    for name in norms:
        assert (weights[name.format("k")] == 1).all()
        assert (weights[name.format("q")] != 1).any(), "premise: norms were trained"


# --- data -----------------------------------------------------------------------


def test_heldout_requests_are_those_of_the_seed_on_the_card(heldout):
    documents = grammar.make_heldout(PER_KIND, f"{INFO['seed']}/heldout")
    assert heldout == [asdict(doc) | {"prompt": doc.prompt} for doc in documents]
    assert f"seed `{INFO['seed']}`" in CARD


def test_heldout_has_84_of_each_kind_and_they_fit_256_tokens(heldout, tokenizer):
    kinds = [row["kind"] for row in heldout]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == dict.fromkeys(
        grammar.KINDS, PER_KIND
    )
    texts = [f"{row['prompt']} {row['answer']}" for row in heldout]
    assert max(map(len, tokenizer(texts)["input_ids"])) < corpus.MAX_LENGTH


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(BUNDLE / "target"))


def test_the_tokenizer_loads_and_reads_back(heldout, tokenizer):
    assert len(tokenizer) == CONFIGS["target"]["vocab_size"]
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert [*special, tokenizer.mask_token_id] == [0, 1, 2, corpus.MASK]
    ids = tokenizer(heldout[0]["prompt"])["input_ids"]
    assert ids[0] == corpus.BOS
    assert tokenizer.decode(ids, skip_special_tokens=True) == heldout[0]["prompt"]


# --- figures --------------------------------------------------------------------


def test_acceptance_is_4_to_5_overall_and_spreads_by_kind():
    figures = INFO["eval"]
    lengths = [figures[kind]["tokens_per_step"] for kind in grammar.KINDS]
    assert 4.0 <= figures["all"]["tokens_per_step"] <= 5.0
    assert min(lengths) == pytest.approx(2.5, abs=0.2)
    assert max(lengths) == pytest.approx(6.4, abs=0.2)


def test_problems_are_solved_and_every_answer_ends():
    figures = INFO["eval"]
    for kind in grammar.PROBLEM_KINDS:
        assert figures[kind]["accuracy"] >= 0.8
    assert [figures[kind]["unfinished"] for kind in grammar.KINDS] == [0] * 5


def test_open_text_is_varied_and_does_not_repeat_itself():
    for kind in set(grammar.KINDS) - set(grammar.PROBLEM_KINDS):
        figures = INFO["eval"][kind]
        assert figures["answers_with_a_repeated_sentence"] == 0
        assert figures["distinct_answers"] >= 0.7


def test_confidence_ranks_drafts_in_every_kind():
    assert all(row["confidence_auroc"] >= 0.8 for row in INFO["eval"].values())


def test_the_card_repeats_the_figures_of_info_json():
    figures, rates = table("Held-out figures"), table("Acceptance by position")
    assert set(figures) == set(rates) == {*grammar.KINDS, "all"}
    for kind, row in INFO["eval"].items():
        accuracy = row.get("accuracy", row.get("problem_accuracy", "-"))
        numbers = [row["requests"], row["verify_steps"], *(row[c] for c in COLUMNS)]
        assert figures[kind] == [str(n) for n in (*numbers, accuracy)]
        assert rates[kind] == [str(rate) for rate in row["accept_rate_by_position"]]


def test_the_gpu_preset_is_what_trained_the_bundle():
    preset = train_tiny_dspark.PRESETS["gpu"]
    for stage in ("target", "draft"):
        assert preset[f"{stage}_steps"] == INFO[stage]["steps"]
        assert preset[f"{stage}_tokens"] == INFO[stage]["batch_tokens"]
    written = re.search(r"([\d,]+) prompts answered by the target itself", CARD)
    assert written
    assert f"{preset['written']:,}" == written[1]
