# SPDX-License-Identifier: Apache-2.0
"""Serving features with capacity forced on, under the CPU rehearsal.

Every greedy output must equal that of an engine without speculation.
"""

import json
import re

import pytest

from tests.helpers.capacity_spies import STEEP_CURVE
from tests.helpers.engine import EngineResult, EngineSpec, dspark, run_engines

# Under a heavy load on the machine the engines of one process take minutes.
TIMEOUT_S = 1500
pytestmark = [pytest.mark.engine, pytest.mark.timeout(TIMEOUT_S)]
SPIES = "tests.helpers.capacity_spies:"
K = 7
# From one request on, whatever the costs say.
ACTIVE = {"VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": "1"}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["egg", "apple"]},
        "sold": {"type": "boolean"},
        "left": {"enum": [1, 25, 378]},
    },
    "required": ["kind", "sold", "left"],
    "additionalProperties": False,
}
REGEX = "[0-9]{3} (yes|no)[.]{9}"
# A description: unlike a calculation, it leaves much choice.
PROMPT = "Question: Describe the field, the tower, the street and the bridge.\nAnswer:"
# One request each. Those that sample leave one token to choose from, so that their
# output is the greedy one as well. (vLLM refuses min_p and logit_bias with any
# speculative decoding.)
FEATURES = {
    "greedy": {},
    # These two end early, so that the queue moves while others decode.
    "one_token": {"max_tokens": 1},
    "stop": {"stop": [" the ", "."]},
    "json": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60},
    "regex": {"structured_outputs": {"regex": REGEX}},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "bad_words": {"bad_words": ["."]},
    "penalties": {
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 10.0,
    },
    "one_choice": {"temperature": 1.0, "top_p": 1e-6, "seed": 5},
    "several": {"temperature": 0.9, "top_k": 1, "n": 2, "seed": 6},
}
BITES = ("json", "regex", "bad_words", "penalties", "stop", "one_token")
SAMPLED = {"temperature": 1.5, "max_tokens": 16}
SEEDED = [SAMPLED | {"seed": seed} for seed in range(4)]
ARMS = ("half", "zero", "mask")
# Arms that then run one sampled batch twice.
SAMPLING_ARMS = ("half", "mask")
# Arms of the scarce cache.
SCARCE_ARMS = ("curve", "curve_mask")


def _watched(**spec) -> dict:
    return {
        "worker_setup": SPIES + "watch",
        "worker_probe": SPIES + "record",
        **spec,
    }


def _arms(draft: str) -> dict[str, dict]:
    def capacity(**keys) -> dict:
        return dspark(draft, K, dspark_draft_depths=[K], **keys)

    mask = {"dspark_capacity_verification_mode": "mask"}
    return {
        "half": capacity(dspark_budget_frac=0.5),
        "zero": capacity(dspark_budget_frac=0.0),
        "mask": capacity(dspark_budget_frac=0.3, **mask),
        "curve": capacity(dspark_sps_curve=STEEP_CURVE),
        "curve_mask": capacity(dspark_sps_curve=STEEP_CURVE, **mask),
    }


