# SPDX-License-Identifier: Apache-2.0
"""Every implementation of draft admission, for the tests that hold for each."""

import functools

import pytest

from tests.helpers import admission
from vllm.config.dspark_values import DSparkCapacityConfigError
from vllm.v1.worker.gpu.spec_decode.dspark import capacity, capacity_native


@pytest.fixture(scope="session")
def emulated_operators(tmp_path_factory):
    """The CUDA kernel's source, compiled for the CPU: see tests/helpers."""
    return admission.build_emulated_operators(tmp_path_factory.mktemp("emulated_cuda"))


@pytest.fixture(scope="module")
def native_operators():
    """The library of this installation, loaded."""
    try:
        capacity_native.load_native(admission.DEVICE)
    except DSparkCapacityConfigError as e:
        pytest.skip(str(e))
    return capacity_native.admit_drafts_native


@pytest.fixture(scope="module", params=["triton", "native", "emulated-cuda"])
def admit_drafts(request):
    """An implementation of ``admit_drafts``, each in turn."""
    if request.param == "native":
        return request.getfixturevalue("native_operators")
    if request.param == "emulated-cuda":
        return admission.emulated(request.getfixturevalue("emulated_operators"))
    assert capacity.runs_admission_kernel(admission.DEVICE), (
        "set TRITON_INTERPRET=1 before any import"
    )
    return capacity.admit_drafts


@pytest.fixture(scope="module")
def admitted(admit_drafts):
    return functools.partial(admission.admitted, admit_drafts)


@pytest.fixture(scope="module")
def assign_capacities(admit_drafts):
    return functools.partial(capacity.assign_capacities, admit=admit_drafts)
