# SPDX-License-Identifier: Apache-2.0
"""The calibration kernels: equal to the references, and each exclusion by itself."""

import numpy as np
import pytest
import torch

from tests.helpers.sts_cases import draw_rows, random_calibration, ring_of
from vllm.v1.worker.gpu.spec_decode.dspark import sts_fit, sts_kernels, sts_reference
from vllm.v1.worker.gpu.spec_decode.dspark.sts_fit import (
    GradedRows,
    fit_calibration,
    survival_probs,
)
from vllm.v1.worker.gpu.spec_decode.dspark.sts_fit_kernel import fit_confidences
from vllm.v1.worker.gpu.spec_decode.dspark.sts_kernels import (
    calibrate_confidences,
    observe_drafts,
    runs_sts_kernels,
)
from vllm.v1.worker.gpu.spec_decode.dspark.sts_reference import (
    DEPTH_BITS,
    RING_ROWS,
    DraftRing,
    JudgedDrafts,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
K, S = 5, 6


def test_premise_the_kernels_run_here():
    assert runs_sts_kernels(DEVICE)


# ---- calibrate --------------------------------------------------------------------


@pytest.mark.parametrize("num_reqs, depth", [(2, 1), (3, K), (40, 3), (64, K)])
def test_calibrated_confidences_equal_the_reference(num_reqs, depth):
    rng = np.random.default_rng(num_reqs)
    probs = torch.from_numpy(rng.random((num_reqs, K)).astype(np.float32))
    probs[0, 0] = float("nan")
    probs[-1, depth - 1] = 1.0
    slots = torch.from_numpy(rng.integers(-1, S, (num_reqs, depth)))
    calibration = random_calibration(rng, K)
    temperature = torch.tensor([0.0, 0.7] * (S // 2))
    results = []
    for function in (
        calibrate_confidences,
        sts_reference.calibrate_confidences_reference,
    ):
        out = probs.clone().to(DEVICE)
        logits = torch.full((num_reqs + 2, K), -77.0, device=DEVICE)
        function(
            slots.to(DEVICE)[:, 0],
            temperature.to(DEVICE),
            calibration.to(DEVICE),
            probs_out=out[:, :depth],
            logits_out=logits,
        )
        results.append((out.cpu(), logits.cpu()))
    # Logits of almost certain drafts keep few bits of a float32 probability.
    torch.testing.assert_close(
        results[0], results[1], atol=2e-3, rtol=1e-4, equal_nan=True
    )
    out, logits = results[0]
    assert out[0, 0].isnan() and torch.isfinite(out[1:, :depth]).all()
    torch.testing.assert_close(out[:, depth:], probs[:, depth:], equal_nan=True)
    assert (logits[:, depth:] == -77.0).all() and (logits[num_reqs:] == -77.0).all()


def test_a_bend_changes_nothing_at_one_half_and_the_slopes_beyond():
    calibration = torch.zeros(2, 3, 3, device=DEVICE)
    calibration[:, 0], calibration[:, 2] = 1.0, 0.5
    far = float(np.log(0.999 / 0.001))
    probs = torch.tensor([[0.001, 0.5, 0.999]], device=DEVICE)
    slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    temperature = torch.zeros(1, device=DEVICE)
    logits = torch.zeros(1, 3, device=DEVICE)
    calibrate_confidences(
        slots, temperature, calibration, probs_out=probs, logits_out=logits
    )
    # Far out the bend adds half of |logit| - 2 log 2.
    offset = -float(np.log(2.0))
    expected = torch.tensor([[-0.5 * far + offset, 0.0, 1.5 * far + offset]])
    torch.testing.assert_close(torch.logit(probs).cpu(), expected, atol=0.01, rtol=1e-3)


def test_without_a_bend_it_is_a_scale_and_a_bias():
    probs = torch.linspace(0.01, 0.99, K, device=DEVICE)[None]
    expected = torch.sigmoid(1.7 * torch.logit(probs) - 0.4)
    calibration = torch.tensor([1.7, -0.4, 0.0], device=DEVICE)[None, :, None]
    calibrate_confidences(
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
        torch.zeros(1, device=DEVICE),
        calibration.repeat(2, 1, K),
        probs_out=probs,
        logits_out=probs.clone(),
    )
    torch.testing.assert_close(probs, expected, atol=1e-5, rtol=0)


def test_greedy_and_sampled_rows_are_calibrated_apart():
    calibration = torch.zeros(2, 3, K, device=DEVICE)
    calibration[:, 0], calibration[1, 1] = 1.0, 2.0
    probs = torch.full((2, K), 0.5, device=DEVICE)
    slots = torch.tensor([1, 0], device=DEVICE)
    temperature = torch.tensor([0.8, 0.0], device=DEVICE)
    calibrate_confidences(
        slots, temperature, calibration, probs_out=probs, logits_out=probs.clone()
    )
    expected = torch.tensor([0.5, 0.8808], device=DEVICE)
    torch.testing.assert_close(probs, expected[:, None].expand(2, K), atol=1e-4, rtol=0)


# ---- observe ----------------------------------------------------------------------


class Case:
    """Two requests, greedy in slot 4 and sampled in slot 1, drafted at full depth."""

    def __init__(self, depth=K):
        self.ring = DraftRing.empty(S, K, DEVICE)
        self.temperature = torch.tensor([0, 1.0, 0, 0, 0, 0], device=DEVICE)
        self.drafted = torch.arange(2 * K, device=DEVICE).view(2, K).float()
        self.step(None, depth=depth)

    def step(self, sampled, rejected=(0, 0), stamp=1, depth=K, slots=(4, 1), **more):
        """Judge, then draft; ``sampled`` None is a step that judges nothing."""

        def int32(values):
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        judged = JudgedDrafts(
            torch.tensor(slots, device=DEVICE),
            int32((1, 1) if sampled is None else sampled),
            int32(rejected),
            **{k: int32(v) for k, v in more.items() if k in ("capacities", "excluded")},
        )
        observe_drafts(
            judged,
            self.drafted,
            self.temperature,
            self.ring,
            stamp=stamp,
            draft_depth=depth,
            **{k: v for k, v in more.items() if k.startswith("sample")},
        )

    def graded(self):
        """Return [accepted, verified] of each row by class."""
        found = []
        for group in (0, 1):
            rows = self.ring.graded_rows(group)
            found.append(np.stack([rows.accepted, rows.verified], axis=1).tolist())
        return found


def test_a_judged_row_is_graded_with_the_logits_it_was_drafted_with():
    case = Case()
    case.step((3, 6), (3, 0))
    assert case.graded() == [[[2, K]], [[5, K]]]
    logits = [case.ring.graded_rows(group).logits[0].tolist() for group in (0, 1)]
    assert logits == case.drafted.tolist()


def test_the_step_that_begins_publishing_grades_nothing():
    assert Case().graded() == [[], []]


def test_rows_drafted_before_publishing_paused_are_never_graded():
    case = Case()
    case.step((3, 3), (3, 3), stamp=2)
    assert case.graded() == [[], []]
    case.step((3, 3), (3, 3), stamp=2)
    assert case.graded() == [[[2, K]], [[2, K]]], "premise: the next ones are"


def test_a_new_request_in_a_slot_is_not_graded_by_the_former_one():
    case = Case()
    case.ring.slot_stamp[4] = 0
    case.step((1, 2), (K, K - 1))
    assert case.graded() == [[], [[1, K]]]


def test_grammar_rows_are_never_graded():
    case = Case()
    case.step((3, 3), (3, 3), excluded=(1, 0))
    assert case.graded() == [[], [[2, K]]]


def test_masked_drafts_are_never_graded():
    # Mask mode counts drafts beyond the capacity as rejected.
    case = Case()
    case.step((3, 3), (3, 3), capacities=(2, 0))
    assert case.graded() == [[[2, 2]], []]


def test_trimmed_drafts_are_never_graded():
    # Varlen: two of five drafts were verified, both accepted.
    case = Case()
    case.step((3, 1), (0, 0))
    assert case.graded() == [[[2, 2]], []]
    rows = case.ring.graded_rows(0)
    assert rows.logits[0].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]


def test_drafts_of_depth_zero_are_never_graded():
    case = Case(depth=0)
    case.step((2, 1), (1, K))
    assert case.graded() == [[], []]


def test_positions_beyond_the_depth_are_never_graded():
    case = Case(depth=2)
    case.step((5, 1), (1, 3))
    assert case.graded() == [[[2, 2]], [[0, 2]]]


def test_prefilling_rows_are_never_graded():
    case = Case()
    case.step((0, 0), (0, 0))
    assert case.graded() == [[], []]


def test_nothing_from_a_nan_confidence_on_is_graded():
    case = Case()
    case.drafted[0, 2], case.drafted[1, 0] = float("nan"), float("nan")
    case.step(None)
    case.step((5, 5), (1, 1))
    assert case.graded() == [[[2, 2]], []]


def test_a_request_left_out_of_a_step_is_graded_when_it_is_judged():
    case = Case()
    case.step((3,), (3,), slots=(4,))
    assert case.graded() == [[[2, K]], []]
    case.step((2,), (4,), slots=(1,))
    assert case.graded() == [[[2, K]], [[1, K]]]


def test_a_stride_grades_every_row_once_in_as_many_steps():
    case = Case()
    case.step((3, 3), (3, 3), sample_stride=2, sample_offset=0)
    assert case.graded() == [[[2, K]], []]
    case.step((3, 3), (3, 3), sample_stride=2, sample_offset=1)
    assert case.graded() == [[[2, K]], [[2, K]]]


# ---- fit --------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [0, 1, 700, RING_ROWS + 900])
@pytest.mark.parametrize("bend", [0.7, 1.5])
def test_fit_equals_the_reference(num_rows, bend):
    ring = ring_of(
        draw_rows(num_rows, K, scale=2.5, trim=0.3),
        draw_rows(num_rows, K, bias=-1.5, bend=bend),
        device=DEVICE,
    )
    prior = torch.zeros(2, 3, K)
    prior[:, 0] = 1.0
    results = []
    for function in (fit_confidences, sts_reference.fit_confidences_reference):
        found = prior.clone().to(DEVICE)
        for _ in range(2):
            function(ring, prior.to(DEVICE), calibration_out=found)
        results.append(found.cpu())
    torch.testing.assert_close(results[0], results[1], atol=2e-3, rtol=2e-3)
    if num_rows > 1:
        expected = fit_calibration(
            ring.graded_rows(1), prior[1].numpy(), prior[1].numpy()
        )
        assert np.abs(expected[1, :2] + 1.5).max() < 0.5, "premise: the fit moves"
        assert expected[2, 0] > 0.2, "premise: the bend too"
        at_bound = expected[2] == sts_fit.MAX_BEND
        assert at_bound.any() == (bend > 1.0), "premise: the bound is met too"
    if num_rows == 0:
        torch.testing.assert_close(results[0], prior)


def test_the_ring_keeps_the_newest_rows_oldest_first():
    rows = draw_rows(RING_ROWS + 5, K)
    kept = ring_of(rows, rows).graded_rows(0)
    np.testing.assert_allclose(kept.logits, rows.logits[5:], rtol=1e-6)


def test_depths_fit_a_stamp():
    assert sts_reference.MAX_STS_STEPS < 1 << DEPTH_BITS
    assert sts_kernels.RING_ROWS & (sts_kernels.RING_ROWS - 1) == 0


def test_float32_keeps_a_bend_that_no_row_can_tell_from_a_scale():
    # All logits far above 1/2 and nearly alike: scale, bias and bend are one there,
    # and a determinant of the three would be what rounding leaves.
    rng = np.random.default_rng(0)
    logits = rng.normal(12.0, 0.05, size=(RING_ROWS, K))
    accepted = np.cumprod(rng.random(logits.shape) < 0.9, axis=1).sum(axis=1)
    rows = GradedRows(logits, accepted, np.full(RING_ROWS, K))
    ring = ring_of(rows, rows, device=DEVICE)
    prior = torch.zeros(2, 3, K, device=DEVICE)
    prior[:, 0] = 1.0
    found = prior.clone()
    for _ in range(6):
        fit_confidences(ring, prior, calibration_out=found)
    assert torch.isfinite(found).all()
    survival = survival_probs(logits, found[0].cpu().numpy().astype(np.float64))
    rates = [np.average(accepted > k, weights=rows.weights()) for k in range(K)]
    np.testing.assert_allclose(survival.mean(axis=0), rates, atol=0.01)
