# SPDX-License-Identifier: Apache-2.0
"""The host's decisions of one step: the gate, the budget, the cap, the depth."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.capacity_cases import (
    DEVICE,
    MAX_NUM_REQS,
    NO_LIMIT,
    K,
    make_batch,
    make_config,
    make_env,
    make_req_states,
)
from vllm.v1.worker.gpu.spec_decode.dspark import step_planner as module
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_costs import CapacityCosts
from vllm.v1.worker.gpu.spec_decode.dspark.confidence_mirror import ConfidenceMirror
from vllm.v1.worker.gpu.spec_decode.dspark.cost_correction import CostCorrection
from vllm.v1.worker.gpu.spec_decode.dspark.depth import PROBE_INTERVAL
from vllm.v1.worker.gpu.spec_decode.dspark.plan_cadence import PERIOD
from vllm.v1.worker.gpu.spec_decode.dspark.step_planner import (
    DEPTH_PLAN_INTERVAL,
    FIXED,
    StepPlan,
    StepPlanner,
)

HALF = {"dspark_budget_frac": 0.5}
FLAT = {"dspark_sps_curve": [[1, 100.0], [1000, 100.0]]}
STEEP = {"dspark_sps_curve": [[1, 1000.0], [1000, 1.0]]}


def make_planner(keys, *, max_total_logits=NO_LIMIT, ready=True, **variables):
    config, env = make_config(**keys), make_env(**variables)
    req_states = make_req_states()
    costs = CapacityCosts(
        config,
        req_states,
        depths=config.resolve_depths(K, env),
        activation_batch_size=env.activation_batch_size,
    )
    if ready:
        costs.finish()
    return StepPlanner(
        config,
        env,
        costs=costs,
        mirror=ConfidenceMirror(MAX_NUM_REQS, K, DEVICE),
        num_computed_tokens=req_states.num_computed_tokens_np,
        num_speculative_steps=K,
        max_total_logits=max_total_logits,
        num_bonus_tokens=1,
    )


def draft(planner, batch, confidences=0.5, depth=K):
    """Publish one round of confidences for the whole batch."""
    slots = batch.idx_mapping_np
    probs = torch.zeros(len(slots), K, device=DEVICE)
    probs[:] = torch.as_tensor(confidences, dtype=torch.float32, device=DEVICE)
    planner.mirror.publish(probs, torch.as_tensor(slots).to(DEVICE), slots, depth)


def steady(planner, batch, confidences=0.5, rounds=3):
    """Return the plan of a step whose requests have been drafted for some rounds."""
    for _ in range(rounds):
        planner.plan(batch)
        draft(planner, batch, confidences)
    return planner.plan(batch)


class Untouchable:
    """Fails whatever is asked of it."""

    def __getattr__(self, name):
        pytest.fail(f"read {name}")


@pytest.mark.parametrize("keys", [HALF, FLAT, {"dspark_confidence_threshold": 0.5}])
def test_below_the_knee_nothing_is_read(keys, monkeypatch):
    planner = make_planner(keys, CAPACITY_ACTIVATION_BATCH_SIZE=4)
    planner.mirror = planner._controller = Untouchable()
    planner.costs = SimpleNamespace(ready=True, activation_num_reqs=4)
    batch = make_batch([K] * 3)
    batch.num_draft_tokens_np = batch.idx_mapping_np = Untouchable()
    assert planner.plan(batch) is FIXED


def test_before_the_costs_are_known_the_plan_is_fixed():
    planner = make_planner(HALF, ready=False)
    planner.mirror = Untouchable()
    assert planner.plan(make_batch([K] * MAX_NUM_REQS)) is FIXED


def test_prefilling_requests_do_not_count_as_load():
    planner = make_planner(HALF, CAPACITY_ACTIVATION_BATCH_SIZE=3)
    prefills = make_batch([K, K, 0], non_drafts=[1, 1, 9], prefilling=[0, 0, 9])
    assert planner.plan(prefills) is FIXED
    assert planner.plan(make_batch([K, K, K])).active


def test_first_step_at_the_knee_verifies_everything():
    planner = make_planner(HALF, CAPACITY_ACTIVATION_BATCH_SIZE=2)
    batch = make_batch([K, K])
    assert steady(planner, batch).trims, "premise: later steps trim"
    assert planner.plan(make_batch([K])) is FIXED
    plan = planner.plan(batch)
    assert plan.active and not plan.trims


def test_drafts_that_were_made_below_the_knee_are_never_ranked():
    planner = make_planner(HALF, CAPACITY_ACTIVATION_BATCH_SIZE=2)
    batch = make_batch([K, K])
    planner.plan(batch)
    draft(planner, make_batch([K], slots=[0]))
    # Slot 1 was not drafted for in the published round.
    assert not planner.plan(batch).trims


def test_step_without_drafts_trims_nothing():
    planner = make_planner(HALF)
    assert not steady(planner, make_batch(None, non_drafts=[1, 1])).trims


@settings(deadline=None, max_examples=60)
@given(
    drafts=st.lists(st.integers(1, K), min_size=1, max_size=MAX_NUM_REQS),
    frac=st.floats(0.0, 0.99),
    prefill=st.integers(0, 1),
)
def test_fraction_budget_and_tokens(drafts, frac, prefill):
    drafts = drafts[: MAX_NUM_REQS - prefill]
    planner = make_planner({"dspark_budget_frac": frac})
    batch = make_batch(
        [*drafts, *[0] * prefill],
        non_drafts=[*[1] * len(drafts), *[7] * prefill],
        prefilling=[*[0] * len(drafts), *[7] * prefill],
    )
    plan = steady(planner, batch)
    # Of K drafts a request, not of those scheduled, and never more than these.
    slots = int(np.ceil(len(drafts) * K * frac - 1e-9))
    if slots >= sum(drafts):
        assert plan == StepPlan(active=True)
    else:
        assert plan.draft_budget == slots
        assert plan.num_tokens == slots + len(drafts) + 7 * prefill


def test_budget_that_covers_every_draft_is_no_trimming():
    batch = make_batch([1, 1])
    assert not steady(make_planner(HALF), batch).trims
    assert steady(make_planner(HALF), make_batch([K, K])).trims, "premise"


def test_threshold_counts_old_survivals():
    planner = make_planner({"dspark_confidence_threshold": 0.3})
    batch = make_batch([K, K])
    # Survivals 0.9, 0.81, ... all pass; 0.5, 0.25, ... one passes.
    plan = steady(planner, batch, [[0.9] * K, [0.5] * K])
    assert plan.draft_budget == K + 1


def test_budget_never_depends_on_the_drafts_in_hand():
    plans = []
    for latest in (0.0, 1.0):
        planner = make_planner({"dspark_confidence_threshold": 0.3})
        batch = make_batch([K, K])
        steady(planner, batch, 0.5)
        draft(planner, batch, latest)
        plans.append(planner.plan(batch))
    assert plans[0] == plans[1]
    assert plans[0].trims, "premise"


def test_steep_costs_trim_and_flat_costs_do_not():
    batch = make_batch([K] * MAX_NUM_REQS)
    only_k = {"dspark_draft_depths": [K]}
    assert not steady(make_planner(FLAT | only_k), batch).trims
    plan = steady(make_planner(STEEP | only_k), batch)
    assert plan.trims
    assert plan.num_tokens == plan.draft_budget + MAX_NUM_REQS


def test_trimmed_batch_fits_one_chunk_of_logits(monkeypatch):
    warnings = []
    monkeypatch.setattr(
        module.logger, "warning", lambda text, *args: warnings.append(text % args)
    )
    # 4 requests at half of 16 drafts: 8 drafts and 4 bonus rows, 10 rows allowed.
    planner = make_planner(HALF, max_total_logits=10)
    batch = make_batch([K] * 4)
    assert steady(planner, batch).draft_budget == 6
    assert planner.plan(batch).draft_budget == 6
    assert len(warnings) == 1 and "verifying 6" in warnings[0]


def test_untrimmed_batch_may_be_verified_in_chunks(monkeypatch):
    monkeypatch.setattr(module.logger, "warning", pytest.fail)
    planner = make_planner({"dspark_confidence_threshold": 0.01}, max_total_logits=2)
    plan = steady(planner, make_batch([K] * 4), 1.0)
    assert plan.active and not plan.trims


@pytest.mark.parametrize("keys", [HALF, FLAT | {"dspark_draft_depths": [K]}])
def test_fixed_depth_is_never_planned(keys):
    planner = make_planner(keys)
    assert steady(planner, make_batch([K] * 4)).next_depth is None
    assert planner.depth_of_load() == ()


def test_depth_switch_off_leaves_k():
    planner = make_planner(STEEP, DYNAMIC_DRAFT_DEPTH=0)
    assert steady(planner, make_batch([K] * 4)).next_depth is None


def test_depth_falls_with_hopeless_drafts_and_stays_with_good_ones():
    depths = {"dspark_draft_depths": [1, 2, K]}
    batch = make_batch([K] * MAX_NUM_REQS)
    bad = steady(make_planner(STEEP | depths), batch, 0.05, rounds=30)
    good = steady(make_planner(FLAT | depths), batch, 1.0, rounds=30)
    assert bad.next_depth == 1
    assert good.next_depth == K
    assert bad.num_decodes == MAX_NUM_REQS


def test_a_listed_depth_of_zero_is_used():
    """The variable's default of 1 is for depths that nobody listed."""
    planner = make_planner(STEEP | {"dspark_draft_depths": [0, K]})
    bad = steady(planner, make_batch([K] * MAX_NUM_REQS), 0.05, rounds=30)
    assert bad.next_depth == 0


