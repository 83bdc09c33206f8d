# SPDX-License-Identifier: Apache-2.0
"""Real engines under the CPU rehearsal, each compared with plain decoding."""

import pytest

from tests.helpers.engine import EngineResult, EngineSpec, dspark, run_engines

pytestmark = pytest.mark.engine
FAULTS = "tests.helpers.engine_faults:"
TARGET_MANAGER = "ModelCudaGraphManager"
DRAFT_MANAGER = "DFlashCudaGraphManager"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
# Up to five engines a subprocess, on a machine that may be busy.
TIMEOUT_S = 580


@pytest.fixture(scope="module")
def runs(tiny_target, tiny_draft, heldout_prompts) -> dict[str, EngineResult]:
    """Plain, fixed K=7, upstream adaptive and two faulty runs; one subprocess."""
    fixed = dspark(tiny_draft)
    adaptive = dspark(tiny_draft, enable_adaptive_verification=True)
    arms = {
        "plain": {},
        "fixed": {"speculative_config": fixed},
        "adaptive": {
            "speculative_config": adaptive,
            "worker_setup": FAULTS + "set_steep_costs",
            "worker_probe": FAULTS + "budget_log",
        },
        "query_start_loc": {
            "speculative_config": fixed,
            "worker_setup": FAULTS + "shift_query_start_loc",
        },
        "logits_indices": {
            "speculative_config": fixed,
            "worker_setup": FAULTS + "shift_logits_indices",
        },
    }
    specs = [
        EngineSpec(model=tiny_target, prompts=heldout_prompts, **arm)
        for arm in arms.values()
    ]
    return dict(zip(arms, run_engines(specs, timeout_s=TIMEOUT_S), strict=True))


def test_greedy_output_equals_no_speculation(runs):
    plain, fixed = runs["plain"], runs["fixed"]
    assert plain.replayed(TARGET_MANAGER)
    assert fixed.replayed(TARGET_MANAGER) and fixed.replayed(DRAFT_MANAGER)
    assert fixed.metrics[ACCEPTED] > 0
    assert fixed.tokens == plain.tokens


def test_fixed_depth_replays_uniform_full_graphs_only(runs):
    widths = {key[3] for key, _ in runs["fixed"].replayed(TARGET_MANAGER)}
    assert widths == {8}


def test_profiled_graphs_are_not_counted_as_served(runs):
    adaptive = runs["adaptive"]
    num_steps = len(adaptive.probes[0])
    num_replays = sum(count for _, count in adaptive.replayed(TARGET_MANAGER))
    assert 0 < num_replays <= num_steps


def test_upstream_adaptive_output_equals_no_speculation(runs):
    adaptive = runs["adaptive"]
    trimmed = [b for b in adaptive.probes[0] if b[1] < b[0]]
    assert trimmed, "premise: some drafts are not verified"
    assert adaptive.replayed(TARGET_MANAGER)
    assert adaptive.metrics[ACCEPTED] > 0
    assert adaptive.tokens == runs["plain"].tokens


@pytest.mark.parametrize("fault", ["query_start_loc", "logits_indices"])
def test_a_wrong_row_boundary_changes_the_output(runs, fault):
    assert runs[fault].replayed(TARGET_MANAGER)
    assert runs[fault].tokens != runs["plain"].tokens


def test_two_ranks_in_processes_give_the_output_of_one(
    runs, tiny_target, tiny_draft, heldout_prompts
):
    spec = EngineSpec(
        model=tiny_target,
        prompts=heldout_prompts,
        speculative_config=dspark(tiny_draft),
        engine={"tensor_parallel_size": 2},
    )
    [two] = run_engines(
        [spec],
        env={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        },
        timeout_s=TIMEOUT_S,
    )
    assert two.replayed(TARGET_MANAGER) and two.replayed(DRAFT_MANAGER)
    assert two.metrics[ACCEPTED] > 0
    assert two.tokens == runs["plain"].tokens


