# SPDX-License-Identifier: Apache-2.0
"""Every kernel launcher of the dspark package, with its oracle and its inputs.

A launcher is a public function that launches a Triton kernel. ``find_launchers``
finds them in the source, so one that is added without a pair here fails a test.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.helpers import sts_cases
from vllm.v1.worker.gpu.spec_decode.dspark import (
    capacity,
    capacity_reference,
    sts_fit_kernel,
    sts_kernels,
    sts_reference,
)

DSPARK_DIR = (
    Path(__file__).resolve().parents[2] / "vllm/v1/worker/gpu/spec_decode/dspark"
)


@dataclass(frozen=True)
class KernelPair:
    """A launcher and an oracle that take the same keyword arguments.

    Both write the arguments whose names end in ``_out``; those are compared.
    """

    launcher: Callable[..., Any]
    reference: Callable[..., Any]
    make_inputs: Callable[[int], dict[str, Any]]
    """Seed -> keyword arguments, tensors on the CPU."""
    tolerance: float = 0.0
    """Largest difference of floats; 0: equal bits."""

    @property
    def name(self) -> str:
        module = self.launcher.__module__.rpartition(".")[2]
        return f"{module}.{self.launcher.__name__}"


def make_admit_drafts_inputs(seed: int) -> dict[str, Any]:
    families = sorted(capacity_reference.CONFIDENCE_FAMILIES)
    inputs = capacity_reference.make_admission_inputs(
        (1, 7, 64, 257)[seed % 4], 7, family=families[seed % len(families)], seed=seed
    )
    num_reqs = len(inputs.idx_mapping)
    names = ("capacities_out", "cu_num_logits_out", "query_start_loc_out")
    outputs = {name: torch.zeros(num_reqs + 4, dtype=torch.int32) for name in names}
    options = {"num_bonus_tokens": 1, "fill_budget": bool(seed % 2)}
    budget = {"draft_budget": inputs.num_drafts // 2}
    return vars(inputs) | budget | options | outputs


PAIRS = (
    KernelPair(
        capacity.admit_drafts,
        capacity_reference.admit_drafts_reference,
        make_admit_drafts_inputs,
    ),
    KernelPair(
        sts_kernels.calibrate_confidences,
        sts_reference.calibrate_confidences_reference,
        sts_cases.make_calibrate_inputs,
        tolerance=2e-3,  # logits of almost certain drafts keep few bits
    ),
    KernelPair(
        sts_kernels.observe_drafts,
        sts_reference.observe_drafts_reference,
        sts_cases.make_observe_inputs,
    ),
    KernelPair(
        sts_fit_kernel.fit_confidences,
        sts_reference.fit_confidences_reference,
        sts_cases.make_fit_inputs,
        tolerance=2e-3,  # float32 sums over thousands of rows
    ),
)


def find_launchers(directory: Path) -> Iterator[str]:
    """Yield ``module.function`` for each function that launches a kernel.

    A launch reads ``name[grid](...)``.
    """
    for path in sorted(directory.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            functions = [node]
            if isinstance(node, ast.ClassDef):
                functions = node.body
            for function in functions:
                if isinstance(function, ast.FunctionDef) and _launches(function):
                    yield f"{path.stem}.{function.name}"


def _launches(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id.endswith("_kernel")
        for node in ast.walk(function)
    )