def test_depth_is_planned_at_intervals_or_when_the_load_changed(monkeypatch):
    planner = make_planner(STEEP)
    plans = []
    original = module.plan_depth
    monkeypatch.setattr(
        module, "plan_depth", lambda *a, **k: plans.append(1) or original(*a, **k)
    )
    batch = make_batch([K] * 6)
    for _ in range(1 + DEPTH_PLAN_INTERVAL):
        planner.plan(batch)
        draft(planner, batch)
    assert len(plans) == 2
    planner.plan(make_batch([K] * 5))
    assert len(plans) == 3


def test_depth_of_load_is_k_below_the_knee_and_usable_above():
    depths = [1, 2, K]
    planner = make_planner(
        STEEP | {"dspark_draft_depths": depths}, CAPACITY_ACTIVATION_BATCH_SIZE=3
    )
    table = planner.depth_of_load()
    assert len(table) == MAX_NUM_REQS + 1
    assert set(table[:3]) == {K}
    assert set(table[3:]) <= set(depths)
    assert min(table[3:]) < K, "premise: load lowers the depth"


def test_curve_mode_counts_only_requests_that_yield_a_token(monkeypatch):
    seen = []
    original = module.plan_budget
    monkeypatch.setattr(
        module, "plan_budget", lambda i, *a, **k: seen.append(i) or original(i, *a, **k)
    )
    planner = make_planner(STEEP | {"dspark_draft_depths": [K]})
    # Two decodes, one prefill that ends in this step and one that does not.
    batch = make_batch([K, K, 0, 0], non_drafts=[1, 1, 5, 5], prefilling=[0, 0, 5, 9])
    steady(planner, batch)
    assert seen[-1].num_sampling_reqs == 3
    assert seen[-1].num_non_draft_tokens == 12
    assert seen[-1].survival_probs.shape == (2, K)


