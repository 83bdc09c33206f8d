# SPDX-License-Identifier: Apache-2.0
"""What decides a world and a traffic needs neither vLLM nor torch."""

import subprocess
import sys

import pytest

from tests.helpers.paths import REPOSITORY

PURE = [
    "benchmarks.acceptance.draws",
    "benchmarks.acceptance.world",
    "benchmarks.arguments",
    "benchmarks.sweep.arms",
    "benchmarks.sweep.driver",
    "benchmarks.sweep.figures",
    "benchmarks.sweep.options",
    "benchmarks.sweep.traffic",
]


@pytest.mark.parametrize("module", PURE)
def test_pure_module_draws_in_neither_vllm_nor_torch(module):
    code = (
        f"import sys, {module}; "
        "print(*sorted({'torch', 'vllm', 'triton'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