# Greedy features, so that both arms must agree; each bites on these models.
FEATURES = {
    "penalties": {"presence_penalty": 2.0, "repetition_penalty": 2.0},
    "bad_words": {"bad_words": ["."]},
    "allowed_token_ids": {"allowed_token_ids": list(range(4, 200))},
    "regex": {"structured_outputs": {"regex": "[0-9]{3} (yes|no)"}},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
}
SAMPLED = {
    "top_k_top_p": {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 1},
    "several": {"temperature": 0.8, "n": 2, "seed": 2},
}


@pytest.fixture(scope="module")
def features(tiny_target, tiny_draft, heldout_prompts) -> dict[str, dict]:
    """One batch in which every request uses another sampling feature, three arms."""
    settings = {"greedy": {}, **FEATURES, **SAMPLED}
    # A description leaves the model much choice.
    prompt = next(p for p in heldout_prompts if "Describe" in p)
    configs = {
        "plain": None,
        "fixed": dspark(tiny_draft),
        "probabilistic": dspark(tiny_draft, draft_sample_method="probabilistic"),
    }
    results = run_engines(
        [
            EngineSpec(
                model=tiny_target,
                prompts=[prompt] * len(settings),
                sampling=[{"max_tokens": 32, **s} for s in settings.values()],
                speculative_config=config,
            )
            for config in configs.values()
        ],
        timeout_s=TIMEOUT_S,
    )
    assert all(run.metrics[ACCEPTED] > 0 for run in results[1:])

    def by_name(run: EngineResult) -> dict:
        rows = zip(run.tokens, run.logprobs, run.prompt_logprobs, strict=True)
        return dict(zip(settings, rows, strict=True))

    return {arm: by_name(run) for arm, run in zip(configs, results, strict=True)}


@pytest.mark.parametrize("name", FEATURES)
def test_greedy_features_equal_no_speculation(features, name):
    plain, fixed = features["plain"][name], features["fixed"][name]
    assert fixed[0] == plain[0]
    if name in ("logprobs", "prompt_logprobs"):
        column = 1 if name == "logprobs" else 2
        got, want = fixed[column], plain[column]
        if name == "logprobs":
            [got], [want] = got, want
        assert [sorted(at or {}) for at in got] == [sorted(at or {}) for at in want]
        for at_got, at_want in zip(got, want, strict=True):
            # Batches of other shapes sum in another order.
            assert at_got == pytest.approx(at_want, abs=1e-3)
    else:
        assert plain[0] != features["plain"]["greedy"][0], "premise: the feature bites"


@pytest.mark.parametrize("arm", ["fixed", "probabilistic"])
def test_sampled_speculation_runs(features, arm):
    assert len(features[arm]["several"][0]) == 2
    for name in SAMPLED:
        assert all(len(tokens) > 1 for tokens in features[arm][name][0])


def test_scarce_cache_chunked_prefill_and_prefix_cache_keep_the_output(
    tiny_target, tiny_draft, heldout_prompts
):
    shared = "\n".join(heldout_prompts[:4]) + "\n"  # a prefix of several blocks
    prompts = [shared + prompt for prompt in heldout_prompts]
    scarce = {
        "num_gpu_blocks_override": 14,  # one request takes up to 8
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": True,
    }
    plain, fixed = run_engines(
        [
            EngineSpec(model=tiny_target, prompts=prompts),
            EngineSpec(
                model=tiny_target,
                prompts=prompts,
                speculative_config=dspark(tiny_draft),
                engine=scarce,
                waves=[1, len(prompts) - 1],
            ),
        ],
        timeout_s=TIMEOUT_S,
    )
    assert fixed.metrics["vllm:num_preemptions"] > 0
    assert fixed.metrics["vllm:prefix_cache_hits"] > 0
    assert fixed.metrics[ACCEPTED] > 0
    assert fixed.tokens == plain.tokens
