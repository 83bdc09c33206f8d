# SPDX-License-Identifier: Apache-2.0
"""The manager of drafts without confidences: depth by load, nothing trimmed."""

import numpy as np
import pytest
import torch

from tests.helpers.capacity_cases import (
    DEVICE,
    MAX_NUM_REQS,
    NO_LIMIT,
    FakeGroup,
    K,
    make_batch,
    make_config,
    make_env,
    make_input_batch,
    make_req_states,
)
from vllm.v1.worker.gpu.spec_decode import capacity
from vllm.v1.worker.gpu.spec_decode.depth_capacity import DepthCapacityManager
from vllm.v1.worker.gpu.spec_decode.dspark.depth import PROBE_INTERVAL
from vllm.v1.worker.gpu.spec_decode.dspark.plan_cadence import PERIOD, PlanCadence
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts

DEPTHS = (1, 2, K)
WINDOW = 2
ROUNDS = 60


def make_costs(per_token_ms):
    """Return tables like those of an engine that keeps every batch's shape."""
    reqs = np.arange(MAX_NUM_REQS + 1)
    max_num_tokens = make_req_states().max_num_batched_tokens
    return StepCosts(
        {d: 0.01 * d * reqs for d in DEPTHS},
        {d: 5.0 + per_token_ms * reqs * (d + 1) for d in DEPTHS},
        np.full(max_num_tokens + 1, 5.0 + per_token_ms * max_num_tokens),
    )


def build(per_token_ms=1.0, group=None, **variables):
    """Return a manager that is ready to serve with given costs."""
    env = make_env(DYNAMIC_DRAFT_DEPTH_WINDOW=WINDOW, **variables)
    config = make_config(dspark_sps_curve="auto", dspark_draft_depths=list(DEPTHS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity, "get_tp_group", lambda: group or FakeGroup())
        manager = DepthCapacityManager(
            config,
            env,
            req_states=make_req_states(),
            num_bonus_tokens=1,
            max_total_logits=NO_LIMIT,
        )
    manager.costs._costs = make_costs(per_token_ms)
    manager.costs.ready = True
    return manager


def step(manager, batch, num_accepted):
    """Serve one step that accepted so many drafts of every request."""
    plan = manager.plan_step(batch)
    judged = torch.as_tensor(batch.num_draft_tokens_np, device=DEVICE)
    accepted = judged.clamp(max=num_accepted)
    manager.note_judged(accepted + 1, judged - accepted)
    probs = torch.full((MAX_NUM_REQS, K), torch.nan, device=DEVICE)
    manager.finish_step(probs, make_input_batch(batch), plan.next_depth or K)
    return plan


def depth_after(manager, num_reqs, num_accepted):
    """Serve a load for a while, drafting as deep as the manager says."""
    depth, plans = K, []
    for _ in range(ROUNDS):
        plans.append(step(manager, make_batch([depth] * num_reqs), num_accepted))
        depth = plans[-1].next_depth
    assert all(plan.active and not plan.trims for plan in plans)
    return depth


def test_below_the_knee_nothing_is_published_or_learned():
    manager = build(CAPACITY_ACTIVATION_BATCH_SIZE=3)
    before = manager.mirror.prior.tolist()
    for _ in range(5):
        plan = step(manager, make_batch([K, K]), 0)
        assert not plan.active and plan.next_depth is None
    assert manager.mirror.serial == 0
    assert manager.mirror.prior.tolist() == before
    assert step(manager, make_batch([K] * 3), 0).active
    assert manager.mirror.serial == 1


@pytest.mark.parametrize("per_token_ms", [0.0, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("num_accepted", [0, 1, K])
def test_no_step_trims_whatever_drafts_cost_and_are_worth(per_token_ms, num_accepted):
    assert ROUNDS < PROBE_INTERVAL, "premise: no probe looks like a depth"
    depth_after(build(per_token_ms), MAX_NUM_REQS, num_accepted)


@pytest.mark.parametrize(
    ("per_token_ms", "num_reqs", "num_accepted", "expected"),
    [
        (0.1, MAX_NUM_REQS, 0, 1),
        (0.1, MAX_NUM_REQS, 1, 1),
        (0.1, MAX_NUM_REQS, 2, 2),
        (0.1, MAX_NUM_REQS, K, K),
        # The same acceptance pays for K where a token costs next to nothing.
        (0.001, MAX_NUM_REQS, 2, K),
    ],
)
def test_the_depth_is_what_acceptance_pays_for(
    per_token_ms, num_reqs, num_accepted, expected
):
    assert depth_after(build(per_token_ms), num_reqs, num_accepted) == expected


def test_the_depth_follows_the_load_at_one_acceptance():
    """A step in four accepts everything: worth K to one request, not to eight."""
    depths = {}
    for num_reqs in (1, MAX_NUM_REQS):
        manager, depth = build(0.6), K
        # Publishing every fourth step would see the same of the four every time.
        manager.planner.cadence = PlanCadence(enabled=False)
        for i in range(ROUNDS):
            accepted = 0 if i % 4 else K
            plan = step(manager, make_batch([depth] * num_reqs), accepted)
            depth = plan.next_depth
        depths[num_reqs] = depth
    assert depths == {1: K, MAX_NUM_REQS: 1}


def test_confidences_are_neither_read_nor_sent():
    group = FakeGroup(world_size=2)
    manager = build(group=group)
    assert step(manager, make_batch([K, K]), 1).active, "premise"
    assert group.broadcasts == []


def test_start_up_compiles_no_admission_and_tells_depths_by_load(monkeypatch):
    monkeypatch.setattr(capacity, "warm_up", pytest.fail)
    manager = build(per_token_ms=10.0)
    manager.finish_start_up()
    assert set(manager.depth_of_load) <= set(DEPTHS)
    assert min(manager.depth_of_load) < K, "premise: load lowers the depth"


def test_a_steady_load_publishes_two_steps_of_a_period():
    manager, batch = build(0.001), make_batch([K] * MAX_NUM_REQS)
    for _ in range(4 * PERIOD):
        step(manager, batch, K)
    serial = manager.mirror.serial
    plans = [step(manager, batch, K) for _ in range(2 * PERIOD)]
    assert manager.mirror.serial - serial == 4
    assert sum(plan.publishes for plan in plans) == 4
    # It still learns: drafts that are never accepted bring the depth down.
    for _ in range(ROUNDS):
        plan = step(manager, batch, 0)
    assert plan.next_depth < K or manager.mirror.prior[0] < 0.5
