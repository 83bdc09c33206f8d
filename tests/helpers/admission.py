# SPDX-License-Identifier: Apache-2.0
"""Small builders and runners for the tests of draft admission.

Tests run on one device: the GPU where there is one (compiled kernel), else the CPU
(Triton's interpreter, which tests/conftest.py turns on; the native operator's CPU
form, and its CUDA kernel with fibers for threads).
"""

import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.dspark.capacity_native import admit_drafts_native
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


def admitted(admit_drafts, inputs, budget, **options):
    return run(admit_drafts, inputs, budget, **options)[0][: len(inputs.idx_mapping)]


def build_emulated_operators(directory):
    """Compile csrc/'s CUDA kernel for the CPU; return its operators."""
    if DEVICE.type != "cpu":
        pytest.skip("the GPU runs the CUDA kernel itself")
    if not (compiler := shutil.which("g++")):
        pytest.skip("needs g++, to compile the CUDA kernel for the CPU")
    source = Path(__file__).parent / "emulated_cuda" / "library.cpp"
    library = directory / "emulated.so"
    torch_directory = Path(torch.__file__).parent
    subprocess.run(
        [
            *(compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-w"),
            # Its operators beside those of the real library.
            *("-fvisibility=hidden", "-D_dspark_C=dspark_emulated"),
            "-DTORCH_TARGET_VERSION=0x020b000000000000ULL",
            *("-I", source.parent, "-isystem", torch_directory / "include"),
            *(source, "-Wl,--no-as-needed", torch_directory / "lib" / "libtorch.so"),
            *("-o", library),
        ],
        check=True,
    )
    torch.ops.load_library(library)
    return torch.ops.dspark_emulated


def emulated(operators):
    """Return the native launcher with other operators behind it."""

    def admit_drafts(*args, **kwargs):
        with mock.patch.object(torch.ops, "_dspark_C", operators, create=True):
            admit_drafts_native(*args, **kwargs)

    return admit_drafts
