# SPDX-License-Identifier: Apache-2.0
"""Draft admission as a native operator: the optional library ``_dspark_C.abi3.so``.

setup.py builds it from csrc/ where there is a compiler, for CPUs and, with nvcc, for
CUDA. The rule is that of capacity.py, whose tests it passes. On a GPU it is the
default where it was built with nvcc (docs/native.md has the figures), else the Triton
kernel is; on a CPU, which only rehearses, that one stays the default.

Invariants (pinned by tests/.../dspark/test_capacity_native.py):
  * Asked for but absent, or without CUDA on a GPU, it is an error that says how to
    build it, raised before any weight is loaded; Triton never steps in silently.
  * Not asked for, a library that is there and cannot run is a warning.
  * One operator call, which launches one kernel on the current stream.
"""

from pathlib import Path

import torch

import vllm
from vllm.config.dspark_environ import ADMISSION_OP_VARIABLE
from vllm.config.dspark_values import DSparkCapacityConfigError, bad_value
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.dspark.capacity import AdmitDrafts, admit_drafts
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_checks import check_admission

logger = init_logger(__name__)

LIBRARY_NAME = "_dspark_C.abi3.so"
# What the operator returns instead of 0; it throws nothing (csrc/bindings.cpp).
_FAILURES = {
    1: "the sizes of its tensors do not fit each other",
    2: "a tensor has another dtype",
    3: "torch did not say which CUDA stream is current",
    4: "the CUDA kernel could not be launched",
}


def pick_admission(admission_op: str, device: torch.device) -> AdmitDrafts:
    """Return the implementation of draft admission, ready to be called.

    Args:
        admission_op: ``auto``, ``triton`` or ``native`` (VLLM_DSPARK_ADMISSION_OP).
        device: Where the engine's tensors live.

    Raises:
        DSparkCapacityConfigError: ``native`` cannot run here.
    """
    if admission_op == "auto":
        admission_op = _default_op(device)
    if admission_op == "triton":
        return admit_drafts
    load_native(device)
    return admit_drafts_native


def _default_op(device: torch.device) -> str:
    path = _library_path()
    if device.type != "cuda" or not path.is_file():
        return "triton"
    try:
        load_native(device)
    except DSparkCapacityConfigError as error:
        # Upstream's own extensions are as tolerant: the wheel serves without it.
        logger.warning_once("Drafts are admitted by the Triton kernel: %s", str(error))
        return "triton"
    logger.info_once("Drafts are admitted by the native operator of %s", str(path))
    return "native"


def _library_path() -> Path:
    return Path(vllm.__file__).with_name(LIBRARY_NAME)


def load_native(device: torch.device) -> None:
    """Load the library into this process; again is a no-op.

    Args:
        device: Where it must run.

    Raises:
        DSparkCapacityConfigError: It is absent, does not load, or cannot run there.
    """
    path = _library_path()
    if not path.is_file():
        raise _cannot_run(f"there is no {path}")
    try:
        torch.ops.load_library(path)
    except OSError as e:
        # torch's own message leaves the linker's out.
        raise _cannot_run(f"{path} does not load ({e.__cause__ or e})") from e
    if device.type == "cuda" and not torch.ops._dspark_C.has_cuda():
        raise _cannot_run(f"{path} was built without nvcc, for CPUs only")


def _cannot_run(reason: str) -> DSparkCapacityConfigError:
    return bad_value(
        ADMISSION_OP_VARIABLE,
        "native",
        allowed=f"'triton' here, because {reason}",
        way_out="Build the operator in a checkout, with CMake, a C++ compiler and for "
        "GPUs nvcc on the PATH: 'pip install -v .' (the log says why if it cannot), or "
        "'python setup.py build_ext --inplace' and 'python tools/link_overlay.py'. Or "
        f"unset {ADMISSION_OP_VARIABLE}",
    )


def admit_drafts_native(
    confidence_probs: torch.Tensor,
    idx_mapping: torch.Tensor,
    scheduled_drafts: torch.Tensor,
    num_non_draft_tokens: torch.Tensor,
    draft_budget: int,
    *,
    num_bonus_tokens: int,
    fill_budget: bool,
    capacities_out: torch.Tensor,
    cu_num_logits_out: torch.Tensor,
    query_start_loc_out: torch.Tensor,
    min_survival: float = 0.0,
) -> None:
    """Admit the best drafts and write the batch offsets, into the outputs given.

    The native form of ``capacity.admit_drafts``, after :func:`load_native`. On CUDA
    it allocates nothing and never synchronises; on a CPU it allocates two vectors of
    keys.

    Args:
        confidence_probs: As in ``admit_drafts``. Shape [S, K], float32.
        idx_mapping: Batch row to request slot. Shape [R], int32 or int64.
        scheduled_drafts: Drafts that may be admitted. Shape [R], int32.
        num_non_draft_tokens: Tokens of each row that are not drafts. Shape [R], int32.
        draft_budget: Most drafts to admit over the batch.
        num_bonus_tokens: Logits of each row beyond its drafts.
        fill_budget: Spend the whole budget.
        capacities_out: Shape [>= R], int32; only [:R] is written.
        cu_num_logits_out: Shape [>= R + 1], int32; only [:R + 1] is written.
        query_start_loc_out: Shape [>= R + 1], int32; written to its end.
        min_survival: Least survival that is admitted, in [0, 1].

    Raises:
        TypeError: The budget is no integer.
        ValueError: A shape, dtype, device, layout or range is not as above.
        RuntimeError: The kernel could not be launched.
    """
    inputs = (idx_mapping, scheduled_drafts, num_non_draft_tokens)
    outputs = (capacities_out, cu_num_logits_out, query_start_loc_out)
    draft_budget = check_admission(
        confidence_probs, inputs, outputs, draft_budget, num_bonus_tokens, min_survival
    )
    status = torch.ops._dspark_C.admit_drafts.default(
        confidence_probs,
        *inputs,
        draft_budget,
        num_bonus_tokens,
        fill_budget,
        min_survival,
        *outputs,
    )
    if status:
        raise RuntimeError(f"_dspark_C.admit_drafts: {_FAILURES[status]}")
