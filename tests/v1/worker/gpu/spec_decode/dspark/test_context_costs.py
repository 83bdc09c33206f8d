# SPDX-License-Identifier: Apache-2.0
"""Splitting timed passes into what they take and what their context adds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.worker.gpu.spec_decode.dspark.context_costs import split_context
from vllm.v1.worker.gpu.spec_decode.dspark.sps_curve import CostSample

MAX_REQS, SHORT, LONG = 16, 128, 4096
DEPTHS = (1, 4)
UNIFORM_REQS, LONG_REQS = (1, 2, 4, 8, 16), (1, 4, 16)


def base_ms(kind, depth, num_reqs, num_tokens):
    return {"draft": 1.0 + 0.1 * depth * num_reqs, "uniform": 5.0 + num_tokens}.get(
        kind, 4.0 + 1.1 * num_tokens
    )


def price_ms(kind, depth):
    """Milliseconds a request and token of context."""
    return 1e-5 * (1 + depth) if kind == "draft" else 1e-4 * (4 + depth)


def sample(kind, depth, num_reqs, num_tokens, context, *, graph=True):
    price_of = DEPTHS[-1] if kind == "varlen" else depth
    attention = price_ms("draft" if kind == "draft" else "uniform", price_of)
    ms = base_ms(kind, depth, num_reqs, num_tokens) + attention * num_reqs * context
    return CostSample(kind, depth, num_reqs, num_tokens, ms, graph, context)


def profile(*, long=LONG):
    samples = []
    for depth in DEPTHS:
        for context, sizes in ((SHORT, UNIFORM_REQS), (long, LONG_REQS)):
            for reqs in sizes:
                for kind in ("uniform", "draft"):
                    samples.append(
                        sample(kind, depth, reqs, reqs * (depth + 1), context)
                    )
    for tokens in (4, 16, 64):
        reqs = min(tokens, MAX_REQS)
        samples.append(sample("varlen", DEPTHS[-1], reqs, tokens, SHORT))
    return samples


def split(samples):
    return split_context(samples, depths=DEPTHS, max_num_reqs=MAX_REQS)


def test_linear_times_are_split_exactly():
    costs = split(profile())
    reqs = np.arange(1, MAX_REQS + 1)
    for depth in DEPTHS:
        for tables, kind in ((costs.verify_ms, "uniform"), (costs.draft_ms, "draft")):
            np.testing.assert_allclose(
                tables[depth][1:], price_ms(kind, depth) * reqs, rtol=1e-6
            )
    assert {s.kind for s in costs.samples} == {"uniform", "draft", "varlen"}
    for s in costs.samples:
        expected = base_ms(s.kind, s.depth, s.num_reqs, s.num_tokens)
        assert s.ms == pytest.approx(expected) and s.context_tokens == 0


def test_varlen_graph_is_not_charged_for_the_requests_it_was_timed_with():
    # 16 tokens were timed as 16 requests; a trimmed batch of 16 tokens may be 4.
    samples = split(profile()).samples
    [varlen] = [s for s in samples if (s.kind, s.num_tokens) == ("varlen", 16)]
    assert varlen.num_reqs == 16, "premise"
    assert varlen.ms == pytest.approx(base_ms("varlen", 4, 16, 16))


def test_samples_at_one_context_stay_as_they_are():
    samples = [s for s in profile() if s.context_tokens == SHORT]
    costs = split(samples)
    assert all(not table.any() for table in costs.verify_ms.values())
    assert [s.ms for s in costs.samples] == [s.ms for s in samples]


def test_context_that_seems_to_save_time_is_noise():
    samples = [
        CostSample("uniform", d, r, r * (d + 1), ms, True, c)
        for d in DEPTHS
        for r in LONG_REQS
        for c, ms in ((SHORT, 5.0), (LONG, 4.9))
    ]
    costs = split(samples)
    assert all(not table.any() for table in costs.verify_ms.values())
    assert {s.ms for s in costs.samples} == {5.0}


def test_one_stalled_repeat_does_not_set_the_price():
    stalled = [
        CostSample(s.kind, s.depth, s.num_reqs, s.num_tokens, s.ms * 10, True, LONG)
        for s in profile()
        if s.context_tokens == LONG and s.num_reqs == 4
    ]
    assert stalled, "premise"
    costs = split(profile() + profile() + stalled)
    np.testing.assert_allclose(costs.verify_ms[4], split(profile()).verify_ms[4])


def test_eager_passes_do_not_price_context():
    eager = [
        sample("uniform", 4, 8, 40, LONG, graph=False),
        CostSample("uniform", 4, 8, 40, 1e3, False, SHORT),
    ]
    costs = split(profile() + eager)
    np.testing.assert_array_equal(costs.verify_ms[4], split(profile()).verify_ms[4])


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 100), min_size=12, max_size=12), st.integers(1, 30_000))
def test_prices_never_fall_with_the_batch_nor_below_zero(times, more):
    contexts = (SHORT, SHORT + more)
    grid = [(c, r) for c in contexts for r in (1, 2, 4, 8, 12, 16)]
    samples = [
        CostSample("uniform", 4, r, 5 * r, ms, True, c)
        for (c, r), ms in zip(grid, times, strict=True)
    ]
    costs = split(samples)
    table = costs.verify_ms[4]
    assert np.isfinite(table).all() and table.min() >= 0
    assert (np.diff(table) >= 0).all()
    assert all(s.ms >= 0 for s in costs.samples)