@pytest.fixture(scope="module")
def runs(tiny_target, tiny_draft) -> dict[str, EngineResult]:
    """The features without speculation and in every arm; then twice sampled."""
    features = [{"max_tokens": 24, **f} for f in FEATURES.values()]
    engine = {
        # Left to choose, a small model emits white space for ever.
        "structured_outputs_config": {
            "backend": "xgrammar",
            "disable_any_whitespace": True,
        },
    }
    specs = {
        "plain": EngineSpec(
            tiny_target, [PROMPT] * len(features), features, engine=engine
        )
    }
    arms = _arms(tiny_draft)
    for name in ARMS:
        sampled = 2 * SEEDED if name in SAMPLING_ARMS else []
        specs[name] = EngineSpec(
            tiny_target,
            [PROMPT] * (len(features) + len(sampled)),
            features + sampled,
            arms[name],
            engine=engine,
            waves=[len(features), *[len(SEEDED)] * (len(sampled) // len(SEEDED))],
            **_watched(),
        )
    results = run_engines(list(specs.values()), env=ACTIVE, timeout_s=TIMEOUT_S)
    return dict(zip(specs, results, strict=True))


def _by_name(rows: list) -> dict:
    return dict(zip(FEATURES, rows, strict=False))


def _trimmed(run: EngineResult) -> list[dict]:
    return [step for step in run.probes[0]["steps"] if step["budget"] is not None]


@pytest.mark.parametrize("arm", ARMS)
def test_capacity_trims_while_features_are_in_use(runs, arm):
    steps = runs[arm].probes[0]["steps"]
    trimmed = _trimmed(runs[arm])
    assert len(trimmed) > 5
    assert len({len(step["reqs"]) for step in trimmed}) > 1
    # Prefills share steps with trimmed decodes.
    assert any(step["decodes"] < len(step["reqs"]) for step in trimmed)
    assert all(step["active"] for step in steps if step["decodes"])
    if arm != "zero":
        assert runs[arm].metrics[ACCEPTED] > 0


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("arm", ARMS)
def test_greedy_features_equal_no_speculation(runs, arm, name):
    plain, run = runs["plain"], runs[arm]
    want, got = _by_name(plain.tokens), _by_name(run.tokens)
    assert got[name] == want[name]
    assert _by_name(run.texts)[name] == _by_name(plain.texts)[name]
    if name in BITES:
        assert want[name] != want["greedy"], "premise: the feature bites"


@pytest.mark.parametrize("arm", ARMS)
def test_samples_of_one_choice_are_greedy(runs, arm):
    tokens = _by_name(runs[arm].tokens)
    assert tokens["several"] == tokens["greedy"] * 2
    assert tokens["one_choice"] == tokens["greedy"]


@pytest.mark.parametrize("arm", ARMS)
def test_structured_output_validates(runs, arm):
    texts = _by_name(runs[arm].texts)
    value = json.loads(texts["json"][0])
    assert set(value) == set(SCHEMA["required"])
    assert value["kind"] in SCHEMA["properties"]["kind"]["enum"]
    assert isinstance(value["sold"], bool)
    assert value["left"] in SCHEMA["properties"]["left"]["enum"]
    assert re.fullmatch(REGEX, texts["regex"][0])


@pytest.mark.parametrize("arm", ARMS)
def test_logprobs_equal_no_speculation(runs, arm):
    [got], [want] = (_by_name(runs[a].logprobs)["logprobs"] for a in (arm, "plain"))
    pairs = list(zip(got, want, strict=True))
    got, want = (
        _by_name(runs[a].prompt_logprobs)["prompt_logprobs"] for a in (arm, "plain")
    )
    pairs += zip(got[1:], want[1:], strict=True)
    assert all(len(at_want) >= 2 for _, at_want in pairs), "premise"
    for at_got, at_want in pairs:
        # Batches of other shapes sum in another order.
        assert at_got == pytest.approx(at_want, abs=1e-3)


@pytest.mark.parametrize("arm", SAMPLING_ARMS)
def test_seeded_samples_repeat(runs, arm):
    sampled = runs[arm].tokens[len(FEATURES) :]
    first, second = sampled[: len(SEEDED)], sampled[len(SEEDED) :]
    assert first == second
    assert len({tuple(tokens) for [tokens] in first}) > 1, "premise: seeds matter"


# ---- scarce cache, prefix cache, chunked prefill, preemption, abort -----------

ABORTED = 4
ABORT_AFTER = 6


@pytest.fixture(scope="module")
def scarce(tiny_target, tiny_draft, heldout_prompts) -> dict[str, EngineResult]:
    """Long prompts with a shared prefix on few blocks; one request is aborted."""
    shared = "\n".join(heldout_prompts[:4]) + "\n"  # a prefix of several blocks
    work = {
        "model": tiny_target,
        "prompts": [shared + prompt for prompt in heldout_prompts],
        "sampling": {"max_tokens": 40, "ignore_eos": True},
    }
    specs = {"plain": EngineSpec(**work)}
    for arm in SCARCE_ARMS:
        specs[arm] = EngineSpec(
            **work,
            speculative_config=_arms(tiny_draft)[arm],
            engine={
                "num_gpu_blocks_override": 11,  # one request takes up to 8
                "max_num_batched_tokens": 64,
                "enable_prefix_caching": True,
            },
            # The first one fills the prefix cache for the others.
            arrivals=[0, *[6] * 5],
            aborts={str(ABORTED): ABORT_AFTER},
            **_watched(),
        )
    results = run_engines(list(specs.values()), env=ACTIVE, timeout_s=TIMEOUT_S)
    return dict(zip(specs, results, strict=True))


@pytest.mark.parametrize("arm", SCARCE_ARMS)
def test_scarce_cache_chunked_prefill_and_prefix_cache_keep_the_output(scarce, arm):
    plain, run = scarce["plain"], scarce[arm]
    metrics = run.metrics
    assert metrics["vllm:num_preemptions"] > 0
    assert metrics["vllm:prefix_cache_hits"] > 2 * 32, "premise: several blocks"
    steps = run.probes[0]["steps"]
    first = [step["sampled"][0] for step in steps if step["reqs"][0] == "0"]
    assert first[:3] == [0, 0, 1], "premise: the prompt is computed in chunks"
    trimmed = _trimmed(run)
    assert any(step["decodes"] < len(step["reqs"]) for step in trimmed)
    for i, (got, want) in enumerate(zip(run.tokens, plain.tokens, strict=True)):
        if i != ABORTED:
            assert got == want, i


@pytest.mark.parametrize("arm", SCARCE_ARMS)
def test_an_abort_in_mid_stream_leaves_the_others_alone(scarce, arm):
    [got] = scarce[arm].tokens[ABORTED]
    [want] = scarce["plain"].tokens[ABORTED]
    assert ABORT_AFTER <= len(got) < len(want), "premise: it was cut short"
    assert got == want[: len(got)]
