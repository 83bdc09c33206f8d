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
from vllm.v1.worker.gpu.dspark_cudagraph_utils import CapacityCudaGraphManager, ladder

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


@settings(deadline=None)
@given(st.integers(1, 3000))
def test_ladder_rises_to_its_end_by_at_most_a_sixteenth(max_value):
    sizes = ladder(max_value)
    assert sizes[0] == 1 and sizes[-1] == max_value
    for small, large in zip(sizes, sizes[1:], strict=False):
        assert small < large <= max(small + 1, small * 17 / 16)


def test_ladder_is_short():
    assert len(ladder(1024)) < 120
