# SPDX-License-Identifier: Apache-2.0
"""Which graphs are captured and which one a batch replays, against upstream's own."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.capacity_cases import make_config
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.dspark_cudagraph_utils import (
    FLAT_NUM_TOKENS,
    TILE_NUM_TOKENS,
    CapacityCudaGraphManager,
    ladder,
    thinned,
)

NO_DEADLINE = settings(deadline=None, max_examples=60)
K = 7
SIZES = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 128]
DEPTHS = [0, 1, 3, K]
FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
MODES = [
    CUDAGraphMode.FULL_DECODE_ONLY,
    CUDAGraphMode.FULL_AND_PIECEWISE,
    CUDAGraphMode.FULL,
]
by_mode = pytest.mark.parametrize("mode", MODES)


def make_vllm_config(*, max_num_reqs=16, sizes=SIZES, depths=DEPTHS, enabled=True):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_reqs),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=list(sizes),
            max_cudagraph_capture_size=max(sizes, default=0),
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        num_speculative_tokens=K,
        speculative_config=SimpleNamespace(
            uses_dynamic_speculative_decoding=lambda: False,
            capacity_enabled=enabled,
            capacity_config=make_config(
                dspark_sps_curve="auto", dspark_draft_depths=depths
            ),
        ),
    )


def build(cls, mode=MODES[1], *, varlen=True, **options):
    """Return a manager after its capture, without running anything."""
    one_rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DSPARK_DYNAMIC_DRAFT_MIN_DEPTH", "0")
        patch.setattr(cudagraph_utils, "get_pp_group", lambda: one_rank)
        patch.setattr(
            type(current_platform), "get_global_graph_pool", lambda self: None
        )
        manager = cls(
            make_vllm_config(**options),
            torch.device("cpu"),
            mode,
            K + 1,
            varlen_decode=varlen,
        )
    manager.graphs = {d: None for d in manager._capture_descs.get(FULL, ())}
    manager._graphs_captured = True
    return manager


def fixed_k(mode=MODES[1], **options):
    return build(ModelCudaGraphManager, mode, varlen=False, **options)


def ours(mode=MODES[1], **options):
    return build(CapacityCudaGraphManager, mode, **options)


@by_mode
@pytest.mark.parametrize("varlen", [False, True])
def test_every_graph_of_fixed_k_is_captured(mode, varlen):
    stock, manager = fixed_k(mode), ours(mode, varlen=varlen)
    assert stock._capture_descs, "premise"
    for graph_mode, descs in stock._capture_descs.items():
        assert set(descs) <= set(manager._capture_descs[graph_mode])


@by_mode
@pytest.mark.parametrize("max_num_reqs", [1, 5, 16, 40])
def test_uniform_batch_dispatches_as_fixed_k_does(mode, max_num_reqs):
    stock = fixed_k(mode, max_num_reqs=max_num_reqs)
    manager = ours(mode, max_num_reqs=max_num_reqs)
    for num_reqs in range(1, max_num_reqs + 1):
        for max_query_len in (K + 1, None):
            batch = (num_reqs, num_reqs * (K + 1), K + 1, 0, max_query_len)
            expected, found = stock.dispatch(*batch), manager.dispatch(*batch)
            if expected.cg_mode == FULL:
                assert found == expected
            else:
                # Where fixed K leaves its graphs, a varlen one may still serve.
                assert found == expected or found.max_query_len


@NO_DEADLINE
@given(
    mode=st.sampled_from(MODES),
    widths=st.lists(st.integers(1, K + 1), min_size=1, max_size=16),
)
def test_batch_that_is_not_uniform_never_matches_a_uniform_graph(mode, widths):
    found = ours(mode).dispatch(len(widths), sum(widths), None, 0, max(widths))
    assert found.uniform_token_count is None
    assert found.num_tokens >= sum(widths)
    assert found.num_reqs is None or found.num_reqs >= len(widths)


@NO_DEADLINE
@given(widths=st.lists(st.integers(1, K + 1), min_size=1, max_size=16))
def test_trimmed_batch_replays_the_varlen_graph_of_its_size(widths):
    manager = ours()
    total = sum(widths)
    found = manager.dispatch(len(widths), total, None, 0, max(widths))
    assert found.cg_mode == FULL and found.max_query_len == K + 1
    fitting = [size for size in manager.varlen_num_tokens() if size >= total]
    assert found.num_tokens == fitting[0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_enabled_depth_has_uniform_graphs_up_to_the_largest_batch(depth):
    manager = ours()
    sizes = manager.uniform_num_reqs(depth)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 16
    for num_reqs in range(1, 17):
        width = depth + 1
        found = manager.dispatch(num_reqs, num_reqs * width, width, 0, width)
        assert found.uniform_token_count == width
        assert found.cg_mode == FULL
        assert found.num_reqs == min(size for size in sizes if size >= num_reqs)


def test_narrow_graphs_stay_within_the_capture_limit():
    manager = ours(max_num_reqs=100)
    limit = max(SIZES)
    assert max(d.num_tokens for d in manager._capture_descs[FULL]) <= limit
    assert manager.uniform_num_reqs(1)[-1] == limit // 2


def test_without_varlen_no_varlen_graph_is_captured():
    assert ours(varlen=False).varlen_num_tokens() == []
    assert ours().varlen_num_tokens(), "premise"


@by_mode
def test_no_graph_is_captured_twice_and_the_largest_comes_first(mode):
    for descs in ours(mode)._capture_descs.values():
        assert len(set(descs)) == len(descs)
        sizes = [d.num_tokens for d in descs]
        assert sizes == sorted(sizes, reverse=True)


def test_full_graphs_are_tried_before_piecewise_ones():
    for found in ours()._candidates.values():
        modes = [d.cg_mode for d in found]
        assert modes == sorted(modes, key=lambda mode: mode != FULL)
        assert len(set(found)) == len(found)


@by_mode
def test_every_graph_that_a_batch_may_get_is_captured(mode):
    manager = ours(mode)
    for found in manager._candidates.values():
        for desc in found:
            assert desc in manager._capture_descs[desc.cg_mode]


def test_mixed_batches_get_upstreams_piecewise_graphs():
    stock, manager = fixed_k(), ours()
    assert set(manager._capture_descs[PIECEWISE]) == set(
        stock._capture_descs[PIECEWISE]
    )
    for num_tokens in range(1, max(SIZES) + 1):
        batch = (3, num_tokens, None, 0, None)
        assert manager.dispatch(*batch) == stock.dispatch(*batch)


@pytest.mark.parametrize("varlen", [False, True])
def test_engine_without_capacity_gets_upstreams_graphs(varlen):
    stock = build(ModelCudaGraphManager, varlen=varlen)
    manager = ours(varlen=varlen, enabled=False)
    assert manager._candidates == stock._candidates
    assert manager._capture_descs == stock._capture_descs


@pytest.mark.parametrize("varlen", [False, True])
def test_configuration_is_as_before(varlen):
    manager = ours(varlen=varlen)
    assert manager.compilation_config.cudagraph_capture_sizes == SIZES
    assert manager.decode_query_len == K + 1
    assert manager.varlen_decode == varlen


def test_no_capture_sizes_mean_no_graphs():
    manager = ours(sizes=[])
    assert not manager._capture_descs.get(FULL)
    assert manager.dispatch(1, 8, 8, 0, 8).cg_mode == CUDAGraphMode.NONE


@NO_DEADLINE
@given(st.integers(1, 3000), st.integers(1, 17), st.sampled_from([8, 16]))
def test_ladder_rises_to_its_end_in_steps_that_pad_little(max_value, width, parts):
    sizes = ladder(max_value, width, parts=parts)
    assert sizes[0] == 1 and sizes[-1] == max_value
    for small, large in zip(sizes, sizes[1:], strict=False):
        assert small < large
        in_flat = small * width < FLAT_NUM_TOKENS and large <= 2 * small
        in_tile = (large - small) * width <= max(TILE_NUM_TOKENS, width)
        assert in_flat or in_tile or large <= small * (1 + 1 / parts)


def test_ladder_is_sparse_only_where_the_batch_is_small():
    assert ladder(256, 2) == [1, 2, 4, 8, 16, *range(32, 257, 8)]
    assert ladder(40, 6) == [1, 2, 4, 8, *range(16, 41, 2)]
    assert ladder(20, 64) == list(range(1, 17)) + [17, 18, 19, 20]
    assert ladder(0, 4) == []


def test_each_narrow_depth_costs_few_graphs():
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16)]
    manager = ours(max_num_reqs=256, sizes=sizes, depths=[1, 2, 3, 5, K])
    num_graphs = {d: len(manager.uniform_num_reqs(d)) for d in (1, 2, 3, 5)}
    assert max(num_graphs.values()) <= 52
    assert len(manager.varlen_num_tokens()) <= 64


@NO_DEADLINE
@given(st.sets(st.integers(1, 600), min_size=1))
def test_thinned_sizes_are_some_of_the_given_ones_and_pad_little_more(sizes):
    given_sizes = sorted(sizes)
    kept = thinned(given_sizes)
    assert set(kept) <= sizes and kept[-1] == given_sizes[-1]
    for size in given_sizes:
        padding = min(k for k in kept if k >= size) - size
        flat = size < FLAT_NUM_TOKENS and padding < size
        assert flat or padding < max(TILE_NUM_TOKENS, size / 16)


def test_thinned_default_sizes():
    upstream = [1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16)]
    most = [1, 2, 4, 8, 16, 32, *range(64, 257, 16), *range(272, 512, 16)]
    assert thinned(upstream) == [*most, *range(512, 1025, 32)]
