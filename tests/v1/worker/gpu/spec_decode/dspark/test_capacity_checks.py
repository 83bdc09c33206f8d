# SPDX-License-Identifier: Apache-2.0
"""Bad input to draft admission is refused with an error that names it."""

import pytest
import torch

from tests.helpers.admission import DEVICE
from vllm.v1.worker.gpu.spec_decode.dspark.capacity import (
    MAX_ADMISSION_REQS,
    MAX_ADMISSION_STEPS,
    admit_drafts,
    warm_up,
)
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
def test_bad_input_is_named(change, words):
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
