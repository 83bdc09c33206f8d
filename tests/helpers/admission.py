# SPDX-License-Identifier: Apache-2.0
"""Small builders and runners for the tests of draft admission.

Tests run on one device: the GPU where there is one (compiled kernel), else the CPU
(Triton's interpreter, which tests/conftest.py turns on).
"""

import torch

from vllm.v1.worker.gpu.spec_decode.dspark.capacity import admit_drafts
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_reference import AdmissionInputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GARBAGE = -77  # what the outputs hold before


def inputs_of(confidences, scheduled=None, slots=None, non_draft=None):
    probs = torch.tensor(confidences, dtype=torch.float32)
    num_reqs = len(probs) if slots is None else len(slots)
    as_int32 = [
        torch.tensor(default if given_ is None else given_, dtype=torch.int32)
        for given_, default in (
            (slots, range(num_reqs)),
            (scheduled, [probs.shape[1]] * num_reqs),
            (non_draft, [1] * num_reqs),
        )
    ]
    return AdmissionInputs(probs, *as_int32)


def on_device(inputs):
    return [t.to(DEVICE) for t in vars(inputs).values()]


def run(function, inputs, budget, *, max_reqs=None, **options):
    """Return (capacities, cu_num_logits, query_start_loc), each with spare entries."""
    num_reqs = len(inputs.idx_mapping)
    max_reqs = max_reqs or num_reqs + 3
    sizes = (max_reqs, max_reqs + 1, max_reqs + 1)
    outs = [torch.full((n,), GARBAGE, dtype=torch.int32, device=DEVICE) for n in sizes]
    options = {"num_bonus_tokens": 1, "fill_budget": False} | options
    function(
        *on_device(inputs),
        budget,
        capacities_out=outs[0],
        cu_num_logits_out=outs[1],
        query_start_loc_out=outs[2],
        **options,
    )
    return [out.tolist() for out in outs]


def admitted(inputs, budget, **options):
    return run(admit_drafts, inputs, budget, **options)[0][: len(inputs.idx_mapping)]
