# SPDX-License-Identifier: Apache-2.0
"""True acceptance probabilities by request, token position and draft index.

Draft ``k`` (0-based) of a round, standing at token position ``p`` of request ``r``,
is accepted, given that those before it were, with probability

    c = sigmoid(bias[k] + spread_request * z(r) + spread_position * z(r, p))

and is accepted if ``u(r, p) < c``. ``z`` (standard normal) and ``u`` (uniform) come
from :mod:`.draws`: functions of the request's seed and the token position alone, so
arms that draft differently live in the same world, and arms that draft alike accept
the same tokens. ``bias`` is solved so that the mean over requests and positions of
"the first k drafts are all accepted" is the given profile, whatever the spread.

The mean is over requests. Hard requests need more rounds, so a mean over rounds is
lower; a served sweep shows it.

Invariants (pinned by tests/benchmarks/acceptance/test_world.py):
  * The mean profile is met for any spread, within sampling error.
  * Without spread the probabilities are the profile's conditional rates.
  * What the confidence head reports never changes what is accepted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.acceptance.draws import ACCEPT, POSITION, REQUEST, normals, uniforms

# Unconditional acceptance by draft index of the H200 baseline.
DEFAULT_PROFILE = (0.82, 0.66, 0.53, 0.42, 0.33, 0.26, 0.20)
# Gauss-Hermite nodes: exact to 1e-9 for spreads up to 3.
_NUM_NODES = 64
# Logits beyond this are certain in float32.
_LARGEST_LOGIT = 40.0


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)) without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * np.asarray(x, dtype=np.float64)))


def _normal_nodes() -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NUM_NODES)
    return nodes, weights / weights.sum()


def solve_biases(
    profile: Sequence[float], spread_request: float, spread_position: float
) -> np.ndarray:
    """Return the logit per draft index that meets a mean profile under a spread.

    Args:
        profile: P(first k drafts all accepted), k = 1..K, falling, in (0, 1].
        spread_request: Standard deviation by request, logits.
        spread_position: Standard deviation by token position, logits.

    Returns:
        Shape [K], float64.
    """
    nodes, weights = _normal_nodes()
    by_request = np.ones(_NUM_NODES)  # P(all before accepted | request)
    biases = np.empty(len(profile))
    for k, wanted in enumerate(profile):
        low, high = -_LARGEST_LOGIT, _LARGEST_LOGIT
        for _ in range(60):
            middle = 0.5 * (low + high)
            logits = middle + spread_request * nodes[:, None] + spread_position * nodes
            survival = by_request * (sigmoid(logits) @ weights)
            low, high = (middle, high) if survival @ weights < wanted else (low, middle)
        biases[k], by_request = middle, survival
    return biases


@dataclass(frozen=True, eq=False)
class World:
    """True probabilities and what the confidence head reports of them.

    Attributes:
        biases: Logit per draft index. Shape [K], float64.
        spread_request: Standard deviation by request, logits, >= 0.
        spread_position: Standard deviation by token position, logits, >= 0.
        confidence_scale: Reported logit = scale * true logit + shift; 1 is honest.
        confidence_shift: See there; 0 is honest.
    """

    biases: np.ndarray
    spread_request: float = 0.0
    spread_position: float = 0.0
    confidence_scale: float = 1.0
    confidence_shift: float = 0.0

    @classmethod
    def with_profile(
        cls,
        profile: Sequence[float] = DEFAULT_PROFILE,
        *,
        spread_request: float = 0.0,
        spread_position: float = 0.0,
        confidence_scale: float = 1.0,
        confidence_shift: float = 0.0,
    ) -> "World":
        """Build a world with a mean unconditional profile.

        Raises:
            ValueError: The profile does not fall within (0, 1], or a spread is
                negative or not finite.
        """
        check_profile(profile)
        for name, value in (
            ("spread_request", spread_request),
            ("spread_position", spread_position),
        ):
            if not 0.0 <= value <= 3.0:
                raise ValueError(f"{name} is {value}; it must be within 0..3 logits")
        if not (np.isfinite(confidence_scale) and confidence_scale > 0):
            raise ValueError(
                f"confidence_scale is {confidence_scale}; it must be finite and > 0"
            )
        if not np.isfinite(confidence_shift):
            raise ValueError(f"confidence_shift is {confidence_shift}; not finite")
        biases = solve_biases(profile, spread_request, spread_position)
        return cls(
            biases, spread_request, spread_position, confidence_scale, confidence_shift
        )

    def to_json(self) -> dict[str, Any]:
        """Return the world in a form that JSON keeps exactly."""
        return {**vars(self), "biases": self.biases.tolist()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "World":
        """Rebuild what :meth:`to_json` returned."""
        return cls(**{**data, "biases": np.asarray(data["biases"], dtype=np.float64)})

    def up_to(self, num_drafts: int) -> "World":
        """Return the same world for draft indices below ``num_drafts``."""
        return replace(self, biases=self.biases[:num_drafts])

    @property
    def num_drafts(self) -> int:
        """Draft indices K that the profile covers."""
        return len(self.biases)

    def true_logits(self, seeds: np.ndarray, first_positions: np.ndarray) -> np.ndarray:
        """Return the true logits of drafts at consecutive token positions.

        Args:
            seeds: Of the requests. Shape [R], integer.
            first_positions: Token position of the first draft. Shape [R], integer.

        Returns:
            Shape [R, K], float64.
        """
        positions = first_positions[:, None] + np.arange(self.num_drafts)
        logits = np.broadcast_to(self.biases, positions.shape).copy()
        if self.spread_request:
            logits += self.spread_request * normals(seeds, 0, REQUEST)[:, None]
        if self.spread_position:
            logits += self.spread_position * normals(
                seeds[:, None], positions, POSITION
            )
        return logits

    def reported(self, true_logits: np.ndarray) -> np.ndarray:
        """Return the logits that the confidence head reports."""
        return self.confidence_scale * true_logits + self.confidence_shift

    def accepted_prefix(
        self,
        true_logits: np.ndarray,
        seeds: np.ndarray,
        first_positions: np.ndarray,
        widths: np.ndarray,
    ) -> np.ndarray:
        """Return how many leading drafts are accepted.

        Args:
            true_logits: See :meth:`true_logits`. Shape [R, K].
            seeds: Shape [R].
            first_positions: Shape [R].
            widths: Drafts that are judged. Shape [R], integer, 0..K.

        Returns:
            Shape [R], int64, 0..widths.
        """
        steps = np.arange(self.num_drafts)
        positions = first_positions[:, None] + steps
        draws = uniforms(seeds[:, None], positions, ACCEPT)
        ok = (draws < sigmoid(true_logits)) & (steps < widths[:, None])
        return np.logical_and.accumulate(ok, axis=1).sum(axis=1)


def check_profile(profile: Sequence[float]) -> None:
    """Check unconditional acceptance rates.

    Raises:
        ValueError: Empty, outside (0, 1], or rising.
    """
    falls = all(a >= b for a, b in zip(profile, profile[1:], strict=False))
    if not profile or not falls or not all(0.0 < p <= 1.0 for p in profile):
        raise ValueError(
            f"acceptance profile {list(profile)} must be non-empty, within (0, 1] and "
            "never rise: entry k is the chance that the first k drafts are all accepted"
        )
