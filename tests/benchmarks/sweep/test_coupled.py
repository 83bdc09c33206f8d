# SPDX-License-Identifier: Apache-2.0
"""The kernels of coupled acceptance against the world that the simulator uses."""

import numpy as np
import pytest
import torch

from benchmarks.acceptance.world import World, sigmoid
from benchmarks.sweep.coupled import CoupledAcceptance
from tests.helpers.capacity_cases import DEVICE

WORLD = World.with_profile(
    spread_request=1.0,
    spread_position=1.0,
    confidence_scale=1.7,
    confidence_shift=-0.3,
)
SLOTS = 40
# Beyond 32 bits and below 0: both sides keep the low 32 bits.
SEEDS = np.concatenate(
    (np.arange(SLOTS - 2) + 65536 * 40_000, [2**40 + 7, -(2**35) + 3])
)


def tensor(values, dtype=torch.int64):
    return torch.as_tensor(np.asarray(values), dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_reported_confidence_is_the_worlds(depth):
    rng = np.random.default_rng(depth)
    slots, first = rng.permutation(SLOTS)[:33], rng.integers(5, 3000, 33)
    positions = (first[:, None] + np.arange(depth)).ravel()
    rows = np.concatenate((np.repeat(slots, depth), [-1] * depth))  # padding
    found = CoupledAcceptance(WORLD).report_confidence(
        tensor(rows, torch.int32),
        tensor(np.concatenate((positions, [0] * depth))),
        tensor(SEEDS),
        depth,
    )
    expected = sigmoid(WORLD.reported(WORLD.true_logits(SEEDS[slots], first)))
    np.testing.assert_allclose(
        found.cpu().numpy()[: 33 * depth].reshape(33, depth),
        expected[:, :depth],
        atol=2e-5,
    )
    assert torch.isfinite(found).all()


def test_rejected_drafts_are_the_worlds_at_any_width():
    rng = np.random.default_rng(0)
    slots, first = np.arange(SLOTS), rng.integers(5, 3000, SLOTS)
    widths = rng.integers(0, 8, SLOTS)
    local = np.concatenate([np.arange(w + 1) for w in widths])
    rows = np.repeat(slots, widths + 1)
    tokens = tensor(np.arange(len(rows)) + 100)
    before = tokens.clone()
    CoupledAcceptance(WORLD).reject_drafts(
        tokens,
        tensor(first[rows] + local - 1),
        tensor(rows, torch.int32),
        tensor(local, torch.int32),
        tensor(SEEDS),
    )
    kept = (tokens == before).cpu().numpy()
    assert (tokens[~(tokens == before)] == -1).all() and kept[local == 0].all()
    starts = np.cumsum(widths + 1) - widths - 1
    accepted = [
        int(np.logical_and.accumulate(kept[s + 1 : s + 1 + w]).sum())
        for s, w in zip(starts, widths, strict=True)
    ]
    logits = WORLD.true_logits(SEEDS, first)
    expected = WORLD.accepted_prefix(logits, SEEDS, first, widths)
    np.testing.assert_array_equal(accepted, expected)
    assert 0 < sum(accepted) < widths.sum()
