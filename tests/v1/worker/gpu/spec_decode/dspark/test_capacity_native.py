# SPDX-License-Identifier: Apache-2.0
"""Selecting the native operator, and what it is beside its rule (test_capacity.py)."""

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import vllm
from tests.helpers.admission import DEVICE, inputs_of, on_device, run
from tests.helpers.paths import REPOSITORY
from vllm.config.dspark_capacity import DSparkCapacityConfig
from vllm.config.dspark_values import DSparkCapacityConfigError
from vllm.v1.worker.gpu.spec_decode.dspark import capacity
from vllm.v1.worker.gpu.spec_decode.dspark import capacity_native as module
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_native import (
    LIBRARY_NAME,
    admit_drafts_native,
    load_native,
    pick_admission,
)
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_reference import (
    make_admission_inputs,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """A vLLM without the library."""
    monkeypatch.setattr(vllm, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path / LIBRARY_NAME


def assert_says_how_to_build(error, *reasons):
    for part in (
        *("VLLM_DSPARK_ADMISSION_OP='native': must be 'triton' here", *reasons),
        *("CMake", "nvcc", "pip install", "setup.py build_ext", "unset"),
    ):
        assert part in str(error.value)


def test_triton_is_picked_without_looking_for_the_library(elsewhere):
    assert pick_admission("triton", DEVICE) is capacity.admit_drafts


def test_absent_library_is_an_error_and_no_fallback(elsewhere):
    with pytest.raises(DSparkCapacityConfigError) as error:
        pick_admission("native", DEVICE)
    assert_says_how_to_build(error, f"there is no {elsewhere}")


def test_library_that_does_not_load_is_an_error_with_the_cause(elsewhere):
    elsewhere.write_bytes(b"no library" * 99)
    with pytest.raises(DSparkCapacityConfigError) as error:
        load_native(DEVICE)
    assert_says_how_to_build(error, f"{elsewhere} does not load", "ELF")


def test_auto_takes_the_operator_on_a_gpu_where_it_can_run(monkeypatch, elsewhere):
    loaded = []
    monkeypatch.setattr(module, "load_native", loaded.append)
    assert pick_admission("auto", CUDA) is capacity.admit_drafts, "not built"
    elsewhere.write_bytes(b"")
    assert pick_admission("auto", CUDA) is admit_drafts_native
    assert set(loaded) == {CUDA}
    assert pick_admission("auto", CPU) is capacity.admit_drafts, "a rehearsal"


def test_auto_says_why_a_library_that_is_there_is_not_used(monkeypatch, elsewhere):
    elsewhere.write_bytes(b"no library" * 99)
    warnings = []
    monkeypatch.setattr(
        module.logger, "warning_once", lambda text, *args: warnings.append(text % args)
    )
    assert pick_admission("auto", CUDA) is capacity.admit_drafts
    assert len(warnings) == 1 and f"{elsewhere} does not load" in warnings[0]


def test_library_without_cuda_is_refused_on_a_gpu_alone(native_operators, monkeypatch):
    operators = SimpleNamespace(has_cuda=lambda: False)
    monkeypatch.setattr(torch.ops, "_dspark_C", operators)
    with pytest.raises(DSparkCapacityConfigError) as error:
        load_native(CUDA)
    assert_says_how_to_build(error, "without nvcc")
    load_native(torch.device("cpu"))


def test_worker_refuses_before_its_runner_exists(elsewhere, monkeypatch):
    from vllm.plugins.dspark_capacity import seams
    from vllm.v1.worker.gpu import dspark_capacity_worker as worker

    monkeypatch.setattr(seams, "install", lambda scope: None)
    monkeypatch.setenv("VLLM_DSPARK_ADMISSION_OP", "native")
    keys = DSparkCapacityConfig.from_keys({"dspark_budget_frac": 0.5})
    config = SimpleNamespace(speculative_config=SimpleNamespace(capacity_config=keys))
    with pytest.raises(DSparkCapacityConfigError, match="there is no"):
        worker.make_capacity_model_runner(config, DEVICE)


def test_loading_twice_is_a_no_op(native_operators):
    operator = torch.ops._dspark_C.admit_drafts.default
    load_native(DEVICE)
    assert torch.ops._dspark_C.admit_drafts.default is operator


class CountedTorch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def test_admission_is_one_operator_call(native_operators):
    tensors = on_device(make_admission_inputs(33, 7))
    outs = [torch.empty(64, dtype=torch.int32, device=DEVICE) for _ in range(3)]
    with CountedTorch() as operations:
        admit_drafts_native(
            *tensors,
            50,
            num_bonus_tokens=1,
            fill_budget=True,
            capacities_out=outs[0],
            cu_num_logits_out=outs[1],
            query_start_loc_out=outs[2],
        )
    assert operations.calls == [torch.ops._dspark_C.admit_drafts.default]


def test_bare_operator_stays_within_its_tensors(native_operators):
    """Called past the launcher's checks, it says what is wrong and writes nothing."""
    tensors = on_device(inputs_of([[0.5, 0.5]] * 4))
    outs = [torch.full((5,), -7, dtype=torch.int32, device=DEVICE) for _ in range(3)]

    def call(position, tensor):
        arguments = [*tensors, 2, 1, True, 0.0, *outs]
        arguments[position] = tensor
        return torch.ops._dspark_C.admit_drafts(*arguments)

    sizes, types = 1, 2
    for position, wrong, status in (
        (0, tensors[0].double(), types),
        (0, tensors[0].flatten(), sizes),
        (0, torch.zeros(4, 17, device=DEVICE), sizes),
        (1, tensors[1].float(), types),
        (2, tensors[2][:3], sizes),
        (3, tensors[3].long(), types),
        (8, outs[0][:3], sizes),
        (9, outs[1][:4], sizes),
        (9, outs[1].long(), types),
        (10, outs[2][:4], sizes),
    ):
        assert call(position, wrong) == status
    assert all((out == -7).all() for out in outs)
    assert call(4, 2) == 0, "premise: as they are, the arguments fit"
    assert outs[0].tolist()[:4] == [1, 1, 0, 0]


def test_a_failure_of_the_operator_is_an_error_in_words(native_operators, monkeypatch):
    operator = SimpleNamespace(default=lambda *args: 4)
    operators = SimpleNamespace(admit_drafts=operator)
    monkeypatch.setattr(torch.ops, "_dspark_C", operators)
    with pytest.raises(RuntimeError, match="could not be launched"):
        run(admit_drafts_native, make_admission_inputs(4, 2), 3)


def test_the_library_throws_nothing():
    """Its exceptions would end the process where it holds a C++ library of its own."""
    source = (REPOSITORY / "csrc" / "bindings.cpp").read_text()
    assert not re.search(r"\bthrow\b|_CHECK\(|data_ptr<", source)


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm, to read symbols")
def test_library_uses_torch_through_the_stable_abi_alone(native_operators):
    """A symbol of torch's C++ classes would tie it to one release."""
    library = Path(vllm.__file__).with_name(LIBRARY_NAME)
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", library],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    wanted = {line.split()[-1].split("@")[0] for line in listing.splitlines()}
    assert "torch_library_impl" in wanted, "premise: the names can be read"
    assert not {name for name in wanted if re.match("_ZNK?(5torch|3c10|2at)", name)}
    assert not {name for name in wanted if name.startswith(("cuda", "cu", "Py"))}


def test_native_and_triton_admit_the_same_drafts(native_operators):
    inputs = make_admission_inputs(200, 7, family="tied")
    found = [
        run(pick_admission(op, DEVICE), inputs, inputs.num_drafts // 3)
        for op in ("native", "triton")
    ]
    assert found[0] == found[1]
    assert pick_admission("native", DEVICE) is admit_drafts_native


def test_the_sources_use_only_what_the_oldest_torch_declares():
    # Read off the headers of torch 2.11.0, which the source was compiled with.
    known = {
        "AOTI_TORCH_SUCCESS",
        "STABLE_TORCH_LIBRARY",
        "STABLE_TORCH_LIBRARY_IMPL",
        "TORCH_BOX",
        "aoti_torch_get_current_cuda_stream",
    }
    used = set()
    for path in (REPOSITORY / "csrc").iterdir():
        prefixes = r"\b(?:STD_|STABLE_|AOTI_|TORCH_|aoti_)\w+"
        used |= set(re.findall(prefixes, path.read_text()))
    assert used == known
