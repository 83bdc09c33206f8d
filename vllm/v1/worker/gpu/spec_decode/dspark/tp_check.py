# SPDX-License-Identifier: Apache-2.0
"""Debug check that every tensor-parallel rank takes the same capacity decisions.

Ranks agree by construction: rank 0's confidences are broadcast, and whatever follows
is a deterministic function of them. A rank that decided otherwise would run the
collectives of another batch layout and return garbage, or hang, without any error.
``VLLM_DSPARK_TP_CHECK`` looks for that: at 1 the ranks compare a small digest at
every stage of a step, at 2 each of them also writes its inputs when they differ.

Where the files go: rank 0 makes one directory ``dspark-tp-check-*`` in its temporary
directory (``TMPDIR`` moves it) and every rank, on its own host, writes
``step<step>-<stage>-rank<rank>.npz`` (arrays) and ``.json`` (plan and digests) there.
The error names it.

Invariants (pinned by tests/.../dspark/test_tp_check.py):
  * With one rank, or with the check off, there is no check object at all.
  * Every rank raises in the same step, or none does.
  * Nothing is written unless ranks differ.
"""

import dataclasses
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.logger import init_logger
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.worker.gpu.spec_decode.dspark.step_planner import StepPlan

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.worker.gpu.model_runner import BatchReqState
    from vllm.v1.worker.gpu.spec_decode.dspark.acceptance_mirror import (
        AcceptanceMirror,
    )
    from vllm.v1.worker.gpu.spec_decode.dspark.confidence_mirror import (
        ConfidenceMirror,
    )

logger = init_logger(__name__)

# Order matters: a rank that is a stage ahead of the others shows in the digest.
STAGES = ("plan", "admission", "publication")
BATCH_LAYOUT = "crc32 of batch layout"
SURVIVAL_PROBS = "crc32 of survival_probs"
CONFIDENCE_PROBS = "crc32 of confidence_probs"
# Digest entries ahead of the capacities. An entry that a stage does not set is _UNSET
# on every rank; so is a plan entry that is None.
FIELDS = (
    "stage",
    "step",
    *(field.name for field in dataclasses.fields(StepPlan)),
    BATCH_LAYOUT,
    SURVIVAL_PROBS,
    CONFIDENCE_PROBS,
)
_UNSET = -1
# Rows named in the error; a broken broadcast makes most of them differ.
_MAX_ROWS_SHOWN = 4


class TensorParallelMismatchError(RuntimeError):
    """Ranks of one tensor-parallel group took different capacity decisions."""


def make_tp_check(
    level: int,
    group: "GroupCoordinator",
    mirror: "ConfidenceMirror | AcceptanceMirror",
    max_num_reqs: int,
) -> "TensorParallelCheck | None":
    """Build the check that ``VLLM_DSPARK_TP_CHECK`` asks for.

    Args:
        level: 0: off; 1: compare; 2: compare, and dump when ranks differ.
        group: The tensor-parallel group.
        mirror: This rank's confidences.
        max_num_reqs: Largest batch.

    Returns:
        None when there is nothing to compare: level 0 or a single rank.
    """
    if level == 0 or group.world_size == 1:
        return None
    logger.info_once(
        "VLLM_DSPARK_TP_CHECK=%d: %d ranks compare their capacity decisions in every "
        "step and wait for the device to do so. For debugging only: it costs speed.",
        level,
        group.world_size,
    )
    return TensorParallelCheck(group, mirror, max_num_reqs, dumps=level == 2)


