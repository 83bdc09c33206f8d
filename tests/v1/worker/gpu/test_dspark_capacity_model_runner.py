# SPDX-License-Identifier: Apache-2.0
"""Engines with capacity under the CPU rehearsal: modes, graphs, knee, counts."""

from collections.abc import Iterator

import pytest

from tests.helpers.capacity_spies import KNEE, SMALL_CHUNK_ROWS, STEEP_CURVE
from tests.helpers.engine import EngineResult, EngineSpec, dspark, run_engines

# Under a heavy load on the machine the engines of one process take minutes.
TIMEOUT_S = 1500
pytestmark = [pytest.mark.engine, pytest.mark.timeout(TIMEOUT_S)]
SPIES = "tests.helpers.capacity_spies:"
K = 7
NUM_TOKENS = 24
LONG_TOKENS = 72
BURST_TOKENS = 10
CAPACITY = "vllm:dspark_capacity_num_"
SPEC = "vllm:spec_decode_num_"
# Two long requests; three bursts of four short ones carry the batch over the knee.
ARRIVALS = [0, 0, *[3] * 4, *[9] * 4, *[15] * 4]
IDLE_COUNTERS = (
    "admit",
    "land",
    "publish",
    "restart",
    "_plan_budget",
    "_plan_depth",
    "_start_report_copy",
)


def _watched(setup: str = "watch_always", **spec) -> dict:
    return {
        "worker_setup": SPIES + setup,
        "worker_probe": SPIES + "record",
        **spec,
    }


def _greedy(max_tokens: int) -> dict:
    return {"max_tokens": max_tokens, "ignore_eos": True}


def make_specs(target: str, draft: str, prompts: list[str]) -> dict[str, EngineSpec]:
    """Return every arm by name."""

    def capacity(**keys) -> dict:
        # One depth: the depths have tests of their own, and graphs cost time.
        return dspark(draft, K, dspark_draft_depths=[K], **keys)

    fixed, half = dspark(draft, K), capacity(dspark_budget_frac=0.5)
    curve = capacity(dspark_sps_curve=STEEP_CURVE)
    threshold = capacity(dspark_confidence_threshold=0.7)
    mask = {"dspark_capacity_verification_mode": "mask"}
    arms = {
        "plain": {"sampling": _greedy(LONG_TOKENS)},
        "fixed": _watched("watch", speculative_config=fixed),
        "below": _watched("watch_never", speculative_config=curve),
        "curve": _watched(speculative_config=curve),
        "zero": _watched(speculative_config=capacity(dspark_budget_frac=0.0)),
        "mask": _watched(
            speculative_config=half | mask, process_setup=SPIES + "small_chunks"
        ),
        "nan": _watched("corrupt_first_request", speculative_config=threshold),
        "bursts": _watched(
            "watch_above_knee",
            speculative_config=half,
            prompts=[prompts[i % len(prompts)] for i in range(len(ARRIVALS))],
            sampling=[_greedy(LONG_TOKENS)] * 2 + [_greedy(BURST_TOKENS)] * 12,
            arrivals=ARRIVALS,
            process_setup=SPIES + "small_chunks",
        ),
        "fallback": _watched(
            speculative_config=half,
            process_setup=SPIES + "attention_without_varlen_graphs",
        ),
        "fallback_auto": _watched(
            speculative_config=capacity(dspark_sps_curve="auto"),
            process_setup=SPIES + "attention_without_varlen_graphs",
        ),
        "shifted": _watched("shift_capacities", speculative_config=half),
        "fixed_after": _watched("watch", speculative_config=fixed),
    }
    common = {"model": target, "prompts": prompts, "sampling": _greedy(NUM_TOKENS)}
    return {name: EngineSpec(**(common | arm)) for name, arm in arms.items()}


@pytest.fixture(scope="module")
def runs(tiny_target, tiny_draft, heldout_prompts) -> dict[str, EngineResult]:
    """Every arm, one engine after the other in one process."""
    specs = make_specs(tiny_target, tiny_draft, heldout_prompts)
    results = run_engines(list(specs.values()), timeout_s=TIMEOUT_S)
    return dict(zip(specs, results, strict=True))


