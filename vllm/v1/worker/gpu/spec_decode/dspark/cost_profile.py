# SPDX-License-Identifier: Apache-2.0
"""Which batches are timed at start, and what their timings say.

Each served layout on the graph that serves it: uniform decode batches of every
enabled depth, varlen batches by token count, all at a short context; and a few
uniform ones at a long context, for the price of attention.

Invariants (pinned by tests/.../dspark/test_cost_profile.py):
  * No batch exceeds max_num_batched_tokens, max_model_len or the KV cache.
  * The first and the last size of every layout are timed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vllm.v1.worker.gpu.spec_decode.dspark.sps_curve import CostSample

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.async_utils import StepTimingSample
    from vllm.v1.worker.gpu.dspark_cudagraph_utils import CapacityCudaGraphManager

# Sizes timed per depth, and varlen sizes, of the captured ones (about 50 and 60): the
# others are read off the line between their neighbours.
NUM_UNIFORM_POINTS = 14
NUM_VARLEN_POINTS = 24
# Attention is linear in the context and nearly so in the requests.
NUM_CONTEXT_POINTS = 4
# Contexts of the dummy requests, tokens. The long one is bounded by the model and the
# KV cache; blocks that requests share would be read from the GPU's cache.
SHORT_CONTEXT_TOKENS = 128
LONG_CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How thoroughly to profile.

    Attributes:
        repeats: Timings of each batch; 3 are enough for a median that survives one
            stall.
        warmup: Runs of each batch before it is timed.
        num_reqs: Request counts to time at every depth; empty spreads them over the
            captured ones.
    """

    repeats: int = 3
    warmup: int = 0
    num_reqs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ProfileHooks:
    """What profiling needs from the runner.

    Attributes:
        graphs: The target's graph manager.
        measure_sample_ms: Returns ``(logits rows, ms)`` points of logits and
            sampling, ascending.
        set_depth: Makes the runner's dummy decodes run at a draft depth.
        draft_num_reqs: Returns the request counts with a drafter graph of a depth.
        max_model_len: Longest sequence, tokens.
        num_kv_tokens: Tokens that the KV cache holds.
    """

    graphs: "CapacityCudaGraphManager"
    measure_sample_ms: Callable[[], list[tuple[int, float]]]
    set_depth: Callable[[int], None]
    draft_num_reqs: Callable[[int], list[int]]
    max_model_len: int
    num_kv_tokens: int


@dataclass(frozen=True, slots=True)
class ProfileShape:
    """One batch to time.

    Attributes:
        kind: ``uniform`` (``depth + 1`` tokens a request) or ``varlen``.
        depth: Draft depth of the pass.
        num_tokens: Target tokens.
        context_tokens: Context of every request.
    """

    kind: Literal["uniform", "varlen"]
    depth: int
    num_tokens: int
    context_tokens: int

    def dummy_run(self) -> dict[str, Any]:
        """Return the arguments of the runner's dummy run."""
        return {
            "num_tokens": self.num_tokens,
            "uniform_decode": self.kind == "uniform",
            "context_len": self.context_tokens,
        }

    def samples(
        self, timing: "StepTimingSample", sample_ms: Sequence[tuple[int, float]]
    ) -> Iterator[CostSample]:
        """Yield what one timing of this batch says.

        Args:
            timing: Of the target's forward and the drafter.
            sample_ms: ``(logits rows, ms)`` of logits and sampling, ascending.
        """
        rows, ms = np.asarray(sample_ms, dtype=np.float64).T
        # Every token of a decode batch has a logits row.
        verify_ms = timing.forward_ms + float(
            np.interp(timing.num_target_tokens, rows, ms)
        )
        size = (self.depth, timing.num_reqs, timing.num_target_tokens)
        graph, context = timing.full_cudagraph, self.context_tokens
        yield CostSample(self.kind, *size, verify_ms, graph, context)
        if graph:
            # Eager target steps leave gaps between the drafter's launches.
            yield CostSample("draft", *size, timing.drafter_ms, True, context)


