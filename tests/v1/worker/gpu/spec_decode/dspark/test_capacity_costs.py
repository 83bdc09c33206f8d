# SPDX-License-Identifier: Apache-2.0
"""Where the step costs come from, and the knee that follows from them."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.capacity_cases import (
    MAX_NUM_REQS,
    FakeGroup,
    K,
    make_config,
    make_req_states,
)
from vllm.v1.worker.gpu.async_utils import StepTimingSample
from vllm.v1.worker.gpu.spec_decode.dspark import capacity_costs as module
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_costs import (
    CapacityCosts,
)
from vllm.v1.worker.gpu.spec_decode.dspark.cost_cache import CostCache
from vllm.v1.worker.gpu.spec_decode.dspark.cost_profile import (
    ProfileHooks,
    ProfileOptions,
)
from vllm.v1.worker.gpu.spec_decode.dspark.planner import (
    PlanInputs,
    plan_budget,
    plan_depth,
)

AUTO = {"dspark_sps_curve": "auto"}
FLAT = {"dspark_sps_curve": [[1, 100.0], [1000, 100.0]]}
STEEP = {"dspark_sps_curve": [[1, 1000.0], [1000, 1.0]]}
DEPTHS = (1, K)
CONTEXT_MS = 1e-5


@pytest.fixture(autouse=True)
def group(monkeypatch):
    """One rank; returns a function that puts another group in its place."""
    monkeypatch.setattr(module, "is_global_first_rank", lambda: False)

    def use(new_group):
        monkeypatch.setattr(module, "get_tp_group", lambda: new_group)

    use(FakeGroup())
    return use


def make_costs(keys, depths=DEPTHS, **options):
    return CapacityCosts(
        make_config(**keys), make_req_states(), depths=depths, **options
    )


class Engine:
    """Graphs of a made-up engine whose steps cost 1 ms and 0.1 ms a token.

    A token of context costs its request 10 ns.
    """

    def __init__(self, *, varlen=(8, 16, 32), uniform=(1, 2, 4)):
        self.varlen, self.uniform = list(varlen), list(uniform)
        self.depth = self.last_depth = K
        self.hooks = ProfileHooks(
            graphs=SimpleNamespace(
                uniform_num_reqs=lambda depth: self.uniform,
                varlen_num_tokens=lambda: self.varlen,
            ),
            measure_sample_ms=lambda: [(1, 0.0), (101, 1.0)],
            set_depth=self.set_depth,
            draft_num_reqs=lambda depth: self.uniform,
            max_model_len=8192,
            num_kv_tokens=100_000,
        )

    def set_depth(self, depth):
        self.last_depth, self.depth = self.depth, depth

    def run(self, batch):
        """Return the timing of one dummy batch."""
        tokens = batch["num_tokens"]
        width = self.depth + 1 if batch["uniform_decode"] else 1
        num_reqs = min(tokens // width, MAX_NUM_REQS)
        graph = num_reqs in self.uniform if width > 1 else tokens in self.varlen
        return StepTimingSample(
            1.0 + 0.1 * tokens + CONTEXT_MS * num_reqs * batch["context_len"],
            0.01 * self.depth * num_reqs,
            tokens,
            num_reqs,
            graph,
        )


def profile(costs, engine=None, cache=None):
    engine = engine or Engine()
    costs.bind(engine.hooks, cache)
    timings = [engine.run(batch) for batch in costs.batches_to_profile()]
    costs.set_samples(timings)
    return timings


@pytest.mark.parametrize("keys", [AUTO, FLAT, {"dspark_budget_frac": 0.5}])
def test_costs_are_not_ready_before_they_were_set(keys):
    costs = make_costs(keys)
    assert not costs.ready
    with pytest.raises(RuntimeError, match="before they were set"):
        _ = costs.step_costs


def test_auto_profiles_and_becomes_ready():
    costs = make_costs(AUTO)
    timings = profile(costs)
    assert len(timings) % ProfileOptions().repeats == 0 and timings
    assert not costs.ready, "capture has not finished"
    costs.finish()
    assert costs.ready
    tables = costs.step_costs
    # Forward, plus 0.01 ms a logits row; every token of a decode batch has one.
    assert tables.verify_varlen_ms[16] == pytest.approx(1.0 + 1.6 + 0.15)
    assert tables.draft_ms[K][4] == pytest.approx(0.16)
    assert tables.draft_ms[1][4] == pytest.approx(0.04)


def test_every_rank_uses_the_samples_of_rank_0(group):
    sender = FakeGroup()
    group(sender)
    profile(make_costs(AUTO))
    (samples,) = sender.broadcasts
    # Another rank measured something else and uses what it is sent.
    group(FakeGroup(world_size=2, rank_0_value=samples))
    slow = make_costs(AUTO)
    engine = Engine()
    measure = engine.run

    def run_slowly(batch):
        timing = measure(batch)
        return dataclasses.replace(timing, forward_ms=7 * timing.forward_ms)

    engine.run = run_slowly
    profile(slow, engine)
    assert slow.step_costs.verify_varlen_ms[16] == pytest.approx(2.75)


@pytest.mark.parametrize("change", [-1, 1])
def test_number_of_timings_must_be_that_of_the_batches(change):
    costs, engine = make_costs(AUTO), Engine()
    costs.bind(engine.hooks)
    timings = [engine.run(batch) for batch in costs.batches_to_profile()]
    timings = timings[:-1] if change < 0 else [*timings, timings[-1]]
    with pytest.raises(RuntimeError, match=f"{len(timings) - change} step shapes"):
        costs.set_samples(timings)
    with pytest.raises(RuntimeError, match="before they were set"):
        _ = costs.step_costs


def test_each_batch_is_run_at_its_depth_and_k_is_put_back():
    costs, engine = make_costs(AUTO), Engine()
    costs.bind(engine.hooks)
    seen = set()
    for batch in costs.batches_to_profile():
        assert batch["num_tokens"] <= costs.max_num_tokens
        if batch["uniform_decode"]:
            assert batch["num_tokens"] % (engine.depth + 1) == 0
        seen.add((batch["uniform_decode"], engine.depth))
    assert {depth for uniform, depth in seen if uniform} == set(DEPTHS)
    assert engine.depth == K


def test_depth_is_put_back_when_profiling_breaks_off():
    costs, engine = make_costs(AUTO), Engine()
    costs.bind(engine.hooks)
    batches = costs.batches_to_profile()
    next(batches)
    engine.depth = 1
    batches.close()
    assert engine.depth == K


def test_largest_batch_is_profiled_even_beyond_the_graphs():
    costs, engine = make_costs(AUTO), Engine()
    costs.bind(engine.hooks)
    sizes = {(b["uniform_decode"], b["num_tokens"]) for b in costs.batches_to_profile()}
    assert MAX_NUM_REQS not in engine.uniform, "premise"
    assert (True, MAX_NUM_REQS * (K + 1)) in sizes
    assert (False, costs.max_num_tokens) in sizes


@pytest.mark.parametrize(
    "keys",
    [
        FLAT,
        {"dspark_budget_frac": 0.5},
        {"dspark_confidence_threshold": 0.5},
    ],
)
def test_only_auto_profiles(keys):
    costs, engine = make_costs(keys), Engine()
    costs.bind(engine.hooks)
    assert list(costs.batches_to_profile()) == []
    costs.set_samples([])
    costs.finish()
    assert costs.ready
    assert engine.last_depth == K, "the runner's depth was left alone"


def test_auto_without_any_graph_is_an_error_that_names_the_way_out():
    with pytest.raises(RuntimeError, match="cudagraph_mode FULL_DECODE_ONLY"):
        make_costs(AUTO).finish()


def test_explicit_knee_wins_over_the_curve():
    for keys in (FLAT, STEEP):
        costs = make_costs(keys, activation_batch_size=5)
        costs.finish()
        assert costs.activation_num_reqs == 5


def test_automatic_knee_follows_the_curve():
    flat, steep = make_costs(FLAT, depths=(K,)), make_costs(STEEP, depths=(K,))
    flat.finish()
    steep.finish()
    assert flat.activation_num_reqs == MAX_NUM_REQS + 1, "no batch gains"
    assert 1 <= steep.activation_num_reqs <= MAX_NUM_REQS


@pytest.mark.parametrize("name", ["dspark_budget_frac", "dspark_confidence_threshold"])
def test_modes_without_costs_act_from_one_request_on(name):
    costs = make_costs({name: 0.5})
    costs.finish()
    assert costs.activation_num_reqs == 1


def test_overhead_is_part_of_every_step():
    costs = make_costs(FLAT | {"dspark_sps_overhead_ms": 2.5})
    costs.finish()
    assert costs.step_costs.uniform_step_ms(K, 1) == pytest.approx(12.5)


def test_context_is_priced_apart_from_the_batch():
    costs = make_costs(AUTO)
    profile(costs)
    tables = costs.step_costs
    # Premise: 16 tokens were timed as 8 requests with context; none of it is left.
    assert tables.verify_varlen_ms[16] == pytest.approx(2.75)
    for depth in DEPTHS:
        assert tables.context_ms(depth, depth, 4, 1000.0) == pytest.approx(
            4 * 1000 * CONTEXT_MS
        )


def test_warmups_are_not_counted():
    costs = make_costs(AUTO, options=ProfileOptions(repeats=1, warmup=2))
    engine, ran = Engine(), []
    run = engine.run

    def cold_at_first(batch):
        timing = run(batch)
        ran.append((batch["num_tokens"], batch["context_len"], engine.depth))
        is_cold = ran.count(ran[-1]) <= 2
        return dataclasses.replace(
            timing, forward_ms=timing.forward_ms * (2.0 if is_cold else 1.0)
        )

    engine.run = cold_at_first
    profile(costs, engine)
    assert costs.step_costs.verify_varlen_ms[16] == pytest.approx(2.75)
    cold = make_costs(AUTO, options=ProfileOptions(repeats=1))
    ran.clear()
    profile(cold, engine)
    assert cold.step_costs.verify_varlen_ms[16] > 4.0, "premise: cold runs are slower"


# ---- no varlen graphs: mask mode ---------------------------------------------


def test_without_varlen_graphs_no_budget_saves_time_but_depths_differ():
    costs = make_costs(AUTO)
    timings = profile(costs, Engine(varlen=()))
    assert timings, "premise: uniform batches are timed"
    tables = costs.step_costs
    assert (tables.verify_varlen_ms == tables.verify_varlen_ms[0]).all()
    for depth in DEPTHS:
        assert (tables.verify_uniform_ms[depth] <= tables.verify_varlen_ms[0]).all()
    survival = np.full((4, K), 1e-3)
    inputs = PlanInputs(
        survival, np.full(4, K, np.int32), 4, 4, 4 * K, K, survival, DEPTHS
    )
    assert plan_budget(inputs, tables).verify_all
    assert plan_depth(inputs, tables).draft_depth == 1


# ---- a file with full tables -------------------------------------------------


MISSING = object()


def file_costs(costs, overhead_ms=0.5, **changes):
    document = json.loads(json.dumps(costs.to_json())) | changes
    return make_costs(
        {"dspark_sps_curve": document, "dspark_sps_overhead_ms": overhead_ms}
    )


def test_full_tables_of_a_file_are_used_where_they_fit(monkeypatch):
    monkeypatch.setattr(module.logger, "info_once", lambda *_: None)
    measured = make_costs(AUTO)
    profile(measured)
    given = file_costs(measured.step_costs, overhead_ms=0.0)
    given.finish()
    assert given.measured and given.activation_num_reqs == measured.activation_num_reqs
    given = file_costs(measured.step_costs)
    given.finish()
    assert given.step_costs.draft_ms[1][4] == pytest.approx(0.04)
    assert given.step_costs.overhead_ms == 0.5


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"verify_varlen_ms": [1.0, 2.0]}, "max_num_batched_tokens"),
        ({"draft_ms": {}}, "both need the same depths"),
        ({"verify_varlen_ms": [1.0, 10**400]}, "beyond any time"),
        ({"num_stalled_samples": float("inf")}, "num_stalled_samples=inf"),
        ({"draft_ms": MISSING}, "damaged (KeyError('draft_ms'))"),
    ],
)
def test_tables_that_do_not_fit_give_way_to_the_points_with_a_reason(
    monkeypatch, change, why
):
    lines = []
    monkeypatch.setattr(module.logger, "info_once", lambda *_: None)
    monkeypatch.setattr(
        module.logger, "warning_once", lambda text, *args: lines.append(text % args)
    )
    measured = make_costs(AUTO)
    profile(measured)
    document = measured.step_costs.to_json() | change
    if document["draft_ms"] is MISSING:
        del document["draft_ms"]
    given = make_costs({"dspark_sps_curve": document})
    given.finish()
    assert given.step_costs.whole_step and not given.measured
    [reason] = [line for line in lines if "using its points" in line]
    assert why in reason


def test_file_of_points_alone_needs_no_reason(monkeypatch):
    lines = []
    monkeypatch.setattr(module.logger, "info_once", lambda *_: None)
    monkeypatch.setattr(
        module.logger, "warning_once", lambda text, *args: lines.append(text % args)
    )
    document = {"schema": "vllm-dspark-sps-curve", "version": 1}
    document |= {"sps_curve": STEEP["dspark_sps_curve"]}
    costs = make_costs({"dspark_sps_curve": document})
    costs.finish()
    assert costs.step_costs.whole_step
    assert not any("using its points" in line for line in lines)


# ---- the cache ---------------------------------------------------------------


@pytest.fixture
def cache(tmp_path):
    return CostCache(tmp_path, {"model": "m"})


def test_equal_configuration_profiles_once(cache):
    first = make_costs(AUTO)
    assert profile(first, cache=cache)
    again = make_costs(AUTO | {"dspark_sps_overhead_ms": 2.0})
    assert profile(again, cache=cache) == [], "nothing is timed"
    again.finish()
    assert again.ready
    expected = first.step_costs.to_json() | {"overhead_ms": 2.0}
    expected.pop("sps_curve")
    assert again.step_costs.to_json().items() >= expected.items()


def test_without_a_cache_every_start_measures(tmp_path):
    profile(make_costs(AUTO))
    assert profile(make_costs(AUTO)), "premise of the test above"


def test_overhead_is_not_kept(cache):
    profile(make_costs(AUTO | {"dspark_sps_overhead_ms": 2.0}), cache=cache)
    assert cache.load()["costs"]["overhead_ms"] == 0.0


@pytest.mark.parametrize(
    "damage",
    [
        {"costs": None},
        {"costs": [1]},
        {"costs": {"schema": "vllm-dspark-sps-curve", "version": 1}},
        {"calibration": 1, "costs": None},
    ],
)
def test_damaged_costs_are_measured_again_and_other_sections_stay(
    cache, damage, monkeypatch
):
    cache.save({"calibration": "kept"} | damage)
    warnings = []
    monkeypatch.setattr(CostCache, "discard", lambda self, why: warnings.append(why))
    costs = make_costs(AUTO)
    assert profile(costs, cache=cache)
    assert len(warnings) == 1 and "unusable" in warnings[0]
    assert costs.cached_sections["calibration"] in ("kept", 1), "it is still of use"
    assert cache.load()["calibration"] in ("kept", 1)
    assert cache.load()["costs"]["draft_ms"]


def test_entry_without_costs_is_no_news(cache, monkeypatch):
    cache.save({"calibration": 1})
    monkeypatch.setattr(CostCache, "discard", lambda self, why: pytest.fail(why))
    costs = make_costs(AUTO)
    assert profile(costs, cache=cache)
    assert costs.cached_sections == {"calibration": 1}


def test_costs_for_fewer_tokens_are_measured_again(cache, monkeypatch):
    small = make_costs(AUTO)
    small.max_num_tokens -= 1
    profile(small, cache=cache)
    warnings = []
    monkeypatch.setattr(CostCache, "discard", lambda self, why: warnings.append(why))
    assert profile(make_costs(AUTO), cache=cache)
    assert "max_num_batched_tokens" in warnings[0]


def test_only_rank_0_touches_the_disk_and_every_rank_uses_its_entry(cache, group):
    profile(make_costs(AUTO), cache=cache)
    sections = cache.load()

    class NoDisk(CostCache):
        def load(self):
            pytest.fail("read")

        def save(self, sections):
            pytest.fail("written")

    group(FakeGroup(world_size=2, rank_0_value=(sections, True), rank_in_group=1))
    other = make_costs(AUTO)
    assert profile(other, cache=NoDisk(cache.directory, cache.key)) == []
    assert other.step_costs.draft_ms[1][4] == pytest.approx(0.04)
    assert other.cached_sections == sections
    other.save_sections({"calibration": 1})


def test_sections_of_others_are_kept_through_the_costs(cache):
    costs = make_costs(AUTO)
    profile(costs, cache=cache)
    costs.save_sections({"calibration": {"temperature": [1.5]}})
    again = make_costs(AUTO)
    assert profile(again, cache=cache) == []
    assert again.cached_sections["calibration"] == {"temperature": [1.5]}
