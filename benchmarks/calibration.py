# SPDX-License-Identifier: Apache-2.0
"""Replays a record of confidences through the calibration, and measures what it does.

Requests are split in two: the fit sees one half, figures come from the other. Rows
reach the fit as an engine would grade them, a batch of requests in turns, and it is
refitted every ``FIT_ROWS`` rows, each time from where it was.
"""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm.v1.worker.gpu.spec_decode.dspark.planner import PlanInputs, plan_budget
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts
from vllm.v1.worker.gpu.spec_decode.dspark.sts_fit import (
    MAX_LOGIT,
    GradedRows,
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

FIT_ROWS = 64
BATCH = 64
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
        ValueError: A line is none.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    found: dict[str, list[np.ndarray]] = {}
    with opener(path, "rt") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line)
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


def in_turns(requests: list[np.ndarray], batch: int = BATCH) -> GradedRows:
    """Return all rows in the order of a batch that is refilled when it has emptied."""
    ordered = []
    for first in range(0, len(requests), batch):
        group = requests[first : first + batch]
        for step in range(max(map(len, group))):
            ordered += [rows[step] for rows in group if step < len(rows)]
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
    """Return the calibration that changes nothing. Shape [2, K]."""
    return np.stack([np.ones(num_positions), np.zeros(num_positions)])


def fit_online(rows: GradedRows, num_drafts: int) -> np.ndarray:
    """Return the calibration after so many graded drafts. Shape [2, K]."""
    prior = identity(rows.logits.shape[1])
    last = int(np.searchsorted(num_graded(rows), num_drafts)) + 1
    fitted = prior
    for end in [*range(FIT_ROWS, last, FIT_ROWS), last]:
        fitted = fit_calibration(rows.select(slice(end)), fitted, prior)
    return fitted


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
        scale, bias = calibration[:, k]
        own[k] = auroc(
            sigmoid(scale * rows.logits[reached, k] + bias), rows.accepted[reached] > k
        )
    return Figures(
        by_position(expected_calibration_error, survival, rows),
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
    step_ms = costs.verify_varlen_ms[num_reqs + budget]
    if budget == num_reqs * depth:
        step_ms = costs.verify_uniform_ms[depth][num_reqs]
    return expected / (step_ms + costs.draft_ms[depth][num_reqs] + costs.overhead_ms)
