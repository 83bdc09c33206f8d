# SPDX-License-Identifier: Apache-2.0
"""The depth-aware speculator on its own: what a depth swaps, and which graphs exist."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.capacity_cases import DEVICE
from tests.helpers.dflash_draft import write_dflash_draft
from tests.helpers.engine import ENGINE_DEFAULTS, dspark
from vllm.config.compilation import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import AttentionState, CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.dflash import cudagraph as dflash_cudagraph
from vllm.v1.worker.gpu.spec_decode.dspark import depth_speculator as module
from vllm.v1.worker.gpu.spec_decode.dspark.depth_speculator import (
    DepthCudaGraphManager,
    DepthDFlashSpeculator,
    DepthDSparkSpeculator,
)
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

K = 7
DEPTHS = (0, 1, 3, K)
GRAPH_DEPTHS = (1, 3, K)
# Upstream rounds 8 and 16 up to whole requests of 3 tokens, and drops what then
# exceeds the five requests (15 of 18); at width 1 the largest of its sizes is 8.
MAX_NUM_SEQS = 5
CAPTURE_SIZES = [1, 2, 8, 16, 35]


def make_config(target, draft, **keys):
    options = {
        **ENGINE_DEFAULTS,
        "max_num_seqs": MAX_NUM_SEQS,
        "compilation_config": {"cudagraph_capture_sizes": CAPTURE_SIZES},
    }
    config = dspark(draft, K, **keys)
    args = EngineArgs(model=target, speculative_config=config, **options)
    return args.create_engine_config()


@pytest.fixture(scope="module")
def vllm_config(tiny_target, tiny_draft):
    return make_config(
        tiny_target,
        tiny_draft,
        dspark_sps_curve=[[1, 100.0], [64, 50.0]],
        dspark_draft_depths=list(DEPTHS),
    )


@pytest.fixture
def speculator(vllm_config):
    return DepthDSparkSpeculator(vllm_config, DEVICE)


@pytest.fixture
def manager(vllm_config, speculator, monkeypatch):
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    platform = cudagraph_utils.current_platform
    monkeypatch.setattr(type(platform), "get_global_graph_pool", lambda self: (0, 0))
    return DepthCudaGraphManager(
        tuple(speculator.query_len(d) for d in GRAPH_DEPTHS),
        speculator.at_depth,  # query length = depth in the anchor-first layout
        vllm_config,
        DEVICE,
        CUDAGraphMode.FULL_DECODE_ONLY,
        decode_query_len=speculator.num_query_per_req,
    )


def state_of(speculator):
    """Return every attribute: numbers, other objects by identity, tensors in full."""

    def of(value):
        if isinstance(value, torch.Tensor):
            layout = (value.data_ptr(), value.shape, value.stride())
            # As text: unwritten memory may hold NaN, which equals nothing.
            return (*layout, str(value.tolist()) if value.numel() < 10_000 else None)
        return value if isinstance(value, int) else id(value)

    return {name: of(value) for name, value in vars(speculator).items()}


def changed(before, after):
    return sorted(n for n in before | after if before.get(n) != after.get(n))


def test_without_capacity_only_the_logical_depth_is_enabled(tiny_target, tiny_draft):
    config = make_config(tiny_target, tiny_draft)
    assert not config.speculative_config.capacity_enabled, "premise"
    assert DepthDSparkSpeculator(config, DEVICE).draft_depths == (K,)


# ---- at_depth -------------------------------------------------------------------


@pytest.mark.parametrize("depth", GRAPH_DEPTHS)
def test_at_depth_every_layout_follows_the_depth(speculator, depth):
    full_confidence = speculator.draft_token_confidence_probs
    with speculator.at_depth(depth):
        assert speculator.num_speculative_steps == depth
        assert speculator.num_query_per_req == depth
        assert speculator._anchor_idx.tolist() == [
            depth * request for request in range(MAX_NUM_SEQS)
        ]
        assert speculator.sample_col.tolist() == [*range(depth)] * MAX_NUM_SEQS
        probs = speculator.draft_token_confidence_probs
        assert probs.shape == (MAX_NUM_SEQS, depth)
        assert probs.data_ptr() == full_confidence.data_ptr()
        probs[1] = 0.25
    # The engine reads the full buffer: row 1 keeps its place in it.
    assert full_confidence[1, :depth].tolist() == [0.25] * depth


def test_confidences_of_a_shallow_step_do_not_move_other_rows(speculator):
    full = speculator.draft_token_confidence_probs
    full.fill_(0.5)
    with speculator.at_depth(1):
        speculator.draft_token_confidence_probs[:2] = 0.25
    assert full[:2, 0].tolist() == [0.25, 0.25]
    assert (full[:, 1:] == 0.5).all() and (full[2:] == 0.5).all()


@pytest.mark.parametrize("depth", GRAPH_DEPTHS)
def test_outside_at_depth_every_attribute_is_that_of_full_depth(speculator, depth):
    before = state_of(speculator)
    with speculator.at_depth(depth):
        assert bool(changed(before, state_of(speculator))) == (depth != K)
    assert changed(before, state_of(speculator)) == []


def test_an_error_within_a_depth_restores_full_depth(speculator):
    before = state_of(speculator)
    with pytest.raises(KeyError), speculator.at_depth(3):
        raise KeyError
    assert changed(before, state_of(speculator)) == []


def test_full_depth_equals_the_stock_speculator(speculator, vllm_config):
    stock, ours = DSparkSpeculator(vllm_config, DEVICE), speculator
    assert ours.num_query_per_req == stock.num_query_per_req == K
    assert torch.equal(ours._anchor_idx, stock._anchor_idx)
    assert torch.equal(ours.sample_col, stock.sample_col)


def test_tables_of_a_depth_keep_their_address_for_captured_graphs(speculator):
    addresses = []
    for _ in range(2):
        with speculator.at_depth(3):
            tables = (speculator._anchor_idx, speculator.sample_col)
            addresses.append([table.data_ptr() for table in tables])
    assert addresses[0] == addresses[1]


@pytest.fixture
def dflash_speculator(tiny_target, tiny_draft, tmp_path):
    draft = write_dflash_draft(tiny_draft, tmp_path / "draft", causal=False)
    config = make_config(
        tiny_target,
        draft,
        method="dflash",
        dspark_sps_curve="auto",
        dspark_draft_depths=list(DEPTHS),
    )
    return DepthDFlashSpeculator(config, DEVICE)


@pytest.mark.parametrize("depth", GRAPH_DEPTHS)
def test_dflash_has_one_row_more_than_drafts_at_every_depth(dflash_speculator, depth):
    speculator = dflash_speculator
    full, before = speculator.draft_tokens, state_of(speculator)
    with speculator.at_depth(depth):
        assert speculator.num_speculative_steps == depth
        assert speculator.num_query_per_req == 1 + depth
        assert speculator.sample_col.tolist() == [*range(depth)] * MAX_NUM_SEQS
        # Upstream assigns [R, d] to its first rows.
        speculator.draft_tokens[:2] = torch.arange(2 * depth).view(2, depth)
    assert full[:2, :depth].flatten().tolist() == [*range(2 * depth)]
    assert (full[:2, depth:] == 0).all() and (full[2:] == 0).all()
    full.zero_()
    assert changed(before, state_of(speculator)) == []


# ---- graphs -----------------------------------------------------------------------


def descs_of(manager):
    return manager._capture_descs[CUDAGraphMode.FULL]


def test_descriptors_of_different_depths_differ_in_their_width(manager):
    descs = descs_of(manager)
    assert {d.uniform_token_count for d in descs} == set(GRAPH_DEPTHS)
    assert len(set(descs)) == len(descs)
    for desc in descs:
        assert desc.num_tokens == desc.num_reqs * desc.uniform_token_count


@pytest.mark.parametrize("depth", GRAPH_DEPTHS)
def test_a_full_batch_has_a_graph_at_every_depth(manager, depth):
    reqs = [d.num_reqs for d in descs_of(manager) if d.uniform_token_count == depth]
    assert max(reqs) == MAX_NUM_SEQS


def test_graphs_of_full_depth_are_those_of_the_stock_manager(manager, vllm_config):
    stock = dflash_cudagraph.DFlashCudaGraphManager(
        vllm_config, DEVICE, CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=K
    )
    ours = [d for d in descs_of(manager) if d.uniform_token_count == K]
    assert ours == descs_of(stock)


@pytest.mark.parametrize(
    ("depth", "num_reqs"),
    list(itertools.product(GRAPH_DEPTHS, range(1, MAX_NUM_SEQS + 1))),
)
def test_a_batch_dispatches_to_a_graph_of_its_own_depth(manager, depth, num_reqs):
    manager._graphs_captured = True
    desc = manager.dispatch(num_reqs, num_reqs * depth, depth, num_active_loras=0)
    assert desc.cg_mode == CUDAGraphMode.FULL
    assert desc.uniform_token_count == depth
    assert desc.num_reqs >= num_reqs


def test_a_depth_that_is_not_enabled_matches_no_graph(manager):
    manager._graphs_captured = True
    desc = manager.dispatch(3, 6, 2, num_active_loras=0)
    assert desc.cg_mode == CUDAGraphMode.NONE


def test_building_the_manager_leaves_the_config_and_width_alone(manager, vllm_config):
    assert vllm_config.compilation_config.cudagraph_capture_sizes == CAPTURE_SIZES
    assert manager.decode_query_len == K


def test_every_graph_is_prepared_and_run_at_the_depth_of_its_descriptor(
    manager, speculator, monkeypatch
):
    prepared, run = [], []

    def prepare_inputs(num_reqs, num_tokens, *args, **kwargs):
        prepared.append((num_tokens, num_reqs, speculator.num_speculative_steps))
        return AttentionState(None, {})

    def capture_all(self, create_forward_fn, *args, **kwargs):
        for desc in descs_of(self):
            for warmup in (True, False):
                create_forward_fn(desc, warmup=warmup)(CUDAGraphMode.NONE)

    def forward(num_reqs, num_tokens, *args):
        run.append((num_tokens, num_reqs, speculator.num_speculative_steps))

    monkeypatch.setattr(
        dflash_cudagraph, "_prepare_dflash_inputs_to_capture", prepare_inputs
    )
    monkeypatch.setattr(CudaGraphManager, "capture", capture_all)
    manager.capture(forward, *[None] * 5, causal=True, prepare_forward=lambda *_: None)
    expected = [
        (d.num_tokens, d.num_reqs, d.uniform_token_count)
        for d in descs_of(manager)
        for _ in range(2)
    ]
    assert prepared == expected
    assert run == expected
    assert speculator.num_speculative_steps == K


def test_captured_num_reqs_lists_the_graphs_of_one_depth(manager, speculator):
    speculator.query_cudagraph_manager = manager
    assert speculator.captured_num_reqs(1) == [], "nothing is captured yet"
    manager.graphs = dict.fromkeys(descs_of(manager))
    assert speculator.captured_num_reqs(0) == []
    sizes = {depth: speculator.captured_num_reqs(depth) for depth in GRAPH_DEPTHS}
    # At K upstream's: 1, 2, 8, 16 and 35 tokens, rounded up to whole requests.
    assert sizes == {1: [1, 2, 4, 5], 3: [1, 2, 4, 5], K: [1, 2, 3, 5]}


# ---- propose ----------------------------------------------------------------------


@pytest.fixture
def drafted_at(speculator, monkeypatch):
    """Return a function that proposes and tells at which depth the base class ran."""
    seen = []

    def propose(self, *args, dummy_run, num_speculative_tokens, **kwargs):
        seen.append((self.num_speculative_steps, num_speculative_tokens))
        return self.draft_tokens[:2]

    monkeypatch.setattr(DSparkSpeculator, "propose", propose)

    def run(**kwargs):
        seen.clear()
        drafts = speculator.propose(**kwargs)
        assert drafts.shape == (2, K), "the runner stores the logical width"
        assert drafts.data_ptr() == speculator.draft_tokens.data_ptr()
        return seen[0]

    return run


def test_propose_runs_at_the_scheduled_depth(drafted_at):
    for depth in GRAPH_DEPTHS:
        assert drafted_at(num_speculative_tokens=depth) == (depth, depth)
    assert drafted_at() == (K, K)


def test_depth_zero_still_visits_the_drafter_for_its_context(drafted_at, monkeypatch):
    monkeypatch.setattr(module, "SKIPS_QUERY_PASS", True)
    # vLLM 0.33 stores the context alone when told 0, but lays query rows out first:
    # for many requests, K rows each would not fit its buffers.
    assert drafted_at(num_speculative_tokens=0) == (1, 0)
    monkeypatch.setattr(module, "SKIPS_QUERY_PASS", False)
    assert drafted_at(num_speculative_tokens=0) == (1, 1)


def test_dummy_runs_draft_at_the_depth_being_profiled(drafted_at, speculator):
    speculator.dummy_depth = 3
    assert drafted_at(dummy_run=True) == (3, 3)
    assert drafted_at() == (K, K), "a served step without a depth drafts K"
