# SPDX-License-Identifier: Apache-2.0
"""Builders for tests of confidence calibration."""

import numpy as np
import torch

from vllm.v1.worker.gpu.spec_decode.dspark.sts_fit import GradedRows, sigmoid
from vllm.v1.worker.gpu.spec_decode.dspark.sts_reference import (
    DEPTH_BITS,
    RING_ROWS,
    DraftRing,
    JudgedDrafts,
)


def draw_rows(num_rows, num_steps, *, scale=1.0, bias=0.0, bend=0.0, trim=0.0, seed=0):
    """Return rows of a head that a calibration of these values sets right.

    Args:
        num_rows: Rows.
        num_steps: Draft positions.
        scale: Of the calibration that is right.
        bias: Likewise.
        bend: Likewise.
        trim: Share of rows that are verified to a depth that their confidences
            decide.
        seed: Of everything random.
    """
    rng = np.random.default_rng(seed)
    easy = rng.normal(1.0, 1.0, size=(num_rows, 1))
    u = easy + rng.normal(0.0, 1.0, size=(num_rows, num_steps))
    true = u + 2.0 * bend * np.log(np.cosh(0.5 * u))
    hits = rng.random(true.shape) < sigmoid(true)
    accepted = np.cumprod(hits, axis=1).sum(axis=1)
    survival = np.cumprod(sigmoid(true), axis=1)
    admitted = (survival > 0.4).sum(axis=1)
    trimmed = rng.random(num_rows) < trim
    verified = np.where(trimmed, np.maximum(admitted, 1), num_steps)
    logits = (u - bias) / scale
    return GradedRows(logits, np.minimum(accepted, verified), verified)


def random_ring(seed, num_slots=6, num_steps=5):
    """Return a ring whose slots hold logits of stamps 1 to 3, some of them NaN."""
    rng = np.random.default_rng(seed)
    ring = DraftRing.empty(num_slots, num_steps, "cpu")
    logits = rng.normal(size=(num_slots, num_steps)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.05] = np.nan
    ring.slot_logits.copy_(torch.from_numpy(logits))
    depth = rng.integers(0, num_steps + 1, num_slots)
    stamps = rng.choice([1, 2, 2, 2, 3], num_slots)
    ring.slot_stamp.copy_(torch.from_numpy((stamps << DEPTH_BITS) | depth))
    # Close to the end of the ring, so that some cases wrap around.
    ring.num_rows.copy_(torch.tensor([4094, 3]))
    return ring


def random_judged(seed, num_slots=6, num_steps=5):
    """Return a batch over some of the slots with every kind of row."""
    rng = np.random.default_rng(seed)
    num_reqs = int(rng.integers(1, num_slots + 1))
    sampled = rng.integers(0, num_steps + 2, num_reqs)
    rejected = rng.integers(0, num_steps + 1, num_reqs) * (sampled > 0)

    def int32(values):
        return torch.from_numpy(np.asarray(values)).to(torch.int32)

    return JudgedDrafts(
        torch.from_numpy(rng.permutation(num_slots)[:num_reqs].copy()),
        int32(sampled),
        int32(rejected),
        int32(rng.integers(0, num_steps + 1, num_reqs)) if seed % 2 else None,
        int32(rng.random(num_reqs) < 0.3) if seed % 3 == 0 else None,
    )


def to_device(value, device):
    """Return a tensor, or a dataclass of tensors, on ``device``; others as they are."""
    if isinstance(value, (DraftRing, JudgedDrafts)):
        names = value.__dataclass_fields__
        return type(value)(*(to_device(getattr(value, n), device) for n in names))
    return value.to(device) if isinstance(value, torch.Tensor) else value


def tensors_of(value):
    """Return the tensors of a ring, or the tensor itself, as a list."""
    return value.tensors() if isinstance(value, DraftRing) else [value]


def random_calibration(rng, num_steps):
    """Return scales, biases and bends by class. Shape [2, 3, K], float32."""
    low, high = np.array([[0.5, -1.0, -0.9], [1.5, 1.0, 0.9]])[:, None, :, None]
    table = low + (high - low) * rng.random((2, 3, num_steps))
    return torch.from_numpy(table.astype(np.float32))


def make_calibrate_inputs(seed, num_slots=6, num_steps=5):
    """Return keyword arguments of ``calibrate_confidences``."""
    rng = np.random.default_rng(seed)
    num_reqs = int(rng.integers(1, 40))

    def float32(values):
        return torch.from_numpy(np.asarray(values, dtype=np.float32))

    probs = rng.random((num_reqs, num_steps))
    probs[rng.random(probs.shape) < 0.1] = rng.choice([0.0, 1.0, np.nan])
    return {
        "slots": torch.from_numpy(rng.integers(-1, num_slots, num_reqs)),
        "temperature": float32(rng.choice([0.0, 0.7], num_slots)),
        "calibration": random_calibration(rng, num_steps),
        "probs_out": float32(probs),
        "logits_out": torch.zeros(num_reqs, num_steps),
    }


def make_observe_inputs(seed, num_slots=6, num_steps=5):
    """Return keyword arguments of ``observe_drafts``."""
    rng = np.random.default_rng(seed)
    new_logits = rng.normal(size=(num_slots, num_steps)).astype(np.float32)
    temperature = rng.choice([0.0, 1.0], num_slots).astype(np.float32)
    return {
        "judged": random_judged(seed, num_slots, num_steps),
        "new_logits": torch.from_numpy(new_logits),
        "temperature": torch.from_numpy(temperature),
        "ring_out": random_ring(seed, num_slots, num_steps),
        "stamp": 2,
        "draft_depth": int(rng.integers(0, num_steps + 1)),
        "sample_stride": 1 + seed % 2,
        "sample_offset": seed % 2,
    }


def ring_of(*groups, device="cpu"):
    """Return a ring that holds the newest of these rows, by class."""
    num_steps = groups[0].logits.shape[1]
    ring = DraftRing.empty(1, num_steps, "cpu")
    for group, rows in enumerate(groups):
        total = len(rows.accepted)
        kept = np.arange(max(total - RING_ROWS, 0), total)
        ring.num_rows[group] = total
        cells = kept % RING_ROWS
        ring.logits[group, cells] = torch.from_numpy(rows.logits[kept]).float()
        ring.accepted[group, cells] = torch.from_numpy(rows.accepted[kept]).int()
        ring.verified[group, cells] = torch.from_numpy(rows.verified[kept]).int()
    return to_device(ring, device)


def make_fit_inputs(seed, num_steps=5):
    """Return keyword arguments of ``fit_confidences``."""
    num_rows = (0, 1, 50, 900)[seed % 4]
    prior = torch.zeros(2, 3, num_steps)
    prior[:, 0] = 1.0
    return {
        "ring": ring_of(
            draw_rows(num_rows, num_steps, scale=2.5, trim=0.3, seed=seed),
            draw_rows(num_rows, num_steps, bias=-1.5, seed=seed + 1),
        ),
        "prior": prior,
        "calibration_out": prior.clone(),
    }
