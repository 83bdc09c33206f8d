# SPDX-License-Identifier: Apache-2.0
"""The capacity managers on tensors of one process: plan, admit, publish."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
from vllm.v1.worker.gpu.spec_decode import capacity as module
from vllm.v1.worker.gpu.spec_decode.capacity import (
    VarlenCapacityManager,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_planner import StepPlan
from vllm.v1.worker.gpu.spec_decode.mask_capacity import MaskCapacityManager

HALF = {"dspark_budget_frac": 0.5}
NONE = {"dspark_budget_frac": 0.0}


def build(cls=VarlenCapacityManager, *, keys=None, group=None, env=None, **options):
    """Return a manager that is ready to serve, below no knee."""
    if cls is VarlenCapacityManager:
        options.setdefault("reports_admitted_counts", False)
        options["query_start_loc"] = torch.zeros(
            MAX_NUM_REQS + 1, dtype=torch.int32, device=DEVICE
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "get_tp_group", lambda: group or FakeGroup())
        manager = cls(
            make_config(**(keys or HALF)),
            env or make_env(),
            req_states=make_req_states(),
            num_bonus_tokens=1,
            max_total_logits=NO_LIMIT,
            **options,
        )
    manager.costs.finish()
    return manager


def draft(manager, batch, confidences, depth=K):
    """End a step that drafted with these confidences, padded as the runner's are."""
    probs = torch.full((MAX_NUM_REQS, K), 0.5, device=DEVICE)
    probs[: len(batch.req_ids)] = torch.as_tensor(
        confidences, dtype=torch.float32, device=DEVICE
    )
    manager.finish_step(probs, make_input_batch(batch), depth)
    return probs


def trimming_step(manager, batch, confidences):
    """Draft once with ``confidences``, then plan a step that verifies them."""
    assert not manager.plan_step(batch).trims, "premise: the first step trims nothing"
    draft(manager, batch, confidences)
    plan = manager.plan_step(batch)
    assert plan.trims, "premise: the second step trims"
    return plan


class Calls(list):
    """Stands in for a function and notes that it was called."""

    def __call__(self, *args, **kwargs):
        self.append((args, kwargs))


@pytest.fixture
def launches(monkeypatch):
    calls = Calls()
    monkeypatch.setattr(module, "pick_admission", lambda *args: calls)
    return calls


@pytest.mark.parametrize("cls", [VarlenCapacityManager, MaskCapacityManager])
def test_fixed_step_ranks_publishes_and_broadcasts_nothing(cls, launches, monkeypatch):
    group = FakeGroup(world_size=2)
    env = make_env(CAPACITY_ACTIVATION_BATCH_SIZE=3)
    manager = build(cls, group=group, env=env)
    published = Calls()
    monkeypatch.setattr(manager.mirror, "publish", published)
    batch = make_batch([K, K])
    plan = manager.plan_step(batch)
    draft(manager, batch, 0.5)
    assert not plan.active and not plan.trims
    assert not launches and not published and not group.broadcasts
    if cls is MaskCapacityManager:
        assert manager.invalid_drafts(make_input_batch(batch)) is None


def test_active_step_that_trims_nothing_launches_nothing(launches):
    manager = build(MaskCapacityManager)
    batch = make_batch([K, K])
    plan = manager.plan_step(batch)
    assert plan.active and not plan.trims
    assert manager.invalid_drafts(make_input_batch(batch)) is None
    draft(manager, batch, 0.5)
    assert not launches


def test_trimming_step_is_one_launch(launches):
    manager = build()
    batch = make_batch([K, K])
    trimming_step(manager, batch, 0.5)
    rows = make_input_batch(batch).idx_mapping
    manager.reallocate_drafts(batch.req_ids, rows)
    assert len(launches) == 1


def test_only_rank_0s_confidences_are_published():
    group = FakeGroup(world_size=2, rank_0_value=0.25)
    manager = build(group=group)
    batch = make_batch([K, K, K], slots=[5, 0, 2])
    manager.plan_step(batch)
    draft(manager, batch, 0.75)
    (sent,) = group.broadcasts
    # Of the padded batch only the requests travel, and they hold this rank's values.
    assert sent.shape == (3, K) and (sent == 0.75).all()
    assert (manager.mirror.probs[[5, 0, 2]] == 0.25).all()
    assert not manager.mirror.probs[[1, 3, 4]].any()