def thin(sizes: Sequence[int], num_points: int) -> list[int]:
    """Pick about ``num_points`` sizes spread evenly in their logarithm.

    Args:
        sizes: Ascending positive sizes.
        num_points: Points wanted, >= 2. The first and last size always stay.
    """
    if len(sizes) <= num_points:
        return list(sizes)
    wanted = np.geomspace(sizes[0], sizes[-1], num_points)
    nearest = np.searchsorted(np.asarray(sizes), wanted - 1e-9)
    return [sizes[i] for i in sorted(set(np.minimum(nearest, len(sizes) - 1)))]


def flat_samples(
    samples: Sequence[CostSample], max_num_tokens: int
) -> list[CostSample]:
    """Price trimmed batches of an engine that keeps every batch's shape.

    It verifies as much whatever the budget, so all budgets cost alike, and no less
    than verifying everything: no plan trims in order to save time.

    Args:
        samples: Uniform batches and drafts, context taken out.
        max_num_tokens: Largest batch in tokens.
    """
    verify = [s for s in samples if s.kind == "uniform"]
    if not verify:
        return []
    dearest = max(verify, key=lambda s: s.ms)
    return [
        replace(dearest, kind="varlen", num_tokens=tokens, full_cudagraph=False)
        for tokens in (1, max_num_tokens)
    ]


def profile_shapes(
    hooks: ProfileHooks,
    *,
    depths: Sequence[int],
    max_num_reqs: int,
    max_num_tokens: int,
    num_reqs: Sequence[int] = (),
) -> list[ProfileShape]:
    """Return the batches to time, largest first within a layout.

    Args:
        hooks: The runner's side.
        depths: Enabled draft depths, ascending.
        max_num_reqs: Largest batch in requests.
        max_num_tokens: Largest batch in tokens.
        num_reqs: Request counts to time at every depth; empty spreads them over the
            captured ones.
    """
    short = _context(hooks, SHORT_CONTEXT_TOKENS, 1, depths[-1])
    shallowest = min(d for d in depths if d > 0)
    shapes: list[ProfileShape] = []
    for depth in depths:
        captured = hooks.graphs.uniform_num_reqs(depth)
        inside = [r for r in num_reqs if r <= max(captured, default=0)]
        in_graphs = inside or thin(captured, NUM_UNIFORM_POINTS)
        # The largest batch may lie beyond the graphs: then it runs eagerly.
        for reqs in sorted({*in_graphs, max_num_reqs}, reverse=True):
            num_tokens = reqs * (depth + 1)
            # A step at depth 0 lays out the query rows of the shallowest draft.
            if reqs * (max(depth, shallowest) + 1) <= max_num_tokens:
                shapes.append(ProfileShape("uniform", depth, num_tokens, short))
        shapes += _long_shapes(hooks, depth, short, in_graphs)
    varlen = hooks.graphs.varlen_num_tokens()
    largest = max(varlen, default=0)
    # Beyond the graphs, up to the largest mixed batch: a few points suffice for
    # a line, and each is a batch that memory profiling has already run.
    tail = (largest + largest // 2, 2 * largest, max_num_tokens)
    sizes = {*thin(varlen, NUM_VARLEN_POINTS)}
    sizes |= {min(t, max_num_tokens) for t in tail if largest}
    shapes += [
        ProfileShape("varlen", depths[-1], t, short)
        for t in sorted(sizes, reverse=True)
    ]
    return shapes


def _context(hooks: ProfileHooks, wanted: int, num_reqs: int, depth: int) -> int:
    """Longest context up to ``wanted`` that model and KV cache have room for."""
    of_each = min(hooks.max_model_len, hooks.num_kv_tokens // max(num_reqs, 1))
    return max(min(wanted, of_each - (depth + 1)), 0)


def _long_shapes(
    hooks: ProfileHooks, depth: int, short: int, timed: Sequence[int]
) -> list[ProfileShape]:
    shapes = []
    for num_reqs in reversed(thin(timed, NUM_CONTEXT_POINTS)):
        context = _context(hooks, LONG_CONTEXT_TOKENS, num_reqs, depth)
        # Less than twice the short one tells noise rather than a slope.
        if context >= 2 * short > 0:
            tokens = num_reqs * (depth + 1)
            shapes.append(ProfileShape("uniform", depth, tokens, context))
    return shapes