def _expected(runs: dict[str, EngineResult], num_tokens: int = NUM_TOKENS) -> list:
    return [[tokens[:num_tokens]] for [tokens] in runs["plain"].tokens]


def _steps(run: EngineResult) -> list[dict]:
    return run.probes[0]["steps"]


def _trimmed(run: EngineResult) -> list[dict]:
    return [step for step in _steps(run) if step["budget"] is not None]


def _captured(run: EngineResult) -> list[list]:
    # The manager's class differs, since the seam stays in place for a stock engine.
    return sorted((key[1:] for key, _ in run.graphs["captured"]), key=str)


# ---- graphs ------------------------------------------------------------------


def test_uniform_and_varlen_graphs_are_both_captured(runs):
    def keys(run: EngineResult, prefix: str) -> list[list]:
        rows = [key for key, _ in run.graphs["captured"]]
        return [key[1:] for key in rows if key[0].startswith(prefix)]

    fixed = keys(runs["fixed"], "Model") + keys(runs["fixed"], "Capacity")
    capacity = keys(runs["curve"], "CapacityCudaGraphManager")
    uniform = [key for key in fixed if key[2] == K + 1]
    assert uniform, "premise: fixed K has uniform graphs"
    assert all(key in capacity for key in uniform)
    varlen = [key for key in capacity if key[3] is not None]
    assert varlen and all(key[2] is None for key in varlen)
    # Budget 0 leaves one token a request, fewer than any uniform graph serves.
    assert min(key[0] for key in varlen) <= 8


def test_an_engine_without_varlen_graphs_captures_those_of_fixed_depth(runs):
    assert _captured(runs["fallback"]) == _captured(runs["fixed"])


# ---- modes -------------------------------------------------------------------


@pytest.mark.parametrize("arm", ["fixed", "below", "curve", "zero", "mask", "nan"])
def test_every_mode_gives_the_greedy_output(runs, arm):
    run = runs[arm]
    if arm != "zero":
        assert run.metrics[SPEC + "accepted_tokens"] > 0
    assert run.tokens == _expected(runs)


def test_capacity_trims_above_the_knee_and_output_is_equal(runs):
    run = runs["curve"]
    trimmed = _trimmed(run)
    assert any(0 < step["budget"] < sum(step["drafts"]) for step in trimmed)
    for step in trimmed:
        assert sum(step["capacities"]) == step["budget"]
        assert step["target_tokens"] == len(step["reqs"]) + step["budget"]
        assert step["chunks_forbidden"]
    # Prefill never trims, so the varlen replays are exactly the trimmed steps.
    replays = [key for key in run.graphs["order"] if key[4] is not None]
    assert len(replays) == len(trimmed)
    assert run.tokens == _expected(runs)


def test_a_capacity_shifted_by_one_changes_the_output(runs):
    assert _trimmed(runs["shifted"]), "premise: the fault had a chance"
    assert runs["shifted"].tokens != _expected(runs)


def test_budget_zero_verifies_nothing_and_decodes_one_token_a_step(runs):
    trimmed = _trimmed(runs["zero"])
    assert trimmed
    assert all(not any(step["capacities"]) for step in trimmed)
    assert all(max(step["sampled"]) == 1 for step in trimmed)


def test_mask_mode_rejects_beyond_capacity_and_output_is_equal(runs):
    run = runs["mask"]
    assert run.probes[0]["manager"] == "MaskCapacityManager"
    trimmed = _trimmed(run)
    rows = [
        (capacity, drafts, sampled)
        for step in trimmed
        for capacity, drafts, sampled in zip(
            step["capacities"], step["drafts"], step["sampled"], strict=True
        )
    ]
    assert all(sampled <= capacity + 1 for capacity, _, sampled in rows)
    assert any(sampled == c + 1 < d + 1 for c, d, sampled in rows), "premise"
    # The target still runs the full shape, on uniform graphs.
    assert {key[4] for key in run.graphs["order"]} == {None}
    assert not any(step["chunks_forbidden"] for step in trimmed)
    assert run.tokens == _expected(runs)


