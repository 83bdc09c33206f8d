# SPDX-License-Identifier: Apache-2.0
"""The online calibration's host side: when it launches, forgets, fits and saves."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.capacity_cases import DEVICE
from tests.helpers.sts_cases import draw_rows, ring_of
from vllm.config.dspark_calibration import ConfidenceCalibration
from vllm.config.dspark_values import DSparkCapacityConfigError
from vllm.platforms.dspark_rehearsal.graphs import RehearsalEvent
from vllm.v1.worker.gpu.dspark_capacity_model_runner import DSparkCapacityModelRunner
from vllm.v1.worker.gpu.spec_decode.capacity import (
    VarlenCapacityManager,
)
from vllm.v1.worker.gpu.spec_decode.dspark import online_sts as module
from vllm.v1.worker.gpu.spec_decode.dspark.online_sts import (
    FIT_INTERVAL,
    MAX_ROWS_PER_STEP,
    OnlineSTS,
    calibration_tensor,
    make_online_sts,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_planner import FIXED, StepPlan
from vllm.v1.worker.gpu.spec_decode.dspark.sts_reference import JudgedDrafts
from vllm.v1.worker.gpu.spec_decode.mask_capacity import MaskCapacityManager

S, K = 40, 4
START = ConfidenceCalibration.uniform(K, 2.0)


@pytest.fixture
def sts():
    return make_sts()


def make_sts(**options):
    logits = torch.zeros(S, K, device=DEVICE)
    temperature = torch.zeros(S, device=DEVICE)
    calibration = calibration_tensor(START, DEVICE)
    return OnlineSTS(calibration, logits, temperature, **options)


def judged(num_reqs=2, accepted=1, rejected=1):
    counts = torch.ones(num_reqs, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(num_reqs, device=DEVICE)
    return JudgedDrafts(slots, counts * (accepted + 1), counts * rejected)


@pytest.fixture
def launches(monkeypatch):
    """Names of the launchers that were called, instead of calling them."""
    calls = []
    for name in ("observe_drafts", "fit_confidences"):
        monkeypatch.setattr(module, name, lambda *a, n=name, **k: calls.append((n, k)))
    return calls


def test_an_active_step_is_one_launch_and_two_where_it_refits(sts, launches):
    for step in range(1, 2 * FIT_INTERVAL + 1):
        launches.clear()
        sts.observe(judged(), K)
        fits = step % FIT_INTERVAL == 0
        expected = ["observe_drafts"] + ["fit_confidences"] * fits
        assert [name for name, _ in launches] == expected


def test_pausing_and_new_requests_in_a_pause_launch_nothing(sts, launches):
    sts.observe(judged(), K)
    launches.clear()
    before = sts.ring.slot_stamp.fill_(77).clone()
    sts.pause()
    sts.forget(1)
    assert not launches
    assert torch.equal(sts.ring.slot_stamp, before)


def test_a_pause_makes_every_slot_stale(sts):
    sts.observe(judged(), K)
    sts.observe(judged(), K)
    assert sts.ring.num_rows.tolist() == [2, 0], "premise"
    sts.pause()
    sts.observe(judged(), K)
    assert sts.ring.num_rows.tolist() == [2, 0]
    sts.observe(judged(), K)
    assert sts.ring.num_rows.tolist() == [4, 0]


def test_a_new_request_makes_its_slot_stale(sts):
    sts.observe(judged(), K)
    sts.forget(1)
    sts.observe(judged(), K)
    assert sts.ring.num_rows.tolist() == [1, 0]


def test_grammar_rows_are_left_out_of_one_step_only(sts):
    sts.observe(judged(3), K)
    sts.observe(judged(3), K, np.array([0, 2]))
    assert sts.ring.num_rows.tolist() == [1, 0]
    sts.observe(judged(3), K)
    assert sts.ring.num_rows.tolist() == [4, 0]


@pytest.mark.parametrize("num_reqs", [1, MAX_ROWS_PER_STEP, S])
def test_of_a_large_batch_some_rows_a_step_and_all_in_turn(sts, launches, num_reqs):
    stride = max(1, num_reqs // MAX_ROWS_PER_STEP)
    for _ in range(stride):
        sts.observe(judged(num_reqs), K)
    offsets = [options["sample_offset"] for _, options in launches]
    assert {options["sample_stride"] for _, options in launches} == {stride}
    assert sorted(offsets) == list(range(stride))


def test_rows_have_their_turn_where_every_other_step_grades_nothing(sts, launches):
    stride = S // MAX_ROWS_PER_STEP
    assert stride > 1 and stride % 2 == 0, "premise"
    for _ in range(2 * stride):
        sts.observe(judged(S), K)
        sts.observe(judged(S), K)
        sts.pause()
    offsets = [options["sample_offset"] for _, options in launches]
    assert set(offsets[1::2]) == set(range(stride))


def test_warming_up_changes_nothing(sts):
    sts.warm_up()
    assert torch.equal(sts.calibration, calibration_tensor(START, DEVICE))
    assert not any(t.any() for t in sts.ring.tensors())


def fill(sts, rows):
    for tensor, source in zip(
        sts.ring.tensors()[2:], ring_of(rows, rows).tensors()[2:], strict=True
    ):
        tensor.copy_(source)


def fit(sts):
    for _ in range(FIT_INTERVAL):
        sts.observe(judged(), 0)


def test_the_fit_writes_where_the_graph_reads_and_state_follows(sts):
    address = sts.calibration.data_ptr()
    assert sts.state_json() == START.to_json()
    fill(sts, draw_rows(900, K, scale=2.0, bias=1.0, bend=0.7))
    fit(sts)
    assert sts.calibration.data_ptr() == address
    assert (sts.calibration[:, 0, 0] > 1.0).all(), "premise: it moved"
    assert (sts.calibration[:, 2, 0] > 0.2).all(), "premise: the bend too"
    state = ConfidenceCalibration.from_json(sts.state_json())
    assert state.num_rows == (900, 900)
    torch.testing.assert_close(calibration_tensor(state, DEVICE), sts.calibration)


def test_saved_state_is_applied_and_is_where_a_fit_without_rows_stays(sts):
    fill(sts, draw_rows(900, K, scale=2.0))
    fit(sts)
    restarted = make_sts()
    address = restarted.calibration.data_ptr()
    restarted.load_state_json(sts.state_json())
    assert restarted.calibration.data_ptr() == address
    torch.testing.assert_close(restarted.calibration, sts.calibration)
    fit(restarted)
    torch.testing.assert_close(restarted.calibration, sts.calibration)
    assert restarted.current().num_rows == (900, 900)


def test_state_of_another_kind_is_refused(sts):
    for state in ({}, ConfidenceCalibration.uniform(K - 1).to_json()):
        with pytest.raises(DSparkCapacityConfigError):
            sts.load_state_json(state)


def test_log_lines_tell_temperatures_and_ece(monkeypatch):
    lines = []
    monkeypatch.setattr(torch.cuda, "Event", RehearsalEvent)  # one that can be polled
    monkeypatch.setattr(module.logger, "info", lambda text, *a: lines.append(text % a))
    sts = make_sts(log_interval_s=1e-6)
    fill(sts, draw_rows(900, K, scale=2.0))
    fit(sts)
    greedy = [line for line in lines if "greedy" in line]
    assert greedy and "(900 rows)" in greedy[-1]
    assert all(f"{name} " in greedy[-1] for name in ("temperature", "bias", "bend"))
    assert "cumulative ECE" in greedy[-1]


def test_without_an_interval_nothing_is_logged(sts, caplog):
    with caplog.at_level(logging.INFO):
        fit(sts)
    assert "calibration" not in caplog.text


# ---- who calibrates ---------------------------------------------------------------


def make_runner(*, use_online_sts=True, method="standard", reports_confidences=True):
    config = SimpleNamespace(
        reports_confidences=reports_confidences,
        capacity_config=SimpleNamespace(use_online_sts=use_online_sts),
        rejection_sample_method=method,
    )
    speculator = SimpleNamespace(
        calibration=calibration_tensor(START, DEVICE),
        confidence_logits=torch.zeros(S, K, device=DEVICE),
        temperature=torch.zeros(S, device=DEVICE),
    )
    return SimpleNamespace(speculative_config=config, speculator=speculator)


@pytest.mark.parametrize(
    ("rank", "options", "calibrates"),
    [
        (0, {}, True),
        (0, {"method": "block"}, True),
        (0, {"use_online_sts": False}, False),
        (0, {"reports_confidences": False}, False),
        (0, {"method": "synthetic"}, False),
        (1, {}, False),
    ],
)
def test_rank_0_calibrates_where_acceptance_is_real(
    monkeypatch, rank, options, calibrates
):
    group = SimpleNamespace(rank_in_group=rank)
    monkeypatch.setattr(module, "get_tp_group", lambda: group)
    runner = make_runner(**options)
    found = make_online_sts(runner)
    assert (found is not None) == calibrates
    if calibrates:
        assert found.calibration is runner.speculator.calibration


# ---- what the runner hands over ----------------------------------------------------


def calibrate(plan, *, manager=None, grammar=None, judged=True):
    """Return what ``DSparkCapacityModelRunner._calibrate`` called."""
    calls = []
    sts = SimpleNamespace(
        pause=lambda: calls.append("pause"),
        observe=lambda *args: calls.append(args),
    )
    counts = torch.ones(2, dtype=torch.int32)
    runner = SimpleNamespace(
        online_sts=sts,
        capacity=manager,
        _step_plan=plan,
        _num_judged=(counts, counts) if judged else None,
    )
    batch = SimpleNamespace(req_ids=["a", "b"], idx_mapping=torch.arange(2))
    DSparkCapacityModelRunner._calibrate(runner, batch, 3, grammar)
    assert runner._num_judged is None
    [call] = calls
    return call


def test_a_step_below_the_knee_pauses():
    assert calibrate(FIXED) == "pause"
    assert calibrate(StepPlan(active=True), judged=False) == "pause"


def test_a_step_that_is_not_published_pauses():
    """Else its drafts would be graded with the logits of an earlier round."""
    assert calibrate(StepPlan(active=True, publishes=False)) == "pause"
    assert calibrate(StepPlan(active=True)) != "pause", "premise"


def test_only_a_trimming_step_in_mask_mode_hands_over_capacities():
    manager = object.__new__(MaskCapacityManager)
    manager.capacities = torch.tensor([1, 0])
    trims = StepPlan(active=True, draft_budget=1)
    assert calibrate(trims, manager=manager)[0].capacities is manager.capacities
    assert calibrate(StepPlan(active=True), manager=manager)[0].capacities is None
    varlen = object.__new__(VarlenCapacityManager)
    assert calibrate(trims, manager=varlen)[0].capacities is None


def test_rows_of_a_grammar_are_named():
    grammar = SimpleNamespace(structured_output_request_ids=["b", "left"])
    judged, depth, rows = calibrate(StepPlan(active=True), grammar=grammar)
    assert (depth, rows.tolist()) == (3, [1])
    assert calibrate(StepPlan(active=True))[2] is None