def test_plan_knows_the_mean_context_of_the_batch(monkeypatch):
    seen = []
    original = module.plan_budget
    monkeypatch.setattr(
        module, "plan_budget", lambda i, *a, **k: seen.append(i) or original(i, *a, **k)
    )
    planner = make_planner(STEEP | {"dspark_draft_depths": [K]})
    planner._num_computed_tokens[:] = [100, 999, 300, *[999] * (MAX_NUM_REQS - 3)]
    steady(planner, make_batch([K, K], slots=[0, 2]))
    assert seen[-1].context_tokens == 200.0


@pytest.mark.parametrize(
    ("drafts", "width"), [(None, 0), ([2, 2], 2), ([3, 2], -1), ([2, 0], -1)]
)
def test_a_step_is_timed_by_the_drafts_it_had_in_hand(drafts, width):
    """None of them is a width too: that of every step at depth 0."""
    planner = make_planner(STEEP | {"dspark_draft_depths": [0, K]})
    noted = []
    planner.corrector = SimpleNamespace(
        correction=None,
        learn=lambda: None,
        note=lambda *args: noted.append(args),
        times=SimpleNamespace(exchange=lambda serial: None),
    )
    planner.plan(make_batch(drafts, non_drafts=[1, 1]))
    planner.published(0)
    [(_, described, depth)] = noted
    assert (described.width, described.decode_only, depth) == (width, True, 0)


def test_a_mixed_step_knows_the_decode_rate_in_ms_of_the_tables(monkeypatch):
    seen, wishes = [], []
    budget, depth = module.plan_budget, module.plan_depth
    monkeypatch.setattr(
        module, "plan_budget", lambda i, *a, **k: seen.append(i) or budget(i, *a, **k)
    )
    monkeypatch.setattr(
        module,
        "plan_depth",
        lambda *a, **k: wishes.append(depth(*a, **k)) or wishes[-1],
    )
    planner = make_planner(STEEP)
    planner.corrector = SimpleNamespace(
        correction=None, learn=lambda: None, note=None, times=None
    )
    batch = make_batch([K, K, 0], non_drafts=[1, 1, 5], prefilling=[0, 0, 9])
    steady(planner, batch)
    assert seen[-1].decode_rate == wishes[-1].tokens_per_ms > 0.0
    # Everything takes twice as long: half the rate, the same in the tables' ms.
    planner.corrector.correction = CostCorrection(
        planner.depths, MAX_NUM_REQS, MAX_NUM_REQS * (K + 1)
    )
    planner.corrector.correction._common = np.log(2.0)
    for _ in range(DEPTH_PLAN_INTERVAL):
        draft(planner, batch)
        planner.plan(batch)
    draft(planner, batch)
    planner.plan(batch)
    assert seen[-1].decode_rate == pytest.approx(2.0 * wishes[-1].tokens_per_ms)


