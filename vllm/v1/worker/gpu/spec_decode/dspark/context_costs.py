# SPDX-License-Identifier: Apache-2.0
"""What context costs: from passes timed at two contexts to a price per token.

A graph is timed at its full number of requests, which may be many more than a
trimmed batch of its size has, so a context that was part of its time would charge
for attention that is not done. Hence every time is split: what the pass takes
without context, by its size, and what a token of mean context adds, by the number
of requests. Attention is linear in the context, so two contexts are enough.
Standard library and NumPy only, besides the equally pure :mod:`.sps_curve`.

Invariants (pinned by tests/.../dspark/test_context_costs.py):
  * Of times that are linear in the context of their requests, both parts are exact.
  * Samples at one context only give a price of zero and stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm.v1.worker.gpu.spec_decode.dspark.sps_curve import (
    CostSample,
    interpolate,
    median_points,
)


@dataclass(frozen=True)
class ContextCosts:
    """Samples without context, and the price of context.

    Attributes:
        samples: Those of the shortest context of each kind, context taken out.
        verify_ms: Per depth, milliseconds a token of mean context costs the target,
            float64 [max_num_reqs + 1].
        draft_ms: The same of the drafter.
    """

    samples: list[CostSample]
    verify_ms: dict[int, np.ndarray]
    draft_ms: dict[int, np.ndarray]


def split_context(
    samples: Sequence[CostSample], *, depths: Sequence[int], max_num_reqs: int
) -> ContextCosts:
    """Take the context out of timed passes and price it.

    Varlen passes are priced by the uniform ones of the deepest depth.

    Args:
        samples: Timed passes, some sizes at two contexts.
        depths: Enabled draft depths.
        max_num_reqs: Largest request count to cover.
    """
    verify = {d: _price(samples, "uniform", d, max_num_reqs) for d in depths}
    draft = {d: _price(samples, "draft", d, max_num_reqs) for d in depths}
    deepest = max(depths)
    shortest: dict[str, int] = {}
    for s in samples:
        shortest[s.kind] = min(s.context_tokens, shortest.get(s.kind, s.context_tokens))
    without = []
    for s in samples:
        if s.context_tokens != shortest[s.kind]:
            continue
        prices = draft if s.kind == "draft" else verify
        price = prices.get(deepest if s.kind == "varlen" else s.depth)
        if price is not None and s.context_tokens:
            attention = price[min(s.num_reqs, max_num_reqs)] * s.context_tokens
            s = replace(s, ms=max(s.ms - float(attention), 0.0), context_tokens=0)
        without.append(s)
    return ContextCosts(without, verify, draft)


def _price(
    samples: Sequence[CostSample], kind: str, depth: int, max_num_reqs: int
) -> np.ndarray:
    """Milliseconds for a token of mean context, by the number of requests."""
    of_kind = [
        s for s in samples if (s.kind, s.depth) == (kind, depth) and s.full_cudagraph
    ]
    contexts = sorted({s.context_tokens for s in of_kind})
    prices: list[tuple[int, float]] = []
    if len(contexts) > 1:
        base = dict(_medians(of_kind, contexts[0]))
        for context in contexts[1:]:
            for num_reqs, ms in _medians(of_kind, context):
                if num_reqs in base:
                    # Noise must not make context a gain.
                    added = max(ms - base[num_reqs], 0.0)
                    prices.append((num_reqs, added / (context - contexts[0])))
    points, _ = median_points(prices)
    if not points:
        return np.zeros(max_num_reqs + 1)
    sizes = np.arange(max_num_reqs + 1, dtype=np.float64)
    return interpolate(sizes, points)


def _medians(samples: Sequence[CostSample], context: int) -> list[tuple[int, float]]:
    return median_points(
        (s.num_reqs, s.ms) for s in samples if s.context_tokens == context
    )[0]