def test_attention_without_varlen_graphs_falls_back_to_mask_with_a_reason(runs):
    run = runs["fallback"]
    assert run.probes[0]["manager"] == "MaskCapacityManager"
    assert not run.probes[0]["upstream_flag"]
    [reason] = [w for w in run.warnings if "falls back" in w]
    assert "'mask'" in reason and "CPUAttentionBackend" in reason
    assert _trimmed(run)
    assert run.tokens == _expected(runs)


def test_measured_costs_serve_where_the_mode_fell_back_to_mask(runs):
    run = runs["fallback_auto"]
    assert run.probes[0]["manager"] == "MaskCapacityManager"
    assert any(step["active"] for step in _steps(run)), "premise: capacity plans"
    # A fixed shape costs the same whatever is verified.
    assert not _trimmed(run)
    assert run.tokens == _expected(runs)


def test_fraction_mode_spends_its_fraction(runs):
    full = [s for s in _trimmed(runs["mask"]) if s["drafts"] == [K] * 6]
    assert full
    assert all(step["budget"] == K * 6 // 2 for step in full)


# ---- NaN ---------------------------------------------------------------------


def test_nan_confidences_verify_the_whole_row_and_warn_once(runs):
    run = runs["nan"]
    of_nan = [
        (step["capacities"][step["reqs"].index("0")], step["budget"])
        for step in _trimmed(run)
        if "0" in step["reqs"]
    ]
    assert len(of_nan) > 3, "premise: trimmed steps with the corrupt request"
    # The budget is a round old: the very first one may not cover the row yet.
    assert all(capacity == min(K, budget) for capacity, budget in of_nan)
    assert all(capacity == K for capacity, _ in of_nan[2:])
    trimmed_others = any(c < K for step in _trimmed(run) for c in step["capacities"])
    assert trimmed_others, "premise: other rows are trimmed"
    assert len([w for w in run.warnings if "returned NaN" in w]) == 1


# ---- the knee ----------------------------------------------------------------


def test_below_the_knee_the_graphs_are_those_of_fixed_depth_step_by_step(runs):
    below, fixed = runs["below"].probes[0], runs["fixed"].probes[0]
    assert len(fixed["dispatch"]) > 10
    assert {row[0] for row in fixed["dispatch"]} == {"target", "draft"}
    assert below["dispatch"] == fixed["dispatch"]


def test_below_the_knee_nothing_is_planned_launched_or_copied(runs):
    counts = runs["below"].probes[0]["counts"]
    assert counts == dict.fromkeys(IDLE_COUNTERS, 0)
    assert not any(step["chunks_forbidden"] for step in _steps(runs["below"]))
    busy = runs["curve"].probes[0]["counts"]
    assert all(busy[n] > 0 for n in IDLE_COUNTERS if n != "_plan_depth"), "premise"


def test_crossing_the_knee_many_times_keeps_the_output(runs):
    run = runs["bursts"]
    for step in _steps(run):
        assert step["active"] == (step["decodes"] >= KNEE)
    states = [step["active"] for step in _steps(run)]
    crossings = sum(a != b for a, b in zip(states, states[1:], strict=False))
    assert crossings >= 5, states
    assert _trimmed(run)
    plain = _expected(runs, LONG_TOKENS)[:2]
    short = _expected(runs, BURST_TOKENS)
    assert run.tokens == plain + [short[i % 6] for i in range(2, len(ARRIVALS))]


def test_the_first_step_above_the_knee_verifies_everything(runs):
    steps = _steps(runs["bursts"])
    first = [
        step
        for before, step in zip(steps, steps[1:], strict=False)
        if step["active"] and not before["active"]
    ]
    assert len(first) > 1
    assert all(step["budget"] is None for step in first)


# ---- logits chunks -----------------------------------------------------------


def test_a_batch_that_is_not_compact_may_be_verified_in_chunks(runs):
    whole = [s for s in _steps(runs["bursts"]) if s["budget"] is None]
    rows = [len(s["reqs"]) + sum(s["drafts"]) for s in whole]
    assert any(n > SMALL_CHUNK_ROWS for n in rows), "premise: chunks were needed"
    assert not any(step["chunks_forbidden"] for step in whole)


def test_a_budget_capped_by_the_logits_chunk_says_so(runs):
    run = runs["bursts"]
    sizes = [len(s["reqs"]) + s["budget"] for s in _trimmed(run)]
    assert max(sizes) == SMALL_CHUNK_ROWS
    [said] = [w for w in run.warnings if "one chunk of" in w]
    assert f"{SMALL_CHUNK_ROWS} logits rows" in said


def test_mask_mode_compacts_nothing_so_no_chunk_caps_its_budget(runs):
    sizes = [len(s["reqs"]) + s["budget"] for s in _trimmed(runs["mask"])]
    assert max(sizes) > SMALL_CHUNK_ROWS


# ---- metrics -----------------------------------------------------------------


def _used(run: EngineResult) -> Iterator[tuple[int, int, int]]:
    """Yield (drafts, verified, sampled) of the rounds whose output was used.

    A step that was queued when its request ended is computed but dropped.
    """
    lengths = {str(i): len(tokens) for i, [tokens] in enumerate(run.tokens)}
    done = dict.fromkeys(lengths, 0)
    for step in _steps(run):
        for req, drafts, capacity, sampled in zip(
            step["reqs"],
            step["drafts"],
            step["capacities"],
            step["sampled"],
            strict=True,
        ):
            # All requests of one `generate` call are numbered from where the last
            # call stopped; these engines get one call.
            if done[req] < lengths[req] and drafts and sampled:
                yield drafts, capacity, sampled
            done[req] += sampled


@pytest.mark.parametrize("arm", ["fixed", "below", "curve", "zero", "mask", "nan"])
def test_metrics_separate_drafted_verified_and_accepted(runs, arm):
    run = runs[arm]
    rounds = list(_used(run))
    drafted, verified = (sum(r[i] for r in rounds) for i in (0, 1))
    accepted = sum(sampled - 1 for _, _, sampled in rounds)
    metrics = run.metrics
    assert metrics[SPEC + "draft_tokens"] == verified
    assert metrics[SPEC + "accepted_tokens"] == accepted
    assert metrics[SPEC + "drafts"] == len(rounds)
    if arm == "fixed":
        assert verified == drafted and CAPACITY + "drafted_tokens" not in metrics
        return
    assert metrics[CAPACITY + "drafted_tokens"] == drafted
    assert metrics[CAPACITY + "verified_tokens"] == verified
    assert (verified < drafted) == (arm != "below")
    num_active = metrics[CAPACITY + 'steps{state="active"}']
    num_fixed = metrics[CAPACITY + 'steps{state="fixed"}']
    assert (num_active > 0) == (arm != "below")
    assert num_active + num_fixed <= len(_steps(run))


def test_trimmed_drafts_do_not_deflate_the_acceptance_rate(runs):
    def rate(run: EngineResult) -> float:
        m = run.metrics
        return m[SPEC + "accepted_tokens"] / m[SPEC + "draft_tokens"]

    # The drafts that are kept are the likelier ones.
    assert rate(runs["curve"]) > rate(runs["fixed"])


# ---- neighbours --------------------------------------------------------------


def test_a_stock_engine_after_a_capacity_engine_behaves_as_one_before(runs):
    before, after = runs["fixed"], runs["fixed_after"]
    assert after.probes[0]["manager"] == "NoneType"
    assert after.probes[0]["runner"] == before.probes[0]["runner"]
    assert "Capacity" not in before.probes[0]["runner"]
    assert _captured(after) == _captured(before)
    assert after.probes[0]["dispatch"] == before.probes[0]["dispatch"]
    assert after.tokens == before.tokens
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert after.metrics[SPEC + name] == before.metrics[SPEC + name] > 0
    assert not [name for name in after.metrics if name.startswith(CAPACITY)]
