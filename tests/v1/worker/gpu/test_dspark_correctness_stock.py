# SPDX-License-Identifier: Apache-2.0
"""Properties of stock vLLM in docs/correctness.md that need no engine to show."""

import random
import re
from pathlib import Path

import pytest
import torch

# More block ids a row than one iteration of the gather and the write kernel copies.
KERNEL_BLOCK = 1024
LONG_ROW = 2 * KERNEL_BLOCK + 77


@pytest.fixture
def block_tables():
    """Block tables of one and of two KV cache groups, six request slots."""
    import vllm.v1.worker.cpu.shm  # noqa: F401  (torch.cuda names on a CPU)
    from vllm.v1.worker.gpu.block_table import BlockTables

    def make(num_groups: int) -> BlockTables:
        return BlockTables(
            block_sizes=[16] * num_groups,
            max_num_reqs=6,
            max_num_batched_tokens=64,
            max_num_blocks_per_group=[LONG_ROW] * num_groups,
            device=torch.device("cpu"),
        )

    return make


@pytest.mark.skipif(torch.cuda.is_available(), reason="built for the CPU rehearsal")
@pytest.mark.parametrize("num_groups", [1, 2])
def test_block_rows_longer_than_a_kernel_block_move_intact(block_tables, num_groups):
    tables, rng = block_tables(num_groups), random.Random(0)
    lengths = [LONG_ROW, 1, KERNEL_BLOCK, KERNEL_BLOCK + 1, 40, LONG_ROW - 1]
    rows: dict[int, list[list[int]]] = {}
    for slot, length in enumerate(lengths):
        rows[slot] = [
            [rng.randrange(1, 1 << 20) for _ in range(length)]
            for _ in range(num_groups)
        ]
        # In two parts, the second one unaligned: a request that grew.
        first = length // 3
        for start, stop, overwrite in ((0, first, True), (first, length, False)):
            parts = tuple(row[start:stop] for row in rows[slot])
            tables.append_block_ids(slot, parts, overwrite)
        tables.apply_staged_writes()
    # Rows change places from step to step: the batch order is not the slot order.
    for order in ([5, 0, 3, 1, 2, 4], [0, 5], [3, 2, 0, 5, 4, 1]):
        gathered = tables.gather_block_tables(torch.tensor(order), len(order))
        for group in range(num_groups):
            for batch_row, slot in enumerate(order):
                want = rows[slot][group]
                got = gathered[group][batch_row, : len(want)].tolist()
                assert got == want, (order, slot)


@pytest.mark.skipif(torch.cuda.is_available(), reason="built for the CPU rehearsal")
def test_padded_block_rows_point_at_the_null_block(block_tables):
    tables = block_tables(1)
    for slot in range(6):
        tables.append_block_ids(slot, ([slot + 1] * LONG_ROW,), True)
    tables.apply_staged_writes()
    tables.gather_block_tables(torch.arange(6), 6)
    [gathered] = tables.gather_block_tables(torch.tensor([2]), 4)
    assert set(gathered[0].tolist()) == {3}
    assert set(gathered[1:4].flatten().tolist()) == {0}


def test_zero_speculative_tokens_are_refused(tiny_draft):
    from pydantic import ValidationError

    from vllm.config.dspark_speculative import DSparkSpeculativeConfig

    with pytest.raises(ValidationError, match="num_speculative_tokens"):
        DSparkSpeculativeConfig(
            method="dspark", model=tiny_draft, num_speculative_tokens=0
        )


@pytest.mark.parametrize("setting", [{"min_p": 0.1}, {"logit_bias": {1: 2.0}}])
def test_min_p_and_logit_bias_are_refused_with_any_speculation(setting):
    """The day this fails, test_dspark_capacity_features.py has two more features."""
    from types import SimpleNamespace

    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    params = SamplingParams(**setting)
    params._validate_spec_decode(None)
    with pytest.raises(VLLMValidationError, match="not yet supported with spec"):
        params._validate_spec_decode(SimpleNamespace())


@pytest.mark.parametrize("non_causal", [True, False])
def test_a_causal_only_backend_is_refused_for_a_block_draft_with_the_reason(
    non_causal,
):
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    class CausalOnly(FlashAttentionBackend):
        @classmethod
        def supports_non_causal(cls) -> bool:
            return False

    reasons = CausalOnly.validate_configuration(
        head_size=128,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=16,
        use_mla=False,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=DeviceCapability(9, 0),
        attn_type="decoder",
        use_non_causal=non_causal,
    )
    refusal = "non-causal attention not supported"
    assert (refusal in reasons) == non_causal


def test_ranks_that_start_from_one_seed_draw_the_same_request_seeds():
    import numpy as np

    from vllm.utils.torch_utils import set_random_seed

    state = np.random.get_state()
    try:
        draws = []
        for _ in range(2):
            set_random_seed(0)
            draws.append(np.random.randint(-(2**62), 2**62, size=4).tolist())
    finally:
        np.random.set_state(state)
    assert draws[0] == draws[1]


def test_every_test_named_in_the_list_exists():
    root = Path(__file__).parents[4]
    named = set(
        re.findall(r"\btest_\w+", (root / "docs" / "correctness.md").read_text())
    )
    assert len(named) > 40, "premise: the list names its tests"
    files = list((root / "tests").rglob("test_*.py"))
    defined = {path.stem for path in files}
    for path in files:
        defined |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    assert not named - defined
