# SPDX-License-Identifier: Apache-2.0
"""Where the step costs come from, and the knee that follows from them."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    NUM_REPEATS,
    CapacityCosts,
    ProfileHooks,
    thin,
)

AUTO = {"dspark_sps_curve": "auto"}
FLAT = {"dspark_sps_curve": [[1, 100.0], [1000, 100.0]]}
STEEP = {"dspark_sps_curve": [[1, 1000.0], [1000, 1.0]]}
DEPTHS = (1, K)


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
    """Graphs of a made-up engine whose steps cost 1 ms and 0.1 ms a token."""

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
            1.0 + 0.1 * tokens, 0.01 * self.depth * num_reqs, tokens, num_reqs, graph
        )


def profile(costs, engine=None):
    engine = engine or Engine()
    costs.bind(engine.hooks)
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
    assert len(timings) % NUM_REPEATS == 0 and timings
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


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, unique=True).map(sorted),
    num_points=st.integers(2, 30),
)
def test_thin_keeps_the_ends_and_about_the_number_wanted(sizes, num_points):
    kept = thin(sizes, num_points)
    assert kept == sorted(set(kept)) and set(kept) <= set(sizes)
    assert len(kept) <= num_points or kept == sizes
    assert (kept[0], kept[-1]) == (sizes[0], sizes[-1])
    if len(sizes) <= num_points:
        assert kept == sizes


def test_thin_spreads_evenly_in_the_logarithm():
    kept = np.array(thin(list(range(1, 1025)), 11))
    np.testing.assert_array_equal(kept, 2 ** np.arange(11))
