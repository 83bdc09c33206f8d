# SPDX-License-Identifier: Apache-2.0
"""The Triton backend: present in the rehearsal, absent elsewhere.

vLLM decides at import, so each case is a fresh process.
"""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vllm_dspark_triton_cpu import (
    BACKEND_NAME,
    INTERPRET_VARIABLE,
    REHEARSAL_VARIABLE,
    interpreter_requested,
    register_triton_backend,
    rehearsal_requested,
)

# Prints what vLLM decided and, where it has Triton, what a kernel computes.
PROBE = """
import json, sys
from vllm.triton_utils import HAS_TRITON, tl, triton
import triton.backends
found = {"has_triton": HAS_TRITON, "backends": sorted(triton.backends.backends)}
if HAS_TRITON:
    import torch
    from triton.runtime.driver import driver
    from kernel_probe import scan
    found["device"] = str(driver.active.get_active_torch_device())
    found["scan"] = scan()
json.dump(found, sys.stdout)
"""
# A kernel must lie in a file: the interpreter reads its source.
KERNEL = """
import torch
from vllm.triton_utils import tl, triton

@triton.jit
def _scan_kernel(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x + offsets, offsets < n, 0)
    tl.store(y + offsets, tl.cumsum(values, 0), offsets < n)

def scan():
    x = torch.arange(5)
    y = torch.zeros_like(x)
    _scan_kernel[(1,)](x, y, 5, 8)
    return y.tolist()
"""


def probe(tmp_path, **variables):
    (tmp_path / "kernel_probe.py").write_text(KERNEL)
    stock = {
        k: v
        for k, v in os.environ.items()
        if k not in (REHEARSAL_VARIABLE, INTERPRET_VARIABLE)
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**stock, **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_rehearsal_runs_kernels_in_the_interpreter(tmp_path):
    on = {REHEARSAL_VARIABLE: "1", INTERPRET_VARIABLE: "1"}
    found, _ = probe(tmp_path, **on)
    assert found["has_triton"]
    assert found["device"] == "cpu"
    assert found["scan"] == [0, 1, 3, 6, 10]


def test_stock_vllm_sees_no_backend(tmp_path):
    found, _ = probe(tmp_path, **{INTERPRET_VARIABLE: "1"})
    assert BACKEND_NAME not in found["backends"]


def test_missing_interpreter_variable_is_said_and_registers_nothing(tmp_path):
    found, output = probe(tmp_path, **{REHEARSAL_VARIABLE: "1"})
    assert BACKEND_NAME not in found["backends"]
    assert f"export {INTERPRET_VARIABLE}=1" in output


def test_import_is_light():
    code = (
        "import vllm_dspark_triton_cpu as p, sys; p.register_triton_backend();"
        "sys.exit(any(m in sys.modules for m in ('vllm', 'torch', 'triton')))"
    )
    env = {**os.environ, REHEARSAL_VARIABLE: "0"}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0


@pytest.mark.parametrize(
    "value, expected", [("1", True), ("True", True), ("0", False), ("", False)]
)
def test_switches_are_read_like_vllms(monkeypatch, value, expected):
    monkeypatch.setenv(REHEARSAL_VARIABLE, value)
    monkeypatch.setenv(INTERPRET_VARIABLE, value)
    assert (rehearsal_requested(), interpreter_requested()) == (expected, expected)


@pytest.fixture
def registry(monkeypatch):
    """Triton's registry, empty, and the rehearsal's variables set."""
    backends = {}
    monkeypatch.setattr("triton.backends.backends", backends)
    monkeypatch.setenv(REHEARSAL_VARIABLE, "1")
    monkeypatch.setenv(INTERPRET_VARIABLE, "1")
    return backends


@pytest.mark.parametrize("gpu_is_active", [False, True])
def test_driver_yields_to_an_active_gpu(registry, gpu_is_active):
    gpu = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: gpu_is_active))
    registry["cuda"] = gpu
    register_triton_backend()
    assert registry[BACKEND_NAME].driver.is_active() is not gpu_is_active


def test_driver_is_inactive_without_the_rehearsal(registry, monkeypatch):
    register_triton_backend()
    monkeypatch.setenv(REHEARSAL_VARIABLE, "0")
    assert not registry[BACKEND_NAME].driver.is_active()


def test_backend_of_another_package_is_kept(registry):
    other = registry[BACKEND_NAME] = object()
    register_triton_backend()
    assert registry[BACKEND_NAME] is other


def test_compilation_is_refused_with_the_way_out(registry):
    register_triton_backend()
    entry = registry[BACKEND_NAME]
    driver = entry.driver()
    backend = entry.compiler(driver.get_current_target())
    for compile_step in (
        lambda: backend.parse_options({}),
        lambda: backend.add_stages({}, None),
        lambda: driver.map_python_to_cpp_type("i32"),
    ):
        with pytest.raises(NotImplementedError, match=INTERPRET_VARIABLE):
            compile_step()


def test_benchmarker_calls_and_returns_one_time_per_quantile(registry):
    register_triton_backend()
    calls = []
    benchmark = registry[BACKEND_NAME].driver().get_benchmarker()
    times_ms = benchmark(lambda: calls.append(1), quantiles=[0.1, 0.5, 0.9])
    assert calls
    assert times_ms == sorted(times_ms)
    assert len(times_ms) == 3