def test_a_step_that_is_not_published_sends_and_stores_nothing():
    group = FakeGroup(world_size=2)
    manager = build(group=group)
    batch = make_batch([K, K])
    manager.plan_step(batch)
    draft(manager, batch, 0.75)
    assert manager.mirror.all_fresh(batch.idx_mapping_np), "premise"
    group.broadcasts.clear()
    manager._plan = StepPlan(active=True, publishes=False)
    draft(manager, batch, 0.25)
    assert not group.broadcasts and manager.mirror.serial == 1
    assert (manager.mirror.probs[:2] == 0.75).all()
    assert not manager.mirror.all_fresh(batch.idx_mapping_np)


def test_single_rank_broadcasts_nothing():
    group = FakeGroup(world_size=1)
    manager = build(group=group)
    batch = make_batch([K])
    manager.plan_step(batch)
    draft(manager, batch, 0.75)
    assert not group.broadcasts
    assert (manager.mirror.probs[0] == 0.75).all()


def test_new_request_in_a_slot_is_never_judged_by_the_former_one():
    manager = build()
    batch = make_batch([K, K])
    trimming_step(manager, batch, 0.9)
    manager.add_request(1)
    assert not manager.mirror.probs[1].any()
    assert not manager.mirror.survival_probs(np.asarray([1])).any()


def test_a_steady_batch_is_described_to_the_device_once(launches, monkeypatch):
    sent = []
    original = module.async_tensor_h2d
    monkeypatch.setattr(
        module,
        "async_tensor_h2d",
        lambda data, out: sent.append(data.tolist()) or original(data, out=out),
    )
    manager = build()
    ones = [1, 1, 1]
    cases = (
        ([K, K, K], ones, 3),
        ([K, K, 2], ones, 2),
        ([K, K, 2], [1, 2, 1], 2),
        ([K, K], ones[:2], 2),
        ([K, K, K], ones, 1),
    )
    for widths, others, times in cases:
        batch = make_batch(widths, non_drafts=others)
        for _ in range(times + 1):
            draft(manager, batch, 0.5)
            if manager.plan_step(batch).trims:
                manager.reallocate_drafts(
                    batch.req_ids, make_input_batch(batch).idx_mapping
                )
                _, _, drafts, non_drafts, _ = launches[-1][0]
                assert (drafts.tolist(), non_drafts.tolist()) == (widths, others)
    assert sent == [widths + others for widths, others, _ in cases]


DRAFTS = st.lists(st.integers(1, K), min_size=1, max_size=MAX_NUM_REQS)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), drafts=DRAFTS, frac=st.floats(0.0, 0.95))
def test_capacities_of_a_trimmed_step_sum_to_its_budget(data, drafts, frac):
    manager = build(keys={"dspark_budget_frac": frac})
    non_drafts = data.draw(
        st.lists(st.integers(1, 3), min_size=len(drafts), max_size=len(drafts))
    )
    slots = data.draw(st.permutations(range(MAX_NUM_REQS)))[: len(drafts)]
    batch = make_batch(drafts, slots=slots, non_drafts=non_drafts)
    manager.plan_step(batch)
    # Zero confidences included: a row of the batch must not stay without an owner.
    values = data.draw(
        st.lists(
            st.sampled_from([0.0, 0.5, 1.0]),
            min_size=len(drafts) * K,
            max_size=len(drafts) * K,
        )
    )
    draft(manager, batch, np.reshape(values, (-1, K)))
    plan = manager.plan_step(batch)
    if not plan.trims:
        return
    rows = make_input_batch(batch).idx_mapping
    cu_logits, starts, budget = manager.reallocate_drafts(batch.req_ids, rows)
    capacities = manager.capacities[: len(drafts)].cpu().numpy()
    assert budget == plan.draft_budget == capacities.sum()
    assert (capacities <= drafts).all()
    # What the host counts with is the size that the device laid out.
    widths = np.diff(starts[: len(drafts) + 1].cpu().numpy())
    np.testing.assert_array_equal(widths, capacities + non_drafts)
    assert starts[len(drafts)] == plan.num_tokens
    np.testing.assert_array_equal(np.diff(cu_logits.cpu().numpy()), capacities + 1)


def test_admission_prefers_the_likelier_drafts():
    manager = build()
    batch = make_batch([K, K])
    trimming_step(manager, batch, [[0.9] * K, [0.1] * K])
    manager.reallocate_drafts(batch.req_ids, make_input_batch(batch).idx_mapping)
    assert manager.capacities[:2].tolist() == [4, 0]


