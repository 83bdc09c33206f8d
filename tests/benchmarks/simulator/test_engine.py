# SPDX-License-Identifier: Apache-2.0
"""The simulated engine: exact tokens, one world for all arms, honest prices."""

import numpy as np
import pytest

from benchmarks.acceptance.world import World, sigmoid
from benchmarks.simulator.arms import default_arms, make_policy
from benchmarks.simulator.engine import (
    Engine,
    SimulatedLoad,
    Simulation,
    admit,
)
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_reference import (
    assign_capacities_reference,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts

DEPTHS, MAX_REQS, MAX_TOKENS = (1, 3, 7), 64, 2048


def make_costs(token_ms=0.02):
    reqs, tokens = np.arange(MAX_REQS + 1), np.arange(MAX_TOKENS + 1)
    return StepCosts(
        {d: 0.5 + 0.004 * d * reqs for d in DEPTHS},
        {d: 5.0 + token_ms * reqs * (d + 1) for d in DEPTHS},
        5.5 + token_ms * tokens,
    )


COSTS = make_costs()
WORLD = World.with_profile(spread_request=1.0, spread_position=1.0)


def simulate(arm, load=None, costs=COSTS, world=WORLD, **options):
    load = load or SimulatedLoad(16, 32, 50, seed=1)
    engine = Engine(costs, MAX_TOKENS)
    simulation = Simulation(engine, world, make_policy(arm, costs, **options), load)
    return simulation, simulation.run()


@pytest.mark.parametrize("arm", default_arms(COSTS))
@pytest.mark.parametrize("refills", [0, 20])
def test_every_arm_yields_every_token(arm, refills):
    load = SimulatedLoad(16, 32, 50, seed=1, refills=refills)
    simulation, result = simulate(arm, load, knee=1)
    if refills:
        started = simulation._num_started
        assert 20 < started <= 16 + refills
        assert 16 * 25 + (started - 32) * 50 <= result.num_tokens <= started * 50
    else:
        assert result.num_tokens == 16 * 50
        assert (simulation._state.emitted == 50).all()
    assert result.num_accepted <= result.num_verified <= result.num_drafted


def test_draft_free_steps_cost_one_token_a_request():
    load = SimulatedLoad(8, 32, 10, seed=0)
    _, result = simulate("none", load)
    prompt = COSTS.verify_varlen_ms[8 * 32]
    # The last token of a request is known to be its last.
    assert result.num_steps == 10
    assert result.ms == pytest.approx(prompt + 9 * COSTS.verify_varlen_ms[8])


def test_a_load_takes_its_start_besides_its_steps():
    load, policy = SimulatedLoad(8, 32, 10, seed=0), make_policy("none", COSTS)
    without, late = (
        Simulation(Engine(COSTS, MAX_TOKENS, start_ms=ms), WORLD, policy, load).run()
        for ms in (0.0, 12.5)
    )
    assert late.ms == pytest.approx(without.ms + 12.5)


def test_a_full_batch_costs_its_uniform_graph_and_its_drafter():
    certain = World(np.full(7, 50.0))
    load = SimulatedLoad(8, 32, 33, seed=0)
    _, result = simulate("fixed7", load, world=certain)
    # 1 token from the prompt, then 8 a step.
    steps = 4
    expected = COSTS.verify_varlen_ms[8 * 32] + steps * COSTS.verify_uniform_ms[7][8]
    assert result.num_steps == steps + 1
    drafter = result.num_steps * COSTS.draft_ms[7][8]
    assert result.ms == pytest.approx(expected + drafter)
    _, upstream = simulate("upstream7", load, world=certain)
    # On its varlen graphs as many tokens of as many requests cost the same.
    assert upstream.ms == pytest.approx(result.ms)


def test_arms_of_equal_depth_accept_the_same_drafts():
    flat = make_costs(token_ms=0.0)
    results = {a: simulate(a, costs=flat)[1] for a in ("fixed7", "upstream7")}
    counts = {(r.num_steps, r.num_accepted, r.num_verified) for r in results.values()}
    assert len(counts) == 1


def test_trimming_pays_where_tokens_are_dear_and_the_oracle_is_ahead():
    dear = make_costs(token_ms=0.2)
    load = SimulatedLoad(48, 32, 200, seed=1, refills=96)
    found = {a: simulate(a, load, costs=dear, knee=1)[1] for a in default_arms(dear)}
    assert found["capacity7"].num_trimmed_steps > 20
    assert found["capacity7"].tok_s > 1.05 * found["fixed7"].tok_s
    assert found["oracle7"].tok_s >= 0.995 * max(r.tok_s for r in found.values())


def test_below_the_knee_capacity_is_fixed_k():
    ours, fixed = simulate("capacity7", knee=17)[1], simulate("fixed7")[1]
    assert ours == fixed


def test_a_last_token_that_is_certain_takes_no_step_more():
    """Without drafts every row yields a token: none is scheduled for nothing."""
    load = SimulatedLoad(16, 32, 50, seed=1, refills=64)
    engine = Engine(COSTS, MAX_TOKENS)
    simulation = Simulation(engine, WORLD, make_policy("none", COSTS), load)
    rows, schedule = [], simulation._schedule

    def spied():
        batch = schedule()
        rows.append(int(batch.sampling.sum()))
        return batch

    simulation._schedule = spied
    assert simulation.run().num_tokens == sum(rows)


def test_steady_load_keeps_the_batch_full():
    load = SimulatedLoad(16, 32, 50, seed=1, refills=64)
    engine = Engine(COSTS, MAX_TOKENS)
    simulation = Simulation(engine, WORLD, make_policy("fixed3", COSTS), load)
    sizes = []
    schedule = simulation._schedule

    def spied():
        batch = schedule()
        sizes.append(len(batch.slots))
        return batch

    simulation._schedule = spied
    simulation.run()
    assert min(sizes) >= 14 and np.mean(sizes) > 15.5


def test_vague_head_costs_throughput_and_a_temperature_gives_it_back():
    dear = make_costs(token_ms=0.2)
    load = SimulatedLoad(48, 32, 50, seed=1, refills=96)
    spread = {"spread_request": 1.0, "spread_position": 1.0}
    honest = World.with_profile(**spread)
    vague = World.with_profile(**spread, confidence_scale=0.05)
    rates = [
        simulate("capacity7", load, dear, world, knee=1, temperature=t)[1].tok_s
        for world, t in ((honest, 1.0), (vague, 1.0), (vague, 0.05))
    ]
    assert rates[1] < 0.98 * rates[0]
    assert rates[2] == pytest.approx(rates[0])


@pytest.mark.parametrize("budget", [0, 1, 9, 20, 34, 35])
def test_admission_is_that_of_the_kernels_oracle(budget):
    rng = np.random.default_rng(budget)
    drafts = rng.integers(0, 8, 10)
    budget = min(budget, int(drafts.sum()))
    confidences = sigmoid(rng.normal(1.0, 1.0, (10, 7))).astype(np.float32)
    confidences[3] = confidences[4]  # a tie
    import torch

    expected = assign_capacities_reference(
        torch.as_tensor(confidences),
        torch.arange(10, dtype=torch.int32),
        torch.as_tensor(drafts, dtype=torch.int32),
        budget,
    )
    rank = np.cumprod(confidences, axis=1, dtype=np.float32)
    np.testing.assert_array_equal(admit(rank, drafts, budget), expected.numpy())


@pytest.mark.parametrize("true_ratio", [1.0, 1.5])
def test_capacity_corrects_its_costs_by_what_steps_take(true_ratio):
    """And it keeps what it learned for the next load, as an engine does."""
    true = StepCosts(
        COSTS.draft_ms,
        {d: COSTS.verify_uniform_ms[d] * true_ratio ** (d > 1) for d in DEPTHS},
        COSTS.verify_varlen_ms,
    )
    policy = make_policy("capacity7", COSTS, knee=1)
    drafts_per_step = []
    for seed in range(4):
        load = SimulatedLoad(48, 32, 200, seed, refills=0)
        result = Simulation(Engine(true, MAX_TOKENS), WORLD, policy, load).run()
        drafts_per_step.append(result.num_drafted / result.num_steps)
    factors = policy._planner.corrector.correction.uniform
    learned = max(float(factors[d][32:].max()) for d in (3, 7))
    if true_ratio == 1.0:
        assert learned == 1.0
    else:
        assert learned > 1.2
        assert drafts_per_step[-1] < 0.9 * drafts_per_step[0], drafts_per_step


def test_a_load_begins_at_the_depth_of_its_size():
    policy = make_policy("capacity7", make_costs(token_ms=0.2), knee=8)
    policy.start(64)
    table = policy._planner.depth_of_load()
    assert table[64] < 7
    assert [policy.schedule(n) for n in (7, 64)] == [7, table[64]]