def test_no_rate_outlives_a_pause_below_the_knee():
    planner = make_planner(STEEP)
    steady(planner, make_batch([K] * 4))
    assert planner._decode_rate > 0.0, "premise"
    planner.publishing = False
    rates = []
    planner._plan_budget = lambda *_: rates.append(planner._decode_rate)
    planner.plan(make_batch([K] * 4))
    assert rates == [0.0]


# ---- quiet steps -----------------------------------------------------------------

ONLY_K = {"dspark_draft_depths": [K]}
DEPTHS = {"dspark_draft_depths": [1, 2, K]}
LOAD = MAX_NUM_REQS


def serve(planner, batch, confidences=0.9, depth=K):
    """Plan a step and publish it if it shall be; return the plan."""
    plan = planner.plan(batch)
    if plan.publishes:
        draft(planner, batch, confidences, depth)
        planner.published(depth)
    else:
        planner.mirror.skip_step()
    return plan


def rest(planner, batch, confidences=0.9):
    """Serve a steady load until a plan has begun a quiet period."""
    for _ in range(4 * PERIOD):
        if not serve(planner, batch, confidences).publishes:
            return
    pytest.fail("premise: it comes to rest")


@pytest.mark.parametrize("keys", [FLAT | ONLY_K, FLAT | DEPTHS])
def test_a_quiet_step_looks_at_nothing_and_repeats_the_plan(keys):
    planner, batch = make_planner(keys), make_batch([K] * LOAD)
    rest(planner, batch)
    planned = planner._last_plan
    mirror, controller = planner.mirror, planner._controller
    planner.mirror = planner._controller = planner.corrector = Untouchable()
    batch.num_draft_tokens_np = batch.idx_mapping_np = Untouchable()
    for _ in range(PERIOD - 3):
        plan = planner.plan(batch)
        assert plan == planned and not plan.publishes and not plan.trims
    planner.corrector, planner.mirror, planner._controller = None, mirror, controller
    assert planner.plan(batch) == replace(planned, publishes=True)


@pytest.mark.parametrize("keys", [STEEP | ONLY_K, STEEP | DEPTHS])
def test_a_load_that_trims_is_never_quiet(keys):
    planner, batch = make_planner(keys), make_batch([K] * LOAD)
    plans = [serve(planner, batch, [0.9, 0.1, 0.1, 0.1]) for _ in range(5 * PERIOD)]
    assert plans[-1].trims, "premise"
    assert all(plan.publishes for plan in plans)


@pytest.mark.parametrize(
    "keys", [{"dspark_confidence_threshold": 0.01}, {"dspark_budget_frac": 0.999}]
)
def test_other_modes_give_every_step_its_own_budget(keys):
    planner, batch = make_planner(keys), make_batch([K] * LOAD)
    plans = [serve(planner, batch, 1.0) for _ in range(5 * PERIOD)]
    assert not any(plan.trims for plan in plans), "premise"
    assert all(plan.publishes for plan in plans)


def test_worse_drafts_are_trimmed_at_the_end_of_a_period():
    planner, batch = make_planner(STEEP | ONLY_K), make_batch([K] * LOAD)
    rest(planner, batch, 1.0)
    plans = [serve(planner, batch, [0.9, 0.1, 0.1, 0.1]) for _ in range(PERIOD + 1)]
    assert [plan.trims for plan in plans] == [False] * (PERIOD - 1) + [True] * 2
    assert plans[-2].publishes, "the next step may trim as well"


