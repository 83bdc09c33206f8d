# SPDX-License-Identifier: Apache-2.0
"""Replays a record of confidences through the calibration, and measures what it does.

Requests are split at random: the fit sees a third, figures come from the others. Rows
reach the fit as an engine at ``BATCH`` requests grades and fits them: slots that are
refilled, some rows a step in turns, a refit every ``FIT_ROWS`` rows and at the end,
each time from where it was.
"""

import itertools
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.json_files import read_lines
from vllm.v1.worker.gpu.spec_decode.dspark.planner import PlanInputs, plan_budget
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts
from vllm.v1.worker.gpu.spec_decode.dspark.sts_fit import (
    MAX_LOGIT,
    GradedRows,
    calibrated_logits,
    fit_calibration,
    sigmoid,
    survival_probs,
)
from vllm.v1.worker.gpu.spec_decode.dspark.sts_metrics import (
    auroc,
    brier_score,
    by_position,
    expected_calibration_error,
)

BATCH = 64
# An engine grades 16 rows of a step and refits every 32 steps (``online_sts``).
ROW_STRIDE = BATCH // 16
FIT_ROWS = 16 * 32
# Requests that the fit sees: one in so many.
SEEN_SHARE = 3
# Name -> (factor, shift) of the head's logits.
DISTORTIONS = {
    "as trained": (1.0, 0.0),
    "x 0.4": (0.4, 0.0),
    "x 2.5": (2.5, 0.0),
    "+ 1.5": (1.0, 1.5),
    "- 1.5": (1.0, -1.5),
}


def read_record(path: Path) -> dict[str, list[np.ndarray]]:
    """Return the rows of every request by class.

    Args:
        path: Lines of record_calibration.py, gzipped if the name ends in .gz.

    Raises:
        ValueError: The file cannot be read, or a line is none.
    """
    found: dict[str, list[np.ndarray]] = {}
    for number, value in read_lines(path):
        try:
            rows = np.array(value["rows"], dtype=np.float64)
            if rows.size:
                if rows.ndim != 2 or rows.shape[1] < 3:
                    raise ValueError("rows are not [accepted, verified, logits]")
                found.setdefault(value["class"], []).append(rows)
        except (KeyError, TypeError, ValueError) as e:
            raise ValueError(
                f"{path}, line {number} is no record of confidences ({e}); make "
                "one with benchmarks/record_calibration.py"
            ) from e
    return found


