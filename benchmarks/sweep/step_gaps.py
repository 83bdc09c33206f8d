# SPDX-License-Identifier: Apache-2.0
"""Step times of a load, from when its steps started.

A step is ``(start in seconds, requests, target tokens)``. With asynchronous
scheduling the time between two starts is that of a step once the device is the
bottleneck.

Invariants (pinned by tests/benchmarks/sweep/test_step_gaps.py):
  * Every gap counts for the step that opened it; a step holds prompts or does not.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

Step = tuple[float, int, int]
# A decode step verifies at most K + 1 <= 17 tokens of a request: more are prompts'.
MAX_DECODE_TOKENS = 17


def decode_step_ms(steps: Sequence[Step], percentile: float) -> dict[str, float]:
    """Return a percentile of decode step times by width, of the largest batch.

    Args:
        steps: The load's steps, in order.
        percentile: 0..100.

    Returns:
        Mean tokens of a request (two decimals) to milliseconds, where there are three
        steps or more.
    """
    largest = max((num_reqs for _, num_reqs, _ in steps), default=0)
    gaps: dict[str, list[float]] = {}
    for gap, num_reqs, num_tokens in _gaps(steps):
        if num_reqs == largest and not _holds_prompts(num_reqs, num_tokens):
            gaps.setdefault(f"{num_tokens / num_reqs:.2f}", []).append(gap)
    return {
        width: float(np.percentile(found, percentile))
        for width, found in gaps.items()
        if len(found) > 2
    }


def prompt_step_ms(steps: Sequence[Step]) -> float | None:
    """Return the median time of steps that hold prompts; None without any."""
    gaps = [gap for gap, *sizes in _gaps(steps) if _holds_prompts(*sizes)]
    return float(np.median(gaps)) if gaps else None


def _gaps(steps: Sequence[Step]) -> Iterator[Step]:
    for (start, num_reqs, num_tokens), (end, *_) in itertools.pairwise(steps):
        yield 1e3 * (end - start), num_reqs, num_tokens


def _holds_prompts(num_reqs: int, num_tokens: int) -> bool:
    return num_tokens > MAX_DECODE_TOKENS * num_reqs
