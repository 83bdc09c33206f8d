# SPDX-License-Identifier: Apache-2.0
"""The acceptance model meets its mean profile and is the same world for all arms."""

import json

import numpy as np
import pytest
from scipy import stats

from benchmarks.acceptance.world import DEFAULT_PROFILE, World, sigmoid

NUM_REQS, POSITIONS = 4000, np.arange(100, 180, 8)
SPREADS = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (1.5, 0.5)]


def world(request=1.0, position=1.0, **changes):
    return World.with_profile(
        spread_request=request, spread_position=position, **changes
    )


@pytest.mark.parametrize(("request_", "position"), SPREADS)
def test_mean_of_prefix_survival_is_the_profile(request_, position):
    seeds = np.arange(NUM_REQS)
    model = world(request_, position)
    survival = np.mean(
        [
            np.cumprod(sigmoid(model.true_logits(seeds, np.full(NUM_REQS, p))), axis=1)
            for p in POSITIONS
        ],
        axis=(0, 1),
    )
    # 4000 requests of spread 1: the mean's standard error is below 0.005.
    np.testing.assert_allclose(survival, DEFAULT_PROFILE, atol=0.015)
    if not (request_ or position):
        np.testing.assert_allclose(survival, DEFAULT_PROFILE, rtol=1e-9)


def test_spread_by_request_and_by_position_show_in_the_logits():
    seeds, first = np.arange(2000), np.full(2000, 64)
    by_request = world(1.0, 0.0).true_logits(seeds, first)
    by_position = world(0.0, 1.0).true_logits(seeds, first)
    # One difficulty for all positions of a request, or one for each.
    assert np.ptp(by_request - by_request[:, :1], axis=0).max() < 1e-9
    np.testing.assert_allclose(by_request.std(axis=0), 1.0, atol=0.05)
    np.testing.assert_allclose(by_position.std(axis=0), 1.0, atol=0.05)
    assert abs(np.corrcoef(by_position[:, 0], by_position[:, 1])[0, 1]) < 0.06


def test_accepted_share_is_the_true_probability():
    model, seeds = world(), np.arange(20_000)
    first = np.full(len(seeds), 77)
    logits = model.true_logits(seeds, first)
    accepted = model.accepted_prefix(logits, seeds, first, np.full(len(seeds), 1))
    truth = sigmoid(logits[:, 0])
    bins = np.quantile(truth, np.linspace(0, 1, 11))
    where = np.clip(np.searchsorted(bins, truth) - 1, 0, 9)
    expected = np.bincount(where, truth)
    variance = np.bincount(where, truth * (1 - truth))
    chi_square = ((np.bincount(where, accepted) - expected) ** 2 / variance).sum()
    assert stats.chi2.sf(chi_square, 10) > 1e-3


def test_a_narrower_draft_accepts_a_prefix_of_the_wider():
    model, seeds = world(), np.arange(500)
    first = np.full(len(seeds), 64)
    logits = model.true_logits(seeds, first)
    wide = model.accepted_prefix(logits, seeds, first, np.full(500, 7))
    narrow = model.accepted_prefix(logits, seeds, first, np.full(500, 3))
    np.testing.assert_array_equal(narrow, np.minimum(wide, 3))


def test_miscalibration_changes_the_report_only():
    honest, boasting = world(), world(confidence_scale=2.5, confidence_shift=1.0)
    seeds, first = np.arange(50), np.full(50, 64)
    logits = honest.true_logits(seeds, first)
    np.testing.assert_array_equal(logits, boasting.true_logits(seeds, first))
    np.testing.assert_allclose(boasting.reported(logits), 2.5 * logits + 1.0)
    np.testing.assert_array_equal(honest.reported(logits), logits)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"profile": []}, "profile"),
        ({"profile": [0.5, 0.6]}, "rise"),
        ({"profile": [1.2]}, "profile"),
        ({"profile": [0.5, 0.0]}, "profile"),
        ({"spread_request": -1.0}, "spread_request"),
        ({"spread_position": float("nan")}, "spread_position"),
        ({"confidence_scale": 0.0}, "confidence_scale"),
        ({"confidence_shift": float("inf")}, "confidence_shift"),
    ],
)
def test_bad_worlds_are_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        World.with_profile(**changes)


def test_json_keeps_a_world_exactly():
    world = World.with_profile(spread_request=0.3, spread_position=1.1).up_to(5)
    back = World.from_json(json.loads(json.dumps(world.to_json())))
    assert back.biases.tolist() == world.biases.tolist()
    assert back.to_json() == world.to_json()