def split(
    requests: list[np.ndarray], seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the requests that the fit sees and those that are measured, at random."""
    order = np.random.default_rng(seed).permutation(len(requests))
    num_seen = max(len(requests) // SEEN_SHARE, 1)
    seen, measured = order[:num_seen], order[num_seen:]
    return [requests[i] for i in seen], [requests[i] for i in measured]


def in_turns(
    requests: list[np.ndarray], batch: int = BATCH, stride: int = 1
) -> GradedRows:
    """Return the rows that a batch with refilled slots grades, in their order.

    Args:
        requests: Rows of each request.
        batch: Slots.
        stride: Slots of which one is graded in a step, each in its turn.
    """
    waiting = deque(requests)
    slots: list[deque] = [deque() for _ in range(batch)]
    ordered = []
    for step in itertools.count():
        for i in range(batch):
            if not slots[i] and waiting:
                slots[i] = deque(waiting.popleft())
        if not any(slots):
            break
        for i, slot in enumerate(slots):
            if slot:
                row = slot.popleft()
                if (i + step) % stride == 0:
                    ordered.append(row)
    table = np.array(ordered)
    return GradedRows(table[:, 2:], table[:, 0].astype(int), table[:, 1].astype(int))


def num_graded(rows: GradedRows) -> np.ndarray:
    """Return the drafts that were judged up to each row, the rejected one included."""
    return np.cumsum(np.minimum(rows.accepted + 1, rows.verified))


def distort(rows: GradedRows, factor: float, shift: float) -> GradedRows:
    """Return the rows of a head whose logits are scaled and shifted."""
    logits = np.clip(factor * rows.logits + shift, -MAX_LOGIT, MAX_LOGIT)
    return GradedRows(logits, rows.accepted, rows.verified)


def identity(num_positions: int) -> np.ndarray:
    """Return the calibration that changes nothing. Shape [3, K]."""
    return np.eye(3, 1) * np.ones(num_positions)


def fit_online(rows: GradedRows, num_drafts: int) -> np.ndarray:
    """Return the calibration after so many graded drafts. Shape [3, K].

    Raises:
        ValueError: The rows hold fewer graded drafts.
    """
    available = int(num_graded(rows)[-1])
    if available < num_drafts:
        raise ValueError(
            f"the fit would see {available} graded drafts, not {num_drafts}; ask for "
            "fewer, or record more requests"
        )
    prior = identity(rows.logits.shape[1])
    last = int(np.searchsorted(num_graded(rows), num_drafts)) + 1
    fitted = prior
    for end in [*range(FIT_ROWS, last, FIT_ROWS), last]:
        fitted = fit_calibration(rows.select(slice(end)), fitted, prior)
    return fitted


def fit_limit(rows: GradedRows) -> np.ndarray:
    """Return the best calibration of the family for these very rows. Shape [3, K]."""
    prior = identity(rows.logits.shape[1])
    fitted = prior
    for _ in range(6):
        fitted = fit_calibration(rows, fitted, prior, decay=1.0)
    return fitted


def draw_outcomes(
    rows: GradedRows, survival: np.ndarray, rng: np.random.Generator
) -> GradedRows:
    """Return the rows with outcomes drawn from survivals, as if these were true.

    Args:
        rows: Rows whose logits and depths are kept.
        survival: Shape [N, K].
        rng: Of the outcomes.
    """
    # One number a row, compared with falling survivals: nested prefixes.
    survived = rng.random((len(survival), 1)) < survival
    accepted = np.minimum(survived.sum(axis=1), rows.verified)
    return GradedRows(rows.logits, accepted, rows.verified)


def cumulative_ece(rows: GradedRows, survival: np.ndarray) -> np.ndarray:
    """Return the cumulative ECE of survivals by position. Shape [K], float64."""
    return by_position(expected_calibration_error, survival, rows)


@dataclass(frozen=True)
class Figures:
    """Figures by position. Shape [K] each.

    Attributes:
        ece: Cumulative ECE of the survivals.
        brier: Brier score of the survivals.
        survival_auroc: How well survivals rank rows.
        auroc: How well the position's own confidence ranks the rows that reach it.
    """

    ece: np.ndarray
    brier: np.ndarray
    survival_auroc: np.ndarray
    auroc: np.ndarray


def measure(rows: GradedRows, calibration: np.ndarray) -> Figures:
    """Return the figures of one calibration on rows that it was not fitted to."""
    survival = survival_probs(rows.logits, calibration)
    own = np.full(survival.shape[1], np.nan)
    for k in range(survival.shape[1]):
        reached = (rows.verified > k) & (rows.accepted >= k)
        logits = calibrated_logits(rows.logits[reached, k], calibration[:, k])
        own[k] = auroc(sigmoid(logits), rows.accepted[reached] > k)
    return Figures(
        cumulative_ece(rows, survival),
        by_position(brier_score, survival, rows),
        by_position(auroc, survival, rows),
        own,
    )


def regret(
    estimates: np.ndarray, truth: np.ndarray, costs: StepCosts, batch: int
) -> np.ndarray:
    """Return how far below the oracle's rate each batch's budget ends, in [0, 1].

    Args:
        estimates: Survivals that plan and rank. Shape [N, K].
        truth: Survivals that decide. Shape [N, K].
        costs: Step costs, with depth K.
        batch: Requests of a batch.

    Returns:
        Shape [N // batch], float64.
    """
    found = []
    for first in range(0, len(truth) - batch + 1, batch):
        part = slice(first, first + batch)
        best = _rate(truth[part], truth[part], costs)
        found.append(1.0 - _rate(estimates[part], truth[part], costs) / best)
    return np.array(found)


def _rate(estimates: np.ndarray, truth: np.ndarray, costs: StepCosts) -> float:
    """Return the true rate of the plan that the estimates make."""
    num_reqs, depth = estimates.shape
    inputs = PlanInputs(
        survival_probs=estimates.astype(np.float32),
        scheduled_drafts=np.full(num_reqs, depth, dtype=np.int32),
        num_non_draft_tokens=num_reqs,
        num_sampling_reqs=num_reqs,
        max_draft_budget=num_reqs * depth,
        current_depth=depth,
        next_survival=estimates.astype(np.float32),
        depths=costs.depths,
    )
    budget = plan_budget(inputs, costs, margin=0.0).draft_budget
    # Earlier positions first among equals, as the admission kernel ranks.
    order = np.lexsort((np.tile(np.arange(depth), num_reqs), -estimates.ravel()))
    expected = num_reqs + truth.ravel()[order[:budget]].sum()
    step_ms = costs.decode_varlen_ms(num_reqs)[budget]
    if budget == num_reqs * depth:
        step_ms = costs.verify_uniform_ms[depth][num_reqs]
    return expected / (step_ms + costs.draft_ms[depth][num_reqs] + costs.overhead_ms)
