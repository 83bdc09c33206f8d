# SPDX-License-Identifier: Apache-2.0
"""Environment and fixtures of all tests.

Without an NVIDIA GPU the tests run under the CPU rehearsal. Its variables must be
set before vLLM or Triton is imported, hence here, at the top.
"""

import json
import os
from pathlib import Path

_ON_GPU = os.path.exists("/dev/nvidiactl")
_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
_CPU_ENVIRONMENT = {
    "VLLM_DSPARK_CPU_REHEARSAL": "1",
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Threads gain nothing on models this small, and those that wait spin: with two
    # files at a time on two cores they cost most of the time.
    "OMP_NUM_THREADS": "1",
}
for _name, _value in {**_ENVIRONMENT, **({} if _ON_GPU else _CPU_ENVIRONMENT)}.items():
    os.environ.setdefault(_name, _value)

import pytest  # noqa: E402

FIXTURES = Path(__file__).parent / "fixtures" / "tiny-dspark"
NUM_PROMPTS = 6


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run."""
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    no_rehearsal = pytest.mark.skip(reason="runs in the CPU rehearsal, not on a GPU")
    for item in items:
        # Not item.keywords: that holds directory names too, and tests/v1/worker/gpu is
        # the mirror of a source folder, not a mark.
        if item.get_closest_marker("gpu") and not _ON_GPU:
            item.add_marker(no_gpu)
        if item.get_closest_marker("engine") and _ON_GPU:
            item.add_marker(no_rehearsal)


@pytest.fixture(scope="session")
def tiny_target() -> str:
    """Directory of the trained target checkpoint."""
    return str(FIXTURES / "target")


@pytest.fixture(scope="session")
def tiny_draft() -> str:
    """Directory of its DSpark draft."""
    return str(FIXTURES / "draft")


@pytest.fixture(scope="session")
def heldout_prompts() -> list[str]:
    """Six prompts that neither checkpoint was trained on, easy and hard ones."""
    lines = (FIXTURES / "heldout.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines[:NUM_PROMPTS]]
