# SPDX-License-Identifier: Apache-2.0
"""Bad input to draft admission is refused with an error that names it."""

import numpy as np
import pytest
import torch

from tests.helpers.admission import DEVICE
from vllm.v1.worker.gpu.spec_decode.dspark.capacity import (
    MAX_ADMISSION_REQS,
    MAX_ADMISSION_STEPS,
    warm_up,
)
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_checks import check_slots
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_reference import (
    make_admission_inputs,
)

INT32 = torch.ones(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"confidence_probs": torch.rand(4)}, "confidence_probs is"),
        ({"confidence_probs": torch.rand(4, 3).double()}, "confidence_probs is"),
        ({"confidence_probs": torch.rand(3, 4).t()}, "confidence_probs is"),
        ({"idx_mapping": torch.zeros(4)}, "idx_mapping is"),
        ({"idx_mapping": INT32.view(2, 2)}, "idx_mapping is"),
        ({"scheduled_drafts": INT32[:3]}, "scheduled_drafts is"),
        ({"scheduled_drafts": INT32.long()}, "scheduled_drafts is"),
        ({"num_non_draft_tokens": INT32.to("meta")}, "num_non_draft_tokens is"),
        ({"capacities_out": INT32[:3]}, "capacities_out is"),
        ({"cu_num_logits_out": INT32}, "cu_num_logits_out is"),
        ({"query_start_loc_out": INT32.repeat(3)[::2]}, "query_start_loc_out is"),
        ({"draft_budget": 2**30 + 1}, "draft_budget is 1073741825"),
        ({"num_bonus_tokens": -1}, "num_bonus_tokens is -1"),
        ({"min_survival": 1.5}, "min_survival is 1.5"),
        ({"min_survival": float("nan")}, "min_survival is nan"),
    ],
)
def test_bad_input_is_named(admit_drafts, change, words):
    arguments = vars(make_admission_inputs(4, 3)) | {
        "draft_budget": 2,
        "num_bonus_tokens": 1,
        "fill_budget": False,
        "capacities_out": torch.empty(4, dtype=torch.int32),
        "cu_num_logits_out": torch.empty(5, dtype=torch.int32),
        "query_start_loc_out": torch.empty(5, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=words):
        admit_drafts(**arguments | change)


@pytest.mark.parametrize(
    ("num_reqs", "num_steps", "words"),
    [
        (MAX_ADMISSION_REQS + 1, 7, "lower max_num_seqs"),
        (4, MAX_ADMISSION_STEPS + 1, "lower num_speculative_tokens"),
    ],
)
def test_sizes_beyond_the_kernel_are_refused_at_start_up(num_reqs, num_steps, words):
    with pytest.raises(ValueError, match=words):
        warm_up(num_reqs, num_steps, DEVICE)


def _assign(assign_capacities, slots=(0, 1), budget=2, dtype=torch.int64):
    idx_mapping = torch.tensor(slots, dtype=dtype)
    scheduled = torch.full((len(slots),), 3, dtype=torch.int32)
    return assign_capacities(torch.ones(2, 3), idx_mapping, scheduled, budget)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("slot", [2, -2, 2**31 - 1])
def test_a_slot_out_of_range_is_named_on_the_cpu(assign_capacities, slot, dtype):
    with pytest.raises(IndexError) as caught:
        _assign(assign_capacities, (0, slot), dtype=dtype)
    text = str(caught.value)
    assert f"idx_mapping[1] is {slot}" in text
    assert "0 to 1 is allowed" in text and "pass the slot" in text


def test_padding_and_the_last_slot_are_in_range(assign_capacities):
    assert _assign(assign_capacities, (-1, 1, 0), budget=6).tolist() == [0, 3, 3]


def test_slots_on_a_device_are_not_read():
    # A meta tensor has no values: reading any would raise.
    check_slots(torch.full((2,), 99, device="meta"), 2)


@pytest.mark.parametrize("budget", [2.0, True, None, "2", torch.tensor(2)])
def test_a_budget_that_is_no_integer_is_named(assign_capacities, budget):
    with pytest.raises(TypeError) as caught:
        _assign(assign_capacities, budget=budget)
    text = str(caught.value)
    assert f"draft_budget is {budget!r}" in text and "use int(...)" in text


def test_a_numpy_integer_is_a_budget(assign_capacities):
    assert (
        _assign(assign_capacities, budget=np.int32(3)).tolist()
        == _assign(assign_capacities, budget=3).tolist()
        == [2, 1]
    )
