# SPDX-License-Identifier: Apache-2.0
"""Sequential Temperature Scaling: what is fitted, to which rows, and how well.

Pure: NumPy. The device kernel (:mod:`.sts_kernels`) runs the same steps in float32.

Position k (from 0) gets a scale, a bias and a bend: ``c_k = sigmoid(g(logit))``,

    g(z) = u + bend * 2 log cosh(u / 2),  u = scale * z + bias,

where scale is 1 / T: slope ``scale * (1 - bend)`` far below the point of probability
1/2 and ``scale * (1 + bend)`` far above it. As in the paper, positions are fitted left
to right, each to the *cumulative* product ``S_k = c_0 * ... * c_k`` against "drafts
0..k were all accepted", with the earlier positions frozen: errors that confidences
share along a row, which a fit per position leaves in the product, are taken up by the
next one.

Three things differ from the paper, and why:
  * A bias. Temperature alone keeps logit 0 at probability 1/2, so it cannot undo a
    shift of the logits; with a positive scale the order within a position is kept
    all the same.
  * A bend. Heads are found whose low confidences say less than their high ones, which
    no temperature undoes. This is beta calibration (two slopes and a bias), with the
    slopes changing where the *calibrated* confidence is 1/2 instead of at logit 0: a
    scaled or shifted head is then fitted as well as the head itself. |bend| < 1 keeps
    the order.
  * Log loss instead of ECE. With a bias, ECE is least for a constant prediction (the
    base rate is calibrated), so minimising it would throw the ranking away. Log loss
    is a proper score: its minimum is calibrated *and* sharp, and it is smooth, so a
    few damped Fisher steps replace a grid search. ECE is what is reported.

Which rows count for position k: those whose first k + 1 drafts were all *verified*,
i.e. in which capacity, and not the outcome, decided that they be judged. Then the
outcome is always known: a rejection at or before k settles it, else all were
accepted. Rows that were trimmed before k are left out even where an earlier rejection
would tell their outcome: among trimmed rows only failures could ever be seen, and
counting those would push every deep confidence down. What remains is selection by
confidence (likely rows are verified deeper). It shifts which confidences the fit
sees, not the outcome given the confidences, so where the fitted family holds
it does no harm, and where it does not, the fit is best in the region that is used.

Invariants (pinned by tests/.../dspark/test_sts_fit.py):
  * Without rows the result is the start; scale, bias and bend stay within their bounds.
  * The fit of a position does not depend on later positions.
  * The penalised log loss of each position never ends above its start.
"""

import math
from dataclasses import dataclass

import numpy as np

# Weight of a row against the next newer one; a memory of about 1000 rows, as the
# per-step decay of local-inference-lab/vllm PR #107.
DECAY = 0.999
# Rows that the start value stands for. Far fewer than PR #107's 64: a strong prior
# would still keep a fifth of a distortion after 600 rows.
PRIOR_ROWS = 1.0
# A coin flip has information 1/4 about the bias, and at logit z z**2 / 4 about the
# scale; the prior's rows are coin flips at z**2 = 2.
PRIOR_BIAS_INFORMATION = PRIOR_ROWS / 4.0
PRIOR_SCALE_INFORMATION = PRIOR_BIAS_INFORMATION * 2.0
# A bend's information is that about the bias times (2 log cosh(u / 2))**2, which is
# 4 at u = 3.3: most rows are there or beyond.
PRIOR_BEND_INFORMATION = PRIOR_BIAS_INFORMATION * 4.0
# Temperatures in [1/8, 8] (as PR #107); shifts beyond 8 say that a head is broken.
MIN_SCALE, MAX_SCALE = 0.125, 8.0
MAX_BIAS = 8.0
# Slopes a factor of 19 apart; a slope never vanishes.
MAX_BEND = 0.9
# Beyond it a confidence is 0 or 1 within 1e-6; keeps float32 sums finite.
MAX_LOGIT = 13.8
# Fisher steps per position and fit; each fit starts where the last one ended.
NUM_ITERATIONS = 8
# Longest step in bias, in bend, and in the relative scale.
MAX_BIAS_STEP, MAX_BEND_STEP, MAX_SCALE_STEP = 2.0, 0.5, 0.5
NUM_ECE_BINS = 15
# Of scale, bias and bend.
PRIOR_INFORMATION = np.array(
    [PRIOR_SCALE_INFORMATION, PRIOR_BIAS_INFORMATION, PRIOR_BEND_INFORMATION]
)
LOWEST = np.array([MIN_SCALE, -MAX_BIAS, -MAX_BEND])
HIGHEST = np.array([MAX_SCALE, MAX_BIAS, MAX_BEND])


