# SPDX-License-Identifier: Apache-2.0
"""Which batches are timed at start, within what model and cache have room for."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.capacity_cases import K
from vllm.v1.worker.gpu.async_utils import StepTimingSample
from vllm.v1.worker.gpu.spec_decode.dspark.cost_profile import (
    LONG_CONTEXT_TOKENS,
    NUM_CONTEXT_POINTS,
    SHORT_CONTEXT_TOKENS,
    ProfileHooks,
    ProfileShape,
    profile_shapes,
    thin,
)

DEPTHS = (1, K)


def make_hooks(*, uniform=(1, 2, 4, 8), varlen=(8, 16, 32), model=8192, kv=10**6):
    return ProfileHooks(
        graphs=SimpleNamespace(
            uniform_num_reqs=lambda depth: list(uniform),
            varlen_num_tokens=lambda: list(varlen),
        ),
        measure_sample_ms=lambda: [],
        set_depth=lambda depth: None,
        draft_num_reqs=lambda depth: list(uniform),
        max_model_len=model,
        num_kv_tokens=kv,
    )


def shapes_of(hooks, *, max_num_reqs=8, max_num_tokens=128):
    return profile_shapes(
        hooks, depths=DEPTHS, max_num_reqs=max_num_reqs, max_num_tokens=max_num_tokens
    )


def long_shapes(shapes):
    return [s for s in shapes if s.context_tokens > SHORT_CONTEXT_TOKENS]


def test_every_depth_is_timed_at_two_contexts_and_varlen_at_the_short_one():
    shapes = shapes_of(make_hooks())
    for depth in DEPTHS:
        of_depth = [s for s in shapes if s.kind == "uniform" and s.depth == depth]
        assert {s.context_tokens for s in of_depth} == {
            SHORT_CONTEXT_TOKENS,
            LONG_CONTEXT_TOKENS,
        }
        for context in (SHORT_CONTEXT_TOKENS, LONG_CONTEXT_TOKENS):
            tokens = {s.num_tokens for s in of_depth if s.context_tokens == context}
            assert {depth + 1, 8 * (depth + 1)} <= tokens, "first and last size"
    varlen = [s for s in shapes if s.kind == "varlen"]
    assert {s.context_tokens for s in varlen} == {SHORT_CONTEXT_TOKENS}
    assert {8, 32, 128} <= {s.num_tokens for s in varlen}
    assert len(long_shapes(shapes)) <= NUM_CONTEXT_POINTS * len(DEPTHS)


@settings(deadline=None)
@given(
    max_reqs=st.integers(1, 300),
    max_tokens=st.integers(16, 4096),
    model=st.integers(16, 10_000),
    kv=st.integers(0, 10**6),
)
def test_no_batch_is_larger_than_there_is_room_for(max_reqs, max_tokens, model, kv):
    uniform = thin(range(1, max_reqs + 1), 30)
    uniform = [r for r in uniform if r * (K + 1) <= max_tokens]
    hooks = make_hooks(uniform=uniform, varlen=[min(8, max_tokens)], model=model, kv=kv)
    for shape in shapes_of(hooks, max_num_reqs=max_reqs, max_num_tokens=max_tokens):
        assert shape.num_tokens <= max_tokens
        longest = shape.context_tokens + shape.depth + 1
        assert shape.context_tokens == 0 or longest <= model
        num_reqs = shape.num_tokens // (shape.depth + 1)
        if shape.context_tokens > SHORT_CONTEXT_TOKENS:
            assert num_reqs * longest <= kv


def test_given_sizes_are_timed_at_every_depth_inside_the_graphs():
    shapes = profile_shapes(
        make_hooks(), depths=DEPTHS, max_num_reqs=8, max_num_tokens=128, num_reqs=(3, 9)
    )
    uniform = [s for s in shapes if s.kind == "uniform"]
    assert {s.num_tokens // (s.depth + 1) for s in uniform} == {3, 8}


def test_a_context_too_short_to_tell_a_slope_is_left_out():
    assert not long_shapes(shapes_of(make_hooks(model=2 * SHORT_CONTEXT_TOKENS)))
    roomy = make_hooks(model=2 * SHORT_CONTEXT_TOKENS + K + 1)
    assert {s.context_tokens for s in long_shapes(shapes_of(roomy))} >= {
        2 * SHORT_CONTEXT_TOKENS
    }


def test_large_batches_get_a_shorter_context_that_fits_the_cache():
    shapes = long_shapes(shapes_of(make_hooks(kv=8 * 1000)))
    by_reqs = {s.num_tokens // (s.depth + 1): s.context_tokens for s in shapes}
    assert by_reqs[1] == LONG_CONTEXT_TOKENS
    assert 1000 - K - 1 <= by_reqs[8] <= 1000


def test_target_samples_include_logits_and_sampling_and_their_context():
    shape = ProfileShape("uniform", K, 10, 512)
    timing = StepTimingSample(2.0, 0.5, 10, 2, True)
    verify, draft = shape.samples(timing, [(1, 0.0), (21, 2.0)])
    assert (verify.kind, verify.ms) == ("uniform", pytest.approx(2.9))
    assert (draft.kind, draft.ms) == ("draft", 0.5)
    for sample in (verify, draft):
        assert (sample.num_reqs, sample.context_tokens) == (2, 512)


def test_drafts_beside_an_eager_target_are_not_priced():
    timing = StepTimingSample(2.0, 0.5, 10, 2, False)
    shape = ProfileShape("varlen", K, 10, 128)
    assert [s.kind for s in shape.samples(timing, [(1, 0.0)])] == ["varlen"]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, unique=True).map(sorted),
    num_points=st.integers(2, 30),
)
def test_thin_keeps_the_ends_and_about_the_number_wanted(sizes, num_points):
    kept = thin(sizes, num_points)
    assert kept == sorted(set(kept)) and set(kept) <= set(sizes)
    assert len(kept) <= num_points or kept == sizes
    assert (kept[0], kept[-1]) == (sizes[0], sizes[-1])
    if len(sizes) <= num_points:
        assert kept == sizes


def test_thin_spreads_evenly_in_the_logarithm():
    kept = np.array(thin(list(range(1, 1025)), 11))
    np.testing.assert_array_equal(kept, 2 ** np.arange(11))
