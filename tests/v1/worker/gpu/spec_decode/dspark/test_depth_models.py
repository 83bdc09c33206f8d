# SPDX-License-Identifier: Apache-2.0
"""What the draft model families mean for a depth below K; see docs/models.md."""

from pathlib import Path

import pytest
import torch

from vllm.config.dspark_speculative import DFLASH_ARCHITECTURES
from vllm.model_executor.models import registry
from vllm.v1.worker.gpu.spec_decode.dspark.depth_speculator import (
    DepthDSparkSpeculator,
)

ROOT = Path(__file__).parents[6]
K, WINDOW, BLOCK = 7, 16, 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_every_block_draft_of_this_vllm_is_in_the_list():
    text = (ROOT / "docs" / "models.md").read_text()
    names = [
        name
        for name in registry._SPECULATIVE_DECODING_MODELS
        if any(kind in name for kind in ("DSpark", "DFlash", "XPress", "LiLiCorr"))
    ]
    assert len(names) > 8, "premise"
    assert [name for name in names if f"`{name}`" not in text] == []


def test_one_speculator_serves_every_dspark_family(monkeypatch):
    """The seam replaces the one class that the method builds, whatever the draft."""
    from types import SimpleNamespace

    from vllm.v1.worker.gpu.spec_decode import init_speculator
    from vllm.v1.worker.gpu.spec_decode.dspark import speculator

    monkeypatch.setattr(
        speculator, "DSparkSpeculator", lambda *args: DepthDSparkSpeculator
    )
    # No architecture: none is looked at.
    config = SimpleNamespace(method="dspark")
    vllm_config = SimpleNamespace(speculative_config=config)
    assert init_speculator(vllm_config, DEVICE, None) is DepthDSparkSpeculator


def test_the_dflash_drafts_are_those_of_the_plain_speculator(monkeypatch):
    """Each other architecture of the method has a speculator of its own."""
    import importlib
    from types import SimpleNamespace

    from vllm.v1.worker.gpu.spec_decode import dflash, init_speculator

    parent = dflash.__name__.rpartition(".")[0]
    kinds = {
        name: importlib.import_module(f"{parent}.{name.lower()}.speculator")
        for name in ("DFlash", "DFlash2", "LiLiCorr")
    }
    for name, module in kinds.items():
        monkeypatch.setattr(module, f"{name}Speculator", lambda *args, name=name: name)
    names = [
        name
        for name in registry._SPECULATIVE_DECODING_MODELS
        if any(kind in name for kind in ("DFlash", "LiLiCorr", "MuseGlimmer"))
        and "XPress" not in name
    ]
    built = {}
    for name in names:
        draft = SimpleNamespace(architectures=[name])
        config = SimpleNamespace(method="dflash", draft_model_config=draft)
        vllm_config = SimpleNamespace(speculative_config=config)
        built[name] = init_speculator(vllm_config, DEVICE, None)
    assert len(set(built.values())) == 3, "premise"
    plain = {name for name, found in built.items() if found == "DFlash"}
    plain -= {"MuseGlimmerForCausalLM"}  # a target
    assert plain == DFLASH_ARCHITECTURES & set(names)


def _expected_slots(prefix: int, depth: int, table: list[int]) -> list[int]:
    """Return what a DeepSeek-V4 draft attends to: a window, then the whole block."""
    positions = range(max(prefix - WINDOW, 0), prefix + depth)
    return [table[p // BLOCK] * BLOCK + p % BLOCK for p in positions]


@pytest.mark.parametrize("depth", [1, 3, K])
def test_deepseek_v4_lists_the_block_of_any_depth_within_the_width_for_k(depth):
    """The index rows are as wide as K needs and are filled for the depth's block.

    Its attention needs GPU kernels; the kernel that lists the keys is Triton.
    """
    from vllm.v1.attention.backends.mla import sparse_swa

    width = sparse_swa.get_dspark_swa_index_width(WINDOW, K)
    prefixes = [3, WINDOW + 5]
    tables = [[5, 2, 9, 4], [7, 1, 3, 8]]
    num_tokens = len(prefixes) * depth
    int32 = {"dtype": torch.int32, "device": DEVICE}
    indices = torch.full((num_tokens + 1, width), 99, **int32)
    lengths = torch.full((num_tokens + 1,), 99, **int32)
    # One padding row, as in a graph for more requests.
    rows = torch.tensor([*[0] * depth, *[1] * depth, 0], **int32)
    is_valid = torch.tensor([*[True] * num_tokens, False], device=DEVICE)
    block_table = torch.tensor(tables, **int32)
    sparse_swa.ComputeDSparkNoncausalSWAIndicesKernel.kernel[(num_tokens + 1,)](
        indices,
        indices.stride(0),
        lengths,
        WINDOW,
        width,
        torch.tensor([0, depth, 2 * depth], **int32),
        torch.tensor([p + depth for p in prefixes], **int32),
        rows,
        is_valid,
        block_table,
        block_table.stride(0),
        BLOCK,
        0,
        TRITON_BLOCK_SIZE=64,
    )
    for token in range(num_tokens):
        request = token // depth
        want = _expected_slots(prefixes[request], depth, tables[request])
        assert len(want) <= width
        assert lengths[token] == len(want)
        assert indices[token].tolist() == want + [-1] * (width - len(want))
    assert lengths[num_tokens] == 0
    assert set(indices[num_tokens].tolist()) == {-1}
