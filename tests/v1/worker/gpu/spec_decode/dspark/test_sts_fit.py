# SPDX-License-Identifier: Apache-2.0
"""The calibration fit against exact oracles: what it finds, and what it refuses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.sts_cases import draw_rows
from vllm.v1.worker.gpu.spec_decode.dspark import sts_fit
from vllm.v1.worker.gpu.spec_decode.dspark.sts_fit import (
    GradedRows,
    calibrated_logits,
    fit_calibration,
    sigmoid,
    survival_probs,
)

K = 4
IDENTITY = np.array([[1.0] * K, [0.0] * K, [0.0] * K])


def fit(rows, start=IDENTITY, prior=IDENTITY, rounds=4, **options):
    """Fit as an engine does: from where the last fit ended."""
    fitted = start
    for _ in range(rounds):
        fitted = fit_calibration(rows, fitted, prior, **options)
    return fitted


def oracle_loss(rows, calibration, k, prior=IDENTITY):
    """Penalised log loss of position k by the definition, row by row."""
    total = 0.0
    for i, weight in enumerate(rows.weights()):
        if rows.verified[i] <= k:
            continue
        survival = 1.0
        for j in range(k + 1):
            logit = np.clip(rows.logits[i, j], -sts_fit.MAX_LOGIT, sts_fit.MAX_LOGIT)
            u = calibration[0, j] * logit + calibration[1, j]
            bent = u + calibration[2, j] * 2.0 * np.log(np.cosh(0.5 * u))
            survival *= 1.0 / (1.0 + np.exp(-bent))
        likely = survival if rows.accepted[i] > k else 1.0 - survival
        total -= weight * np.log(max(likely, 1e-12))
    gaps = (calibration[:, k] - prior[:, k]) ** 2
    # A coin flip at z**2 = 2, and where a bend counts twice as much as a bias.
    return total + 0.5 * (0.5 * gaps[0] + 0.25 * gaps[1] + 1.0 * gaps[2])


@pytest.mark.parametrize("k", range(K))
@pytest.mark.parametrize(
    "case",
    [{"scale": 2.5}, {"scale": 0.4}, {"bias": -1.5}, {"trim": 0.6}, {"bend": 0.8}],
)
def test_no_grid_point_is_better_than_the_fit(case, k):
    rows = draw_rows(60, K, **case)
    fitted = fit(rows)
    best = oracle_loss(rows, fitted, k)
    for scale in np.geomspace(sts_fit.MIN_SCALE, sts_fit.MAX_SCALE, 9):
        for bias in np.linspace(-3.0, 3.0, 9):
            for bend in np.linspace(-sts_fit.MAX_BEND, sts_fit.MAX_BEND, 5):
                other = fitted.copy()
                other[:, k] = scale, bias, bend
                assert best <= oracle_loss(rows, other, k) + 1e-3


@pytest.mark.parametrize(
    "scale, bias, bend",
    [
        (2.5, 0.0, 0.0),
        (0.4, 0.0, 0.0),
        (1.0, 1.5, 0.0),
        (1.0, -1.5, 0.0),
        (1.0, 0.0, 0.7),
        (0.4, 1.0, 0.7),
        (2.5, -1.0, -0.5),
    ],
)
@pytest.mark.parametrize("trim", [0.0, 0.7])
def test_a_distorted_head_is_set_right(scale, bias, bend, trim):
    rows = draw_rows(40_000, K, scale=scale, bias=bias, bend=bend, trim=trim)
    fitted = fit(rows, decay=1.0)
    # Values that err together leave the survivals right.
    np.testing.assert_allclose(fitted[0], scale, rtol=0.25)
    np.testing.assert_allclose(fitted[1], bias, atol=0.35)
    np.testing.assert_allclose(fitted[2], bend, atol=0.3)
    u = np.linspace(-1.0, 3.0, 9)[:, None].repeat(K, axis=1)
    true = u + 2.0 * bend * np.log(np.cosh(0.5 * u))
    found = survival_probs((u - bias) / scale, fitted)
    np.testing.assert_allclose(found, np.cumprod(sigmoid(true), axis=1), atol=0.02)


@pytest.mark.parametrize("factor, shift", [(0.4, 0.0), (2.5, 0.0), (1.0, -1.5)])
def test_a_bent_head_is_fitted_alike_however_it_is_scaled_or_shifted(factor, shift):
    rows = draw_rows(4000, K, bend=0.7)
    distorted = GradedRows(factor * rows.logits + shift, rows.accepted, rows.verified)
    straight, found = fit(rows), fit(distorted)
    assert straight[2, 0] > 0.4, "premise: there is a bend"
    survivals = [
        survival_probs(r.logits, c) for r, c in ((rows, straight), (distorted, found))
    ]
    np.testing.assert_allclose(*survivals, atol=0.03)


def test_a_bend_at_its_bound_does_not_mislead_scale_and_bias():
    # The slope below one half vanishes, which no bend reaches.
    rng = np.random.default_rng(1)
    u = rng.normal(0.5, 2.0, size=(6000, 1))
    hits = rng.random(u.shape) < sigmoid(np.maximum(2.0 * u, 0.0) - 1.4)
    rows = GradedRows(u, hits.sum(axis=1), np.ones(len(u), dtype=int))
    start = IDENTITY[:, :1]
    fitted = fit(rows, start, start, rounds=6)
    assert fitted[2, 0] == sts_fit.MAX_BEND, "premise"
    best = oracle_loss(rows, fitted, 0, start)
    for change in ((0.02, 0.0), (-0.02, 0.0), (0.0, 0.02), (0.0, -0.02)):
        other = fitted + np.array([*change, 0.0])[:, None]
        assert best <= oracle_loss(rows, other, 0, start) + 1e-6


def test_trimmed_rows_do_not_lower_deep_confidences():
    rows = draw_rows(40_000, K, trim=0.9, seed=3)
    known_failures = (rows.accepted < rows.verified) & (rows.verified < K)
    assert known_failures.mean() > 0.1, "premise: outcomes that could be misused"
    # What goes wrong when their failures count beyond their capacity.
    verified = np.where(known_failures, K, rows.verified)
    misused = fit(GradedRows(rows.logits, rows.accepted, verified), decay=1.0)
    right = fit(rows, decay=1.0)
    deep = np.full((1, K), 0.5)
    true = np.cumprod(sigmoid(deep))[-1]
    assert abs(survival_probs(deep, right)[0, -1] - true) < 0.02
    assert survival_probs(deep, misused)[0, -1] < true - 0.05


def test_errors_shared_along_a_row_are_taken_up_by_the_cumulative_fit():
    # One hidden factor decides all drafts of a row: the conditional confidences are
    # right on average, and their product is not.
    rng = np.random.default_rng(0)
    hits = np.repeat(rng.random((30_000, 1)) < 0.7, K, axis=1)
    rows = GradedRows(np.full(hits.shape, 1.0), hits.sum(1), np.full(len(hits), K))
    survival = survival_probs(rows.logits[:1], fit(rows, decay=1.0))[0]
    np.testing.assert_allclose(survival, 0.7, atol=0.02)


def test_a_position_never_depends_on_later_ones():
    rows = draw_rows(300, K)
    other = draw_rows(300, K, seed=9)
    mixed = GradedRows(
        np.concatenate([rows.logits[:, :2], other.logits[:, 2:]], axis=1),
        np.minimum(rows.accepted, 2),
        np.minimum(rows.verified, 2),
    )
    np.testing.assert_array_equal(fit(rows)[:, :2], fit(mixed)[:, :2])
    assert (fit(mixed)[:, 2:] == IDENTITY[:, 2:]).all(), "premise: nothing is known"


def test_without_rows_the_start_stays():
    start = np.array([[0.7] * K, [0.3] * K, [0.2] * K])
    rows = draw_rows(0, K)
    np.testing.assert_allclose(fit(rows, start, start), start)


@pytest.mark.parametrize("logit", [-2.0, 0.0, 2.0, 9.0])
@pytest.mark.parametrize("hit", [False, True])
def test_one_row_moves_little_and_stays_finite(hit, logit):
    rows = GradedRows(np.full((1, K), logit), np.array([K * hit]), np.array([K]))
    fitted = fit(rows, rounds=50)
    surprising = logit == 9.0 and not hit
    assert np.abs(fitted[0] - 1.0).max() < (1.0 if surprising else 0.9)
    # The prior is one row too, so that the two meet half-way.
    assert np.abs(fitted[1]).max() < 1.5
    assert np.abs(fitted[2]).max() < (1.0 if surprising else 0.5)


ROWS = st.lists(
    st.tuples(
        st.lists(st.floats(-50, 50), min_size=K, max_size=K),
        st.integers(0, K),
        st.integers(0, K),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(rows=ROWS)
def test_whatever_the_rows_the_fit_is_bounded_and_no_worse_than_its_start(rows):
    logits = np.array([row[0] for row in rows]).reshape(-1, K)
    accepted = np.array([min(row[1:]) for row in rows], dtype=int)
    verified = np.array([max(row[1:]) for row in rows], dtype=int)
    graded = GradedRows(logits, accepted, verified)
    fitted = fit(graded)
    assert (fitted[0] >= sts_fit.MIN_SCALE).all()
    assert (fitted[0] <= sts_fit.MAX_SCALE).all()
    assert (np.abs(fitted[1]) <= sts_fit.MAX_BIAS).all()
    assert (np.abs(fitted[2]) <= sts_fit.MAX_BEND).all()
    for k in range(K):
        unmoved = fitted.copy()
        unmoved[:, k] = IDENTITY[:, k]
        before, after = (oracle_loss(graded, c, k) for c in (unmoved, fitted))
        assert after <= before + 1e-6 * max(1.0, before)


def test_newer_rows_count_more():
    old, new = draw_rows(3000, K, bias=2.0), draw_rows(8000, K, bias=-1.0, seed=1)
    both = GradedRows(
        *(
            np.concatenate([getattr(old, name), getattr(new, name)])
            for name in ("logits", "accepted", "verified")
        )
    )
    drifted, steady = fit(both), fit(both, decay=1.0)
    np.testing.assert_allclose(drifted[1], -1.0, atol=0.4)
    assert (steady[1] > drifted[1] + 0.5).all()


@pytest.mark.parametrize("bend", [-0.8, 0.0, 0.8])
def test_order_within_a_position_is_kept(bend):
    logits = np.linspace(-12, 12, 200)[:, None].repeat(K, axis=1)
    fitted = fit(draw_rows(400, K, scale=0.3, bias=-2.0, bend=bend))
    assert (np.diff(calibrated_logits(logits, fitted), axis=0) > 0).all()
