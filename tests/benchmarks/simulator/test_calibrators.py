# SPDX-License-Identifier: Apache-2.0
"""The host's online STS keeps the product's rows, rhythm and delay, and it works."""

import numpy as np
import pytest

from benchmarks.acceptance.world import World
from benchmarks.simulator.arms import make_policy
from benchmarks.simulator.calibrators import FixedTemperature, HostOnlineSTS
from benchmarks.simulator.engine import Engine, SimulatedLoad, Simulation
from tests.benchmarks.simulator.test_engine import MAX_TOKENS, make_costs
from vllm.v1.worker.gpu.spec_decode.dspark.online_sts import (
    FIT_INTERVAL,
    MAX_ROWS_PER_STEP,
)
from vllm.v1.worker.gpu.spec_decode.dspark.sts_fit import (
    calibrated_logits,
    sigmoid,
)
from vllm.v1.worker.gpu.spec_decode.dspark.sts_reference import RING_ROWS

K = 3


def observe_rounds(sts, *, num_reqs=16, num_rounds=FIT_INTERVAL, scale=1.0, seed=0):
    """Show rounds of a head that reports ``scale`` times the true logits."""
    rng = np.random.default_rng(seed)
    for _ in range(num_rounds):
        true = rng.normal(0.5, 1.5, (num_reqs, K))
        accepted = np.cumprod(rng.random(true.shape) < sigmoid(true), axis=1).sum(1)
        sts.observe(scale * true, accepted, np.full(num_reqs, K))


def test_a_fit_is_due_after_the_interval_and_acts_on_the_round_after_the_next():
    sts, probe = HostOnlineSTS(1.0, K), np.full((1, K), 2.0)
    observe_rounds(sts, num_rounds=FIT_INTERVAL - 1, scale=3.0)
    assert (sts.apply(probe) == sts.apply(probe)).all(), "premise: nothing is due"
    observe_rounds(sts, num_rounds=1, scale=3.0)
    published = sts.apply(probe)
    np.testing.assert_array_equal(published, sigmoid(probe))
    assert (sts.apply(probe) < published - 0.1).all()


def test_it_undoes_a_scale_and_starts_from_the_temperature():
    sts = HostOnlineSTS(2.0, K)
    np.testing.assert_allclose(sts.calibration, [[0.5] * K, [0.0] * K, [0.0] * K])
    for seed in range(8):
        observe_rounds(sts, scale=2.5, seed=seed)
        sts.apply(np.zeros((1, K)))
    true = np.array([-1.5, 0.0, 1.0, 2.5])[:, None] * np.ones(K)
    learned = sigmoid(calibrated_logits(2.5 * true, sts.calibration))
    np.testing.assert_allclose(learned, sigmoid(true), atol=0.07)
    assert abs(sigmoid(2.5 * true) - sigmoid(true)).max() > 0.15, "premise"


def test_large_batches_are_sampled_in_turn_and_the_ring_is_bounded():
    sts, num_reqs = HostOnlineSTS(1.0, K), 4 * MAX_ROWS_PER_STEP
    logits = np.arange(num_reqs)[:, None] * np.ones(K)
    for _ in range(4):
        sts.observe(logits, np.zeros(num_reqs), np.ones(num_reqs))
    kept = sts._rows.logits[:, 0].reshape(4, MAX_ROWS_PER_STEP)
    assert sorted(kept.ravel()) == list(range(num_reqs))
    for _ in range(RING_ROWS // MAX_ROWS_PER_STEP):
        sts.observe(logits, np.zeros(num_reqs), np.ones(num_reqs))
    assert len(sts._rows.accepted) == RING_ROWS


def test_rows_that_do_not_count_are_left_out():
    sts = HostOnlineSTS(1.0, K)
    sts.observe(np.eye(K), np.array([0, 1, 0]), np.array([0, 2, 0]))
    np.testing.assert_array_equal(sts._rows.logits, np.eye(K)[1:2])


@pytest.mark.parametrize("shift", [1.5, -1.5])
def test_calibrated_capacity_wins_back_most_of_what_a_shift_costs(shift):
    costs = make_costs(token_ms=0.06)
    load = SimulatedLoad(48, 32, 120, seed=1, refills=96)

    def simulate(shift, **options):
        world = World.with_profile(
            spread_request=1.0, spread_position=1.0, confidence_shift=shift
        )
        policy = make_policy("capacity7", costs, knee=1, **options)
        result = Simulation(Engine(costs, MAX_TOKENS), world, policy, load).run()
        return policy.calibrator, result.tok_s

    fixed, misled = simulate(shift)
    sts, learned = simulate(shift, online_sts=True)
    assert isinstance(fixed, FixedTemperature) and isinstance(sts, HostOnlineSTS)
    assert len(sts._rows.accepted) > 500, "premise: rows were graded"
    _, true = simulate(0.0)
    assert misled < 0.985 * true
    assert learned > 0.98 * true