@dataclass(frozen=True, slots=True)
class GradedRows:
    """Judged rows of one class, oldest first.

    Attributes:
        logits: Confidence logits before calibration. Shape [N, K], float.
        accepted: Drafts accepted. Shape [N], int.
        verified: Drafts verified, >= accepted. Shape [N], int.
    """

    logits: np.ndarray
    accepted: np.ndarray
    verified: np.ndarray

    def weights(self, decay: float = DECAY) -> np.ndarray:
        """Return each row's weight: 1 for the newest. Shape [N], float64."""
        num_rows = len(self.accepted)
        return decay ** np.arange(num_rows - 1, -1, -1, dtype=np.float64)

    def select(self, rows: np.ndarray | slice) -> "GradedRows":
        """Return some of the rows."""
        return GradedRows(self.logits[rows], self.accepted[rows], self.verified[rows])


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return the logistic function without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * np.asarray(x, dtype=np.float64)))


def clamp_logits(logits: np.ndarray) -> np.ndarray:
    """Return logits within the range that is told apart, float64."""
    return np.clip(np.asarray(logits, dtype=np.float64), -MAX_LOGIT, MAX_LOGIT)


def bend_term(u: np.ndarray) -> np.ndarray:
    """Return ``2 log cosh(u / 2)`` without overflow: what a bend is multiplied by."""
    size = np.abs(u)
    return size + 2.0 * np.log1p(np.exp(-size)) - 2.0 * math.log(2.0)


def calibrated_logits(logits: np.ndarray, calibration: np.ndarray) -> np.ndarray:
    """Return logits after calibration; logits beyond what is told apart are clamped.

    Args:
        logits: Shape [..., K].
        calibration: Scales, biases, bends. Shape [3, K].
    """
    scale, bias, bend = calibration
    u = scale * clamp_logits(logits) + bias
    return u + bend * bend_term(u)


def survival_probs(logits: np.ndarray, calibration: np.ndarray) -> np.ndarray:
    """Return calibrated prefix survivals.

    Args:
        logits: Shape [N, K].
        calibration: Scales, biases, bends. Shape [3, K].
    """
    return np.cumprod(sigmoid(calibrated_logits(logits, calibration)), axis=1)


def fit_calibration(
    rows: GradedRows,
    start: np.ndarray,
    prior: np.ndarray,
    *,
    decay: float = DECAY,
    num_iterations: int = NUM_ITERATIONS,
) -> np.ndarray:
    """Fit scales, biases and bends left to right.

    Args:
        rows: Judged rows, oldest first.
        start: Where the search begins: scales, biases, bends. Shape [3, K].
        prior: What ``PRIOR_ROWS`` rows argue for. Shape [3, K].
        decay: Weight of a row against the next newer one.
        num_iterations: Fisher steps per position.

    Returns:
        Scales, biases, bends. Shape [3, K], float64.
    """
    fitted = np.array(start, dtype=np.float64)
    weights, logits = rows.weights(decay), clamp_logits(rows.logits)
    survival = np.ones(len(weights))
    for k in range(fitted.shape[1]):
        known = rows.verified > k
        case = _Position(
            logits[known, k],
            rows.accepted[known] > k,
            survival[known],
            weights[known],
            prior[:, k],
        )
        fitted[:, k] = case.fit(fitted[:, k], num_iterations)
        survival = survival * sigmoid(calibrated_logits(logits[:, k], fitted[:, k]))
    return fitted


@dataclass(frozen=True, slots=True)
class _Position:
    """One position with the earlier ones frozen. All but the prior: shape [N]."""

    logits: np.ndarray
    outcome: np.ndarray
    survival: np.ndarray
    weights: np.ndarray
    prior: np.ndarray

    def fit(self, start: np.ndarray, num_iterations: int) -> np.ndarray:
        """Return scale, bias and bend after damped Fisher steps. Shape [3]."""
        point = np.array(start, dtype=np.float64)
        for _ in range(num_iterations):
            point = self.step(point)
        return point

    def step(self, point: np.ndarray) -> np.ndarray:
        """Return the next scale, bias and bend, within their bounds. Shape [3]."""
        scale, bias, bend = point
        u = scale * self.logits + bias
        g = u + bend * bend_term(u)
        prob = self.survival * sigmoid(g)
        # (1 - s) / (1 - S s), in a form that stays in (0, 1] as both vanish.
        miss = sigmoid(-g)
        ratio = miss / np.maximum(1.0 - self.survival + self.survival * miss, 1e-12)
        slope = self.weights * (prob - self.outcome) * ratio
        curve = self.weights * prob * miss * ratio
        d_bias = 1.0 + bend * np.tanh(0.5 * u)
        # How g changes with scale, bias and bend.
        changes = np.stack([self.logits * d_bias, d_bias, bend_term(u)])
        gradient = changes @ slope + PRIOR_INFORMATION * (point - self.prior)
        hessian = (changes * curve) @ changes.T + np.diag(PRIOR_INFORMATION)
        step = np.linalg.solve(hessian, gradient)
        # A bend at its bound stays there, and the others must not count on more.
        step[2] = bend - min(max(bend - step[2], -MAX_BEND), MAX_BEND)
        step[:2] = np.linalg.solve(
            hessian[:2, :2], gradient[:2] - hessian[:2, 2] * step[2]
        )
        longest = np.array([MAX_SCALE_STEP * scale, MAX_BIAS_STEP, MAX_BEND_STEP])
        point = point - step / max(1.0, np.abs(step / longest).max())
        return np.clip(point, LOWEST, HIGHEST)
