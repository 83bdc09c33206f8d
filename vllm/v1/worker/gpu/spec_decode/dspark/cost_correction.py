# SPDX-License-Identifier: Apache-2.0
"""Measured step times correct the cost tables while serving.

A bucket is a draft depth, a layout (uniform or varlen graph) and a quarter octave of
target tokens. It holds the ratio of measured to tabled time. The planner sees ratios
only as factors, which change seldom: a ratio must leave a dead band first.

A bucket that no step has visited for long has no say of its own. It takes the common
ratio of the latest steps where that is lower than its own, never higher: a plan that
looks cheap is tried and found out within a few steps, one that looks dear would
never be tried again. So a cost that rises anywhere is seen, and one that falls where
no step goes is not, unless all fall.

Standard library and NumPy only, equal on every rank for equal observations.

Invariants (pinned by tests/.../dspark/test_cost_correction.py):
  * Every factor lies in ``BOUNDS``; without observations every factor is 1.
  * A single stalled step, or noise of a few per cent, changes no factor.
  * After a drift by a factor within the bounds the plans' regret falls under 3 %
    within 500 steps.
"""

import math
from collections.abc import Sequence

import numpy as np

# Beyond them it is not the curve that is wrong: profile again.
BOUNDS = (0.5, 2.0)
# Weight of a bucket's newest median, and of the newest step in the common ratio.
BUCKET_GAIN = 0.1
COMMON_GAIN = 0.05
# Ratios of three visits; their median ignores one stall.
_WINDOW = 3
# Three visits that are all this far off in one direction are a new regime, not noise.
_JUMP = math.log(1.15)
# A factor moves when its ratio has left it by this much. The regret of a price that
# is wrong by a share is of the order of its square.
_DEAD_BAND = math.log(1.03)
# Steps after which an unvisited bucket has no say of its own.
STALE_STEPS = 1024
_REFRESH_INTERVAL = 256
_BUCKETS_PER_OCTAVE = 4
_LOW, _HIGH = math.log(BOUNDS[0]), math.log(BOUNDS[1])
UNIFORM, VARLEN = 0, 1


class CostCorrection:
    """Ratios of measured to tabled step times. Per step: ``observe``.

    Args:
        depths: Enabled draft depths, ascending.
        max_num_reqs: Largest batch of the tables.
        max_num_tokens: Most target tokens of a decode batch.

    Attributes:
        uniform: Per depth, factors by requests. float64 [max_num_reqs + 1].
        varlen: Per depth of the drafter pass, factors by target tokens, float64
            [max_num_tokens + 1].
        common_ratio: Of the latest steps.
    """

    def __init__(self, depths: Sequence[int], max_num_reqs: int, max_num_tokens: int):
        self._row = {depth: i for i, depth in enumerate(depths)}
        tokens = np.arange(max_num_tokens + 1, dtype=np.float64)
        self.uniform = {d: np.ones(max_num_reqs + 1) for d in depths}
        self.varlen = {d: np.ones(max_num_tokens + 1) for d in depths}
        reqs = np.arange(max_num_reqs + 1, dtype=np.float64)
        self._varlen_buckets = _bucket_of(tokens)
        # A list: reading one element of an array costs the host ten times as much.
        self._bucket_list = self._varlen_buckets.tolist()
        self._uniform_buckets = {d: _bucket_of(reqs * (d + 1)) for d in depths}
        largest = max((max(depths) + 1) * max_num_reqs, max_num_tokens)
        shape = (len(depths), 2, int(_bucket_of(largest)) + 1)
        # Logarithms, so that twice and half weigh alike.
        self._own = np.zeros(shape)
        self._shown = np.zeros(shape)
        self._last_visit = np.full(shape, -STALE_STEPS)
        self._recent: dict[tuple[int, int, int], list[float]] = {}
        self._common = self._common_shown = 0.0
        self._step = 0

    @property
    def common_ratio(self) -> float:
        """Ratio of measured to tabled time over the latest steps."""
        return math.exp(self._common)

    def observe(
        self,
        depth: int,
        num_tokens: int,
        *,
        is_uniform: bool,
        tabled_ms: float,
        measured_ms: float,
    ) -> None:
        """Take one decode-only step.

        Args:
            depth: Enabled depth that the step drafted at, and verified if uniform.
            num_tokens: Target tokens, at most ``max_num_tokens``.
            is_uniform: The target ran the uniform graph.
            tabled_ms: What the uncorrected tables say the step takes, > 0.
            measured_ms: What it took.
        """
        if not (measured_ms > 0.0 and math.isfinite(measured_ms)):
            return
        self._step += 1
        ratio = min(max(math.log(measured_ms / tabled_ms), _LOW), _HIGH)
        # Clipped, so that a stalled step moves it by less than the dead band.
        error = min(max(ratio - self._common, -_JUMP), _JUMP)
        self._common += COMMON_GAIN * error
        layout = UNIFORM if is_uniform else VARLEN
        index = (self._row[depth], layout, self._bucket_list[num_tokens])
        self._last_visit[index] = self._step
        self._learn(index, ratio)
        own = self._own[index]
        if abs(own - self._shown[index]) > _DEAD_BAND:
            self._shown[index] = own
            self._rebuild_row(depth, layout)
        is_due = self._step % _REFRESH_INTERVAL == 0
        if is_due or abs(self._common - self._common_shown) > _DEAD_BAND:
            self._refresh()

    def _learn(self, index: tuple[int, int, int], ratio: float) -> None:
        recent = self._recent.setdefault(index, [])
        recent.append(ratio)
        if len(recent) < _WINDOW:
            return
        if len(recent) > _WINDOW:
            del recent[0]
        own = float(self._own[index])
        low, median, high = sorted(recent)
        if low - own > _JUMP or high - own < -_JUMP:
            self._own[index] = median
        else:
            self._own[index] = own + BUCKET_GAIN * (median - own)

    def _refresh(self) -> None:
        """Show the common ratio where no own one is fresh."""
        self._common_shown = self._common
        is_stale = self._step - self._last_visit >= STALE_STEPS
        lower = np.minimum(self._own, self._common)
        target = np.where(is_stale, lower, self._own)
        moved = np.abs(target - self._shown) > _DEAD_BAND
        self._shown[moved] = target[moved]
        for depth, row in self._row.items():
            for layout in (UNIFORM, VARLEN):
                if moved[row, layout].any():
                    self._rebuild_row(depth, layout)

    def _rebuild_row(self, depth: int, layout: int) -> None:
        shown = np.exp(self._shown[self._row[depth], layout])
        if layout == UNIFORM:
            buckets, factors = self._uniform_buckets[depth], self.uniform[depth]
        else:
            buckets, factors = self._varlen_buckets, self.varlen[depth]
        np.take(shown, buckets, out=factors)


def _bucket_of(tokens: np.ndarray | int) -> np.ndarray:
    """Return the bucket of token counts: a quarter octave each."""
    octaves = np.log2(np.maximum(tokens, 1.0))
    return np.floor(_BUCKETS_PER_OCTAVE * octaves).astype(np.intp)
