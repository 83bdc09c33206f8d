# SPDX-License-Identifier: Apache-2.0
"""A rank proves that it applied what its arm asked for."""

import subprocess
import sys

import pytest

from tests.helpers.paths import REPOSITORY

TOOLS = ("sweep_concurrency", "check_lossless", "check_tensor_parallel")


def test_a_rank_that_applied_something_else_says_so():
    from benchmarks.sweep.worker import SweepWorkerExtension

    with pytest.raises(RuntimeError, match="imported before DSPARK_SWEEP_WORKER"):
        SweepWorkerExtension().sweep_start({"rates": [0.5]})


@pytest.mark.parametrize("tool", TOOLS)
def test_no_tool_imports_the_extension_into_its_own_process(tool):
    # It acts at import, and a forked rank would find it imported already.
    code = (
        f"import sys, benchmarks.{tool}, benchmarks.sweep.engine; "
        "assert not {'benchmarks.sweep.worker', 'benchmarks.sweep.rank_faults'} "
        "& set(sys.modules)"
    )
    command = [sys.executable, "-c", code]
    subprocess.run(command, check=True, cwd=REPOSITORY, timeout=120)
