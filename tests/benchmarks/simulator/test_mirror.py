# SPDX-License-Identifier: Apache-2.0
"""The simulator's mirror replays random rounds exactly as the product's does."""

import numpy as np
import pytest
import torch

from benchmarks.simulator.mirror import HostMirror
from tests.helpers.capacity_cases import DEVICE
from vllm.v1.worker.gpu.spec_decode.dspark.confidence_mirror import ConfidenceMirror

S, K = 6, 4


def same(ours, theirs, slots):
    np.testing.assert_allclose(ours.prior, theirs.prior, rtol=1e-5)
    np.testing.assert_allclose(
        ours.survival_probs(slots), theirs.survival_probs(slots), rtol=1e-5
    )
    assert ours.all_fresh(slots) == theirs.all_fresh(slots)
    np.testing.assert_array_equal(ours.probs, theirs.probs.cpu().numpy())


@pytest.mark.parametrize("seed", range(8))
def test_replays_random_rounds_as_the_product(seed):
    rng = np.random.default_rng(seed)
    ours, theirs = HostMirror(S, K), ConfidenceMirror(S, K, DEVICE)
    reset = restarted = left_out = 0
    for _ in range(60):
        if rng.random() < 0.2:  # between a round and its landing
            slot, publishing = int(rng.integers(S)), bool(rng.integers(2))
            for mirror in (ours, theirs):
                mirror.reset_slot(slot, publishing=publishing)
        if rng.random() < 0.1:
            restarted += 1
            for mirror in (ours, theirs):
                mirror.restart()
        for mirror in (ours, theirs):
            mirror.land()
        same(ours, theirs, np.arange(S))
        if rng.random() < 0.2:
            reset += 1
            slot, publishing = int(rng.integers(S)), bool(rng.integers(2))
            for mirror in (ours, theirs):
                mirror.reset_slot(slot, publishing=publishing)
        slots = rng.permutation(S)[: rng.integers(1, S + 1)]
        left_out += len(slots) < S
        depth = int(rng.integers(1, K + 1))
        probs = rng.random((len(slots), K), dtype=np.float32)
        ours.publish(probs, slots, depth)
        theirs.publish(
            torch.as_tensor(probs, device=DEVICE),
            torch.as_tensor(slots, device=DEVICE),
            slots,
            depth,
        )
    assert reset and restarted and left_out
