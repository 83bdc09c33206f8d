# SPDX-License-Identifier: Apache-2.0
"""How well survivals are calibrated and how well they rank, position by position.

Pure: NumPy. A row counts for position k iff its first k + 1 drafts were verified
(see :mod:`.sts_fit`); a position that no row counts for has NaN.

Source: the measures of DeepSpec ``deepspec/eval/dspark/confidence_head.py``.
"""

from collections.abc import Callable

import numpy as np

from vllm.v1.worker.gpu.spec_decode.dspark.sts_fit import NUM_ECE_BINS, GradedRows

Measure = Callable[[np.ndarray, np.ndarray], float]


def by_position(measure: Measure, survival: np.ndarray, rows: GradedRows) -> np.ndarray:
    """Return ``measure(survival, outcome)`` of each position.

    Args:
        measure: Takes two arrays of one length, the second bool.
        survival: Prefix survivals. Shape [N, K].
        rows: Their rows.

    Returns:
        Shape [K], float64.
    """
    result = np.full(survival.shape[1], np.nan)
    for k in range(survival.shape[1]):
        known = rows.verified > k
        if known.any():
            result[k] = measure(survival[known, k], rows.accepted[known] > k)
    return result


def expected_calibration_error(probs: np.ndarray, outcomes: np.ndarray) -> float:
    """Return the mean gap of probability and rate over equal-width bins."""
    bins = np.minimum((probs * NUM_ECE_BINS).astype(int), NUM_ECE_BINS - 1)
    gaps = np.bincount(bins, probs - outcomes, minlength=NUM_ECE_BINS)
    return float(np.abs(gaps).sum() / len(probs))


def brier_score(probs: np.ndarray, outcomes: np.ndarray) -> float:
    """Return the mean squared difference of probability and outcome."""
    return float(np.mean((probs - outcomes) ** 2))


def auroc(probs: np.ndarray, outcomes: np.ndarray) -> float:
    """Return the area under the ROC curve, ties half; NaN with one outcome only."""
    positives = int(outcomes.sum())
    negatives = len(outcomes) - positives
    if not positives or not negatives:
        return float("nan")
    _, inverse, counts = np.unique(probs, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    above = ranks[outcomes].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))