@settings(deadline=None, max_examples=60)
@given(drafts=DRAFTS, frac=st.floats(0.0, 0.95), prefill=st.integers(0, 9))
def test_host_split_has_the_size_of_the_compact_batch(drafts, frac, prefill):
    manager = build(keys={"dspark_budget_frac": frac})
    with_prefill = [*drafts[: MAX_NUM_REQS - 1], 0]
    non_drafts = [1] * (len(with_prefill) - 1) + [1 + prefill]
    batch = make_batch(with_prefill, non_drafts=non_drafts)
    manager.plan_step(batch)
    draft(manager, batch, 0.5)
    plan = manager.plan_step(batch)
    if not plan.trims:
        return
    untrimmed = np.cumsum([0, *(d + 1 for d in with_prefill)], dtype=np.int32)
    counts, cu_logits = manager.compact_batch(
        batch.num_draft_tokens_np, batch.num_scheduled_tokens, untrimmed
    )
    assert counts.sum() == plan.num_tokens
    assert (counts >= non_drafts).all()
    # Requests without drafts have the same width on host and device.
    assert counts[-1] == 1 + prefill
    assert (cu_logits <= untrimmed).all()
    if plan.draft_budget == 0:
        np.testing.assert_array_equal(cu_logits, np.arange(len(with_prefill) + 1))


@pytest.mark.parametrize("reports, length", [(False, 3), (True, 4)])
def test_result_has_the_shape_that_this_vllm_unpacks(reports, length):
    manager = build(reports_admitted_counts=reports)
    batch = make_batch([K, K])
    trimming_step(manager, batch, 0.5)
    result = manager.reallocate_drafts(
        batch.req_ids, make_input_batch(batch).idx_mapping
    )
    assert len(result) == length
    assert result[1] is manager.query_start_loc, "the runner's persistent buffer"
    assert result[3:] == ((None,) if reports else ())


def test_mask_marks_drafts_beyond_the_capacity_of_their_request():
    manager = build(MaskCapacityManager)
    batch = make_batch([K, K, 2], slots=[6, 1, 3])
    confidences = [[0.9, 0.9, 0.1, 0.1], [0.8, 0.1, 0.1, 0.1], [0.95, 0.95, 0.5, 0.5]]
    plan = trimming_step(manager, batch, confidences)
    mask = manager.invalid_drafts(make_input_batch(batch)).tolist()
    capacities = manager.capacities[:3].tolist()
    assert sum(capacities) == plan.draft_budget
    expected = []
    for drafts, capacity in zip([K, K, 2], capacities, strict=True):
        # The first row of a request is its bonus or resampled token, never masked.
        expected += [False] + [i >= capacity for i in range(drafts)]
    assert mask == expected


def test_budget_zero_masks_every_draft():
    manager = build(MaskCapacityManager, keys=NONE)
    batch = make_batch([2, 2])
    trimming_step(manager, batch, 1.0)
    mask = manager.invalid_drafts(make_input_batch(batch))
    assert mask.tolist() == [False, True, True] * 2


def test_the_picked_admission_is_what_is_warmed_and_what_serves(monkeypatch):
    picked, calls = [], Calls()

    def pick(admission_op, device):
        picked.append((admission_op, device))
        return calls

    monkeypatch.setattr(module, "pick_admission", pick)
    manager = build(MaskCapacityManager, env=make_env(ADMISSION_OP="native"))
    assert picked == [("native", DEVICE)]
    manager.finish_start_up()
    num_warmed = len(calls)
    assert num_warmed
    batch = make_batch([K, K])
    trimming_step(manager, batch, 0.5)
    manager.invalid_drafts(make_input_batch(batch))
    assert len(calls) == num_warmed + 1


def test_start_up_warms_the_kernel_before_capacity_may_run(monkeypatch):
    manager = build()
    manager.costs.ready = False
    warmed = Calls()
    monkeypatch.setattr(module, "warm_up", lambda *a, **k: warmed(manager.costs.ready))
    manager.finish_start_up()
    assert warmed == [((False,), {})]
    assert manager.costs.ready


@pytest.mark.parametrize("rank, interval, logs", [(0, 10, 1), (1, 10, 0), (0, 0, 0)])
def test_rank_0_alone_logs_and_only_if_asked(monkeypatch, rank, interval, logs):
    noted = []
    monkeypatch.setattr(
        module.CapacityLog, "note", lambda self, **figures: noted.append(figures)
    )
    env = make_env(CAPACITY_LOG_INTERVAL=interval, CAPACITY_ACTIVATION_BATCH_SIZE=2)
    manager = build(env=env, group=FakeGroup(world_size=2, rank_in_group=rank))
    manager.plan_step(make_batch([K]))
    trimming_step(manager, make_batch([K, K]), 0.5)
    assert len(noted) == 3 * logs
    if logs:
        below, _, trimmed = noted
        assert below["depth"] is None and below["num_decodes"] == 1
        assert trimmed["depth"] == K and trimmed["knee"] == 2
        assert (trimmed["num_drafts"], trimmed["draft_budget"]) == (2 * K, K)
        assert trimmed["ratio"] is None, "fraction mode has no costs to compare"