def test_a_load_change_is_planned_at_once_and_may_trim_from_the_next_step_on():
    for num_quiet in range(PERIOD - 1):
        planner = make_planner(STEEP | ONLY_K)
        rest(planner, make_batch([K] * LOAD), 1.0)
        for _ in range(num_quiet):
            serve(planner, make_batch([K] * LOAD), 1.0)
        fewer = make_batch([K] * (LOAD // 2))
        plans = [serve(planner, fewer, [0.9, 0.1, 0.1, 0.1]) for _ in range(3)]
        # The drafts in hand were made unpublished.
        assert plans[0].publishes and not plans[0].trims
        assert plans[2].trims, "at the latest, as after a pause below the knee"


def test_drafts_of_unpublished_steps_are_never_ranked():
    planner = make_planner(STEEP | ONLY_K)
    batch = make_batch([K] * LOAD)
    rest(planner, batch, 1.0)
    # What is known of the requests says trim; their drafts in hand are unknown.
    planner.mirror._survival[:] = 0.01
    assert planner.mirror.survival_probs(np.arange(LOAD)).max() < 0.1
    assert not planner.plan(make_batch([K] * (LOAD // 2))).trims


def test_plans_of_unequal_widths_are_not_calm():
    planner = make_planner(FLAT | ONLY_K)
    mixed = make_batch([K] * (LOAD - 1) + [2])
    assert all(serve(planner, mixed).publishes for _ in range(5 * PERIOD))


def test_a_pending_depth_is_not_calm():
    """The wish is for less, and the window has yet to agree."""
    planner = make_planner(FLAT | DEPTHS, DYNAMIC_DRAFT_DEPTH_WINDOW=1000)
    batch = make_batch([K] * LOAD)
    serve(planner, batch)
    planner._wish_for_depth = lambda *_: setattr(planner, "_wished_depth", 1)
    plans = [serve(planner, batch) for _ in range(5 * PERIOD)]
    assert {plan.next_depth for plan in plans} == {K}, "premise"
    assert all(plan.publishes for plan in plans[PERIOD:])


def test_a_probe_of_the_depth_is_not_calm_and_is_at_most_a_period_late():
    planner = make_planner(STEEP | DEPTHS)
    planner._wish_for_depth = lambda *_: setattr(planner, "_wished_depth", 1)
    planner._choose_budget = lambda *_: NO_LIMIT
    batch, plans = make_batch([1] * LOAD), []
    for _ in range(3 * PROBE_INTERVAL):
        plans.append(serve(planner, batch, depth=1))
    deeper = [i for i, plan in enumerate(plans) if plan.next_depth == 2]
    assert any(not plan.publishes for plan in plans[: deeper[0]]), "premise"
    assert 0 <= deeper[0] - PROBE_INTERVAL < PERIOD
    assert all(plan.publishes for plan in plans[deeper[0] :][:PERIOD])


def test_depth_is_planned_once_a_period_also_while_quiet():
    planner, batch, wishes = make_planner(FLAT | DEPTHS), make_batch([K] * LOAD), []
    original = planner._wish_for_depth
    planner._wish_for_depth = lambda *a: wishes.append(served[0]) or original(*a)
    served = [0]
    for served[0] in range(6 * PERIOD):
        serve(planner, batch, 1.0)
    assert planner.cadence._quiet, "premise"
    assert np.diff(wishes).tolist() == [DEPTH_PLAN_INTERVAL] * (len(wishes) - 1)


def test_one_step_of_a_quiet_period_is_compared_with_its_time():
    planner, batch = make_planner(FLAT | ONLY_K), make_batch([K] * LOAD)
    noted = []
    planner.corrector = SimpleNamespace(
        correction=None,
        learn=lambda: None,
        note=lambda serial, described, depth: noted.append((serial, described)),
        times=SimpleNamespace(exchange=lambda serial: None),
    )
    rest(planner, batch)
    noted.clear()
    planner._num_computed_tokens[:] = 77
    first = planner.mirror.serial
    for _ in range(PERIOD - 1):
        serve(planner, batch)
    # Of the two that were published the first has no time of its own.
    [(serial, described)] = noted
    assert serial == planner.mirror.serial == first + 2
    assert described.width == K and described.context_tokens == 77.0
    assert described.num_tokens == LOAD * (K + 1) and not described.trims


def test_quiet_plans_name_the_load_at_hand():
    planner = make_planner(FLAT | DEPTHS)
    rest(planner, make_batch([K] * LOAD))
    plan = serve(planner, make_batch([K] * (LOAD - 1)))
    assert not plan.publishes, "premise: within the tolerance"
    assert plan.num_decodes == LOAD - 1
    assert plan.next_depth == planner._controller.depth


def test_a_pause_below_the_knee_ends_the_rest():
    planner = make_planner(FLAT | ONLY_K, CAPACITY_ACTIVATION_BATCH_SIZE=LOAD)
    rest(planner, make_batch([K] * LOAD))
    assert planner.plan(make_batch([K])) is FIXED
    assert serve(planner, make_batch([K] * LOAD)).publishes