class TensorParallelCheck:
    """Compares ranks. Per step: ``compare_plan``, then, as the step goes,
    ``compare_capacities`` and ``compare_confidences``.

    Each call is a collective over the group's CPU backend. The plan is compared
    first, and in every step, so all ranks reach the same later calls.

    Args:
        group: The tensor-parallel group, of at least two ranks.
        mirror: This rank's confidences, read for the dump.
        max_num_reqs: Largest batch.
        dumps: Whether ranks write their inputs when they differ.
    """

    def __init__(
        self,
        group: "GroupCoordinator",
        mirror: "ConfidenceMirror | AcceptanceMirror",
        max_num_reqs: int,
        *,
        dumps: bool,
    ):
        self._group = group
        self._mirror = mirror
        self._dumps = dumps
        self._num_steps = 0
        size = len(FIELDS) + max_num_reqs
        self._digest = torch.empty(size, dtype=torch.int64)
        self._gathered = torch.empty(group.world_size, size, dtype=torch.int64)
        self._plan: StepPlan | None = None
        self._inputs: dict[str, np.ndarray] = {}

    def compare_plan(self, plan: StepPlan, batch: "BatchReqState") -> None:
        """Compare the plans and what they were made from. Call in every step.

        Args:
            plan: This rank's plan.
            batch: The batch that it is for.

        Raises:
            TensorParallelMismatchError: Ranks differ; raised on all of them.
        """
        self._num_steps += 1
        self._plan = plan
        slots = batch.idx_mapping_np
        self._inputs = {
            "slots": slots,
            "num_scheduled_tokens": batch.num_scheduled_tokens,
        }
        if batch.num_draft_tokens_np is not None:
            self._inputs["num_draft_tokens"] = batch.num_draft_tokens_np
        checksums = {BATCH_LAYOUT: _crc32(*self._inputs.values())}
        if plan.active:
            survival = self._mirror.survival_probs(slots)
            self._inputs["survival_probs"] = survival
            checksums[SURVIVAL_PROBS] = _crc32(survival)
        self._compare("plan", checksums)

    def compare_capacities(self, capacities: torch.Tensor) -> None:
        """Compare what the admission kernel gave each request; waits for it.

        Args:
            capacities: Admitted drafts. Shape [R], int32, device.

        Raises:
            TensorParallelMismatchError: Ranks differ; raised on all of them.
        """
        self._inputs["capacities"] = _to_host(capacities)
        self._compare("admission", {})

    def compare_confidences(self, probs: torch.Tensor) -> None:
        """Compare the confidences about to be published, bit by bit; waits for them.

        Args:
            probs: Confidences after the broadcast. Shape [R, d], float32, device.

        Raises:
            TensorParallelMismatchError: Ranks differ; raised on all of them.
        """
        self._inputs["new_confidence_probs"] = _to_host(probs)
        crc = _crc32(self._inputs["new_confidence_probs"])
        self._compare("publication", {CONFIDENCE_PROBS: crc})

    def _compare(self, stage: str, checksums: dict[str, int]) -> None:
        entries = {
            "stage": STAGES.index(stage),
            "step": self._num_steps,
            **dataclasses.asdict(self._plan),
            **checksums,
        }
        digest = self._digest.numpy()
        digest.fill(_UNSET)
        for i, name in enumerate(FIELDS):
            if entries.get(name) is not None:
                digest[i] = entries[name]
        if stage == "admission":
            capacities = self._inputs["capacities"]
            digest[len(FIELDS) :][: len(capacities)] = capacities
        torch.distributed.all_gather(
            list(self._gathered), self._digest, group=self._group.cpu_group
        )
        gathered = self._gathered.numpy()
        if (gathered != gathered[0]).any():
            self._fail(stage, describe_differences(gathered))

    def _fail(self, stage: str, differences: str) -> None:
        where = "Set VLLM_DSPARK_TP_CHECK=2 to dump every rank's inputs"
        if self._dumps:
            where = f"Every rank's inputs are in {self._dump(stage, differences)}"
        raise TensorParallelMismatchError(
            f"DSpark capacity: tensor-parallel ranks disagree in step "
            f"{self._num_steps} at the {stage} (this is rank "
            f"{self._group.rank_in_group}): {differences}. All ranks must decide from "
            "rank 0's confidences, so look for a rank that missed their broadcast or "
            "whose batch differs. To serve meanwhile, remove the dspark_* keys from "
            f"--speculative-config. {where}."
        )

    def _dump(self, stage: str, differences: str) -> str:
        """Write this rank's view; return the directory, the same on every rank."""
        is_first = self._group.rank_in_group == 0
        made = tempfile.mkdtemp(prefix="dspark-tp-check-") if is_first else None
        folder = self._group.broadcast_object(made, src=0)
        rank = self._group.rank_in_group
        path = Path(folder) / f"step{self._num_steps:06d}-{stage}-rank{rank}"
        arrays = dict(self._inputs)
        probs = getattr(self._mirror, "probs", None)
        if probs is not None:  # not every draft reports confidences
            # The view that admission ranked by; publication has not changed it yet.
            arrays["confidence_probs"] = _to_host(probs)[arrays["slots"]]
        description = {
            "step": self._num_steps,
            "stage": stage,
            "rank": rank,
            "plan": dataclasses.asdict(self._plan),
            "digests_by_rank": [
                dict(zip(FIELDS, row, strict=False)) for row in self._gathered.tolist()
            ],
            "differences": differences,
        }
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)  # another host's rank
            np.savez(f"{path}.npz", **arrays)
            Path(f"{path}.json").write_text(json.dumps(description, indent=1))
        except OSError as e:
            # The disagreement is the news; it must reach the user all the same.
            logger.error("Rank %d could not dump its inputs to %s: %s", rank, path, e)
        return folder


def describe_differences(gathered: np.ndarray) -> str:
    """Say which digest entries differ and which ranks hold which value.

    Args:
        gathered: One digest a rank. Shape [ranks, len(FIELDS) + max_num_reqs], int64.

    Returns:
        As in ``draft_budget is 3 on ranks [0, 2], 5 on ranks [1]``; empty when the
        ranks agree.
    """
    columns = np.flatnonzero((gathered != gathered[0]).any(axis=0)).tolist()
    fields = [c for c in columns if c < len(FIELDS)]
    rows = [c for c in columns if c >= len(FIELDS)]
    parts = [_describe_column(FIELDS[c], gathered[:, c]) for c in fields]
    parts += [
        _describe_column(f"capacities[{c - len(FIELDS)}]", gathered[:, c])
        for c in rows[:_MAX_ROWS_SHOWN]
    ]
    if len(rows) > _MAX_ROWS_SHOWN:
        parts.append(f"{len(rows) - _MAX_ROWS_SHOWN} more capacities differ")
    return "; ".join(parts)


def _describe_column(name: str, values: np.ndarray) -> str:
    ranks_of: dict[Any, list[int]] = {}
    for rank, value in enumerate(values.tolist()):
        shown: Any = "unset" if value == _UNSET else value
        if name == "stage":
            shown = STAGES[value]
        elif name == "active":
            shown = bool(value)
        ranks_of.setdefault(shown, []).append(rank)
    return f"{name} is " + ", ".join(f"{v} on ranks {r}" for v, r in ranks_of.items())


def _crc32(*arrays: np.ndarray) -> int:
    """Return a checksum of the exact bits, so that NaN equals itself."""
    crc = 0
    for array in arrays:
        crc = zlib.crc32(np.ascontiguousarray(array).view(np.uint8), crc)
    return crc


def _to_host(tensor: torch.Tensor) -> np.ndarray:
    with gpu_sync_allowed():
        return tensor.cpu().numpy()
