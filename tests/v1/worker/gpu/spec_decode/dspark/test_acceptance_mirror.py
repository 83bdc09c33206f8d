# SPDX-License-Identifier: Apache-2.0
"""Acceptance by position, learned from what steps judged."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.capacity_cases import DEVICE, MAX_NUM_REQS, K
from vllm.v1.worker.gpu.spec_decode.dspark.acceptance_mirror import AcceptanceMirror
from vllm.v1.worker.gpu.spec_decode.dspark.survival_history import (
    PRIOR_CONFIDENCE,
    PRIOR_DECAY,
    PRIOR_WEIGHT,
)

START = [PRIOR_CONFIDENCE ** (k + 1) for k in range(K)]
# Decays the assumed confidence to nothing.
MANY_ROUNDS = 3000
DECODES = np.ones(1, dtype=bool)


def make_mirror(num_bonus_tokens=1):
    return AcceptanceMirror(MAX_NUM_REQS, K, DEVICE, num_bonus_tokens=num_bonus_tokens)


def counts(accepted, judged, bonus=1):
    """Return what the sampler reports for drafts judged and accepted."""
    accepted, judged = torch.tensor(accepted), torch.tensor(judged)
    int32 = {"dtype": torch.int32, "device": DEVICE}
    return (accepted + bonus).to(**int32), (judged - accepted).to(**int32)


def publish(mirror, accepted, judged):
    mirror.land()
    mirror.publish(*counts(accepted, judged), np.ones(len(accepted), dtype=bool))


def learned(accepted, judged, rounds=MANY_ROUNDS):
    mirror = make_mirror()
    for _ in range(rounds):
        publish(mirror, accepted, judged)
    return mirror


def test_every_request_is_expected_to_fare_like_the_recent_ones():
    mirror = make_mirror()
    survival = mirror.survival_probs(np.array([5, 0, 3]))
    assert survival == pytest.approx(np.array([START] * 3))
    publish(mirror, [0, 4], [K, K])
    publish(mirror, [0, 4], [K, K])
    mirror.land()
    rows = mirror.survival_probs(np.array([5, 0]))
    assert rows[0].tolist() == rows[1].tolist() == mirror.prior.tolist()
    assert mirror.prior.tolist() != pytest.approx(START)


def test_the_latest_round_is_not_known_yet():
    mirror = make_mirror()
    for _ in range(2):
        mirror.land()
        assert mirror.prior == pytest.approx(START)
        mirror.publish(*counts([0], [K]), DECODES)
    mirror.land()
    weight = PRIOR_WEIGHT * PRIOR_DECAY
    assert mirror.prior[0] == pytest.approx(weight * PRIOR_CONFIDENCE / (weight + 1))


def test_a_position_counts_where_it_was_reached_and_judged():
    # Accepted of judged: 2 of 3, 3 of 3, 0 of 1. Position 3 was judged nowhere.
    mirror = learned([2, 3, 0], [3, 3, 1])
    confidence = mirror._prior.confidence
    assert confidence[:3] == pytest.approx([2 / 3, 1.0, 1 / 2], abs=1e-3)
    assert confidence[3] == pytest.approx(PRIOR_CONFIDENCE), "nothing is known of it"
    assert mirror.prior == pytest.approx(np.cumprod(confidence))


def test_placeholders_at_the_end_of_a_prompt_teach_nothing():
    """They are no drafts, so that they were not accepted says nothing of drafts."""
    mirrors = make_mirror(), make_mirror()
    for mirror, placeholders in zip(mirrors, ([], [K]), strict=True):
        decoding = np.array([True] + [False] * len(placeholders))
        for _ in range(3):
            mirror.land()
            accepted = [2] + [0] * len(placeholders)
            mirror.publish(*counts(accepted, [K, *placeholders]), decoding)
    assert mirrors[0].prior.tolist() == mirrors[1].prior.tolist()
    assert mirrors[0].prior.tolist() != pytest.approx(START), "premise"
    nobody = make_mirror()
    for _ in range(3):
        nobody.land()
        nobody.publish(*counts([0], [K]), ~DECODES)
    assert nobody.prior == pytest.approx(START)


def test_requests_without_drafts_teach_nothing():
    # The second ends its prompt (one token); the third is within it (none).
    mirror = make_mirror()
    for _ in range(4):
        mirror.land()
        sampled = torch.tensor([1, 1, 0], dtype=torch.int32, device=DEVICE)
        mirror.publish(sampled, torch.zeros_like(sampled), np.ones(len(sampled), bool))
    mirror.land()
    assert mirror.prior == pytest.approx(START)


def test_bonus_tokens_are_no_drafts():
    mirror = make_mirror(num_bonus_tokens=2)
    for _ in range(MANY_ROUNDS):
        mirror.land()
        mirror.publish(*counts([1], [2], bonus=2), DECODES)
    assert mirror._prior.confidence[:2] == pytest.approx([1.0, 0.0], abs=1e-3)


def test_what_was_learned_outlasts_a_pause_and_what_is_in_flight_does_not():
    mirror = learned([0], [K], rounds=10)
    before = mirror.prior.tolist()
    mirror.restart()
    mirror.land()
    assert mirror.prior.tolist() == before
    assert mirror._prior.confidence[0] < PRIOR_CONFIDENCE, "premise"


@pytest.mark.parametrize("paused", [False, True])
def test_a_round_stands_for_the_steps_since_the_one_before_it_but_for_a_pause(paused):
    weights = []
    for num_skipped in (0, 5):
        mirror = make_mirror()
        for _ in range(num_skipped):
            mirror.skip_step()
        if paused:
            mirror.restart()
        publish(mirror, [0], [K])
        publish(mirror, [0], [K])
        mirror.land()
        weights.append(mirror.prior[0])
    # The more steps a round without acceptance stands for, the less is expected.
    assert weights[1] == weights[0] if paused else weights[1] < weights[0]


def test_publishing_again_and_again_without_landing_loses_no_round():
    mirror = make_mirror()
    for serial in range(1, 11):
        mirror.publish(
            *counts([0] * MAX_NUM_REQS, [1] * MAX_NUM_REQS), np.ones(MAX_NUM_REQS, bool)
        )
        assert mirror.serial == serial
    mirror.land()
    weight, total = PRIOR_WEIGHT, PRIOR_WEIGHT * PRIOR_CONFIDENCE
    for _ in range(9):
        weight, total = PRIOR_DECAY * weight + 1, PRIOR_DECAY * total
    assert mirror.prior[0] == pytest.approx(total / weight)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_learning_equals_counting_in_loops(seed):
    rng = np.random.default_rng(seed)
    mirror = make_mirror()
    weight = [PRIOR_WEIGHT] * K
    total = [PRIOR_WEIGHT * PRIOR_CONFIDENCE] * K
    for _ in range(6):
        num_reqs = int(rng.integers(1, MAX_NUM_REQS + 1))
        judged = rng.integers(0, K + 1, num_reqs)
        accepted = rng.integers(0, judged + 1)
        publish(mirror, accepted, judged)
        for k in range(int(judged.max())):
            rows = [
                a > k for a, j in zip(accepted, judged, strict=True) if a >= k and j > k
            ]
            weight[k] = PRIOR_DECAY * weight[k] + len(rows) / num_reqs
            total[k] = PRIOR_DECAY * total[k] + sum(rows) / num_reqs
    publish(mirror, [0], [0])  # so that the last round lands
    mirror.land()
    expected = np.cumprod(np.array(total) / np.array(weight))
    assert mirror.prior == pytest.approx(expected, rel=1e-5)
