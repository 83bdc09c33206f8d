# SPDX-License-Identifier: Apache-2.0
"""Online Sequential Temperature Scaling: confidences that mean what they say.

The planner multiplies confidences to survivals and spends the budget by them, so a
head that is off by a temperature or a shift plans the wrong budget. What is fitted is
described in :mod:`.sts_fit`; here is where the data comes from and when it is used.

All of it stays on the device. In every step that publishes (at or above the knee, all
but quiet ones) one launch grades the drafts that the step judged and notes the raw
logits of those it made; in every ``FIT_INTERVAL``-th, another refits scales, biases and
bends from the last ``RING_ROWS`` graded rows of each class and writes them where the
captured draft graph reads them. Rows rather than histograms are kept, because the
cumulative product needs the joint distribution of a row's logits, which bins would blur
(and clip, for a head that is far too sure). No step waits, copies to the host or
computes there; a small copy after each fit feeds ``state_json``. In other steps nothing
is launched: the draft graph applies the scales that it finds.

Only fresh, graded positions count. A slot's logits are stamped with the run of
publishing steps that they were noted in, and with the depth that was drafted, so that
what was drafted below the knee, by a former request of the slot or beyond the depth
is never graded; profile and dummy runs never come here; drafts beyond the capacity,
rows steered by a grammar, and everything from a NaN on are left out by the kernel; and
with synthetic acceptance, whose outcomes say nothing about the head, there is no
calibration at all. Greedy and sampled requests are calibrated apart.

Losslessness. Scales are a function of outcomes of drafts that were judged before the
drafts in hand were made: step t judges the drafts of t - 1, then drafts with the
scales in force, and only then refits. The confidences that rank a draft were computed
with scales that no outcome of that draft, or of a later one of its row, has touched;
they are fixed when the draft is made and never recomputed. To the argument of
``capacity.py`` a scale is therefore what the host's old survivals are: known before
the drafts that it helps to admit.

Tensor parallelism. Rank 0's scales are everybody's without being sent: a scale acts
only through confidences, and rank 0's are the only ones that are published. The
other ranks do not calibrate.

Invariants (pinned by tests/.../dspark/test_online_sts.py and the engine runs of
tests/v1/worker/gpu/test_dspark_online_sts.py):
  * A pause between publishing steps makes every slot stale, without a launch.
  * At most one launch a published step, two where it refits.
  * The buffer that the graph reads keeps its address.
"""

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.config.dspark_calibration import CLASSES, ConfidenceCalibration
from vllm.config.dspark_environ import DSparkCapacityEnv
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.dspark import sts_fit, sts_metrics
from vllm.v1.worker.gpu.spec_decode.dspark.sts_fit_kernel import fit_confidences
from vllm.v1.worker.gpu.spec_decode.dspark.sts_kernels import observe_drafts
from vllm.v1.worker.gpu.spec_decode.dspark.sts_reference import (
    DraftRing,
    JudgedDrafts,
)

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.dspark_capacity_model_runner import (
        DSparkCapacityModelRunner,
    )

logger = init_logger(__name__)

# Published steps between fits: a fit takes about as long as eight observations.
FIT_INTERVAL = 32
# About as many rows of a step are graded, the others in later steps: the ring then
# looks back on hundreds of steps at any load, not on the last few of a large batch.
MAX_ROWS_PER_STEP = 16


def calibration_tensor(
    calibration: ConfidenceCalibration, device: torch.device
) -> torch.Tensor:
    """Return scales, biases, bends, by class. Shape [2, 3, K], float32."""
    tables = list(
        zip(calibration.scales, calibration.biases, calibration.bends, strict=True)
    )
    return torch.tensor(tables, dtype=torch.float32, device=device)


def make_online_sts(runner: "DSparkCapacityModelRunner") -> "OnlineSTS | None":
    """Return the calibration of a runner, or None where it has none.

    Args:
        runner: Runner whose speculator exists.
    """
    config = runner.speculative_config
    if not config.reports_confidences or not config.capacity_config.use_online_sts:
        return None
    if config.rejection_sample_method == "synthetic":
        logger.info_once(
            "Online STS is off: synthetic acceptance says nothing about confidences."
        )
        return None
    if get_tp_group().rank_in_group != 0:
        return None
    speculator = runner.speculator
    return OnlineSTS(
        speculator.calibration,
        speculator.confidence_logits,
        speculator.temperature,
        log_interval_s=DSparkCapacityEnv.from_environ(os.environ).sts_log_interval_s,
    )


class OnlineSTS:
    """Keeps the calibration of the draft graph right.

    Lifecycle: built with the KV cache; ``warm_up`` after graph capture; per published
    step ``observe``; ``pause`` in every other step; ``forget`` for a new request.

    Args:
        calibration: What the draft graph applies, holding the start values: by
            class scales, biases, bends. Shape [2, 3, K], float32, device.
        logits: What the draft graph notes: raw logits in batch order. Shape
            [max_num_reqs, K], float32, device.
        temperature: Sampling temperature by slot. Shape [max_num_reqs], float32,
            device.
        log_interval_s: Seconds between log lines; 0 is off.

    Attributes:
        ring: Graded rows.
        start: The calibration at start, on the host. Shape [2, 3, K], float32.
    """

    def __init__(
        self,
        calibration: torch.Tensor,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        *,
        log_interval_s: float = 0.0,
    ):
        num_slots, num_steps = logits.shape
        device = logits.device
        self.calibration = calibration
        self.ring = DraftRing.empty(num_slots, num_steps, device)
        self._logits, self._temperature = logits, temperature
        self._prior = calibration.clone()
        self.start = calibration.cpu().numpy().copy()
        self._excluded = torch.zeros(num_slots, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._snapshot = calibration.to("cpu", copy=True)
        self._snapshot_rows = torch.zeros(2, dtype=torch.int64)
        if pinned:
            self._snapshot = self._snapshot.pin_memory()
            self._snapshot_rows = self._snapshot_rows.pin_memory()
        self._snapshot_event = torch.cuda.Event()
        self._loaded_rows = (0, 0)
        self._stamp = 0
        self._publishing = False
        self._num_steps_observed = 0
        self._log = _CalibrationLog(self, log_interval_s) if log_interval_s else None

    def warm_up(self) -> None:
        """Compile the kernels on a batch that grades nothing."""
        one = torch.ones(1, dtype=torch.int32, device=self._logits.device)
        judged = JudgedDrafts(one.long() - 1, one, one - 1)
        observe_drafts(
            judged, self._logits, self._temperature, self.ring, stamp=1, draft_depth=0
        )
        fit_confidences(self.ring, self._prior, calibration_out=self.calibration)
        self.ring.clear()

    def observe(
        self,
        judged: JudgedDrafts,
        draft_depth: int,
        grammar_rows: np.ndarray | None = None,
    ) -> None:
        """Grade the drafts that a published step judged and note those it made.

        Args:
            judged: What the step verified; ``excluded`` is filled in here.
            draft_depth: Positions that the step drafted.
            grammar_rows: Batch rows that a grammar steered. Shape [G], int; None for
                none.
        """
        if not self._publishing:
            self._publishing = True
            self._stamp += 1
        num_reqs = judged.slots.shape[0]
        if grammar_rows is not None:
            rows = np.zeros(num_reqs, dtype=np.int32)
            rows[grammar_rows] = 1
            async_tensor_h2d(rows, out=self._excluded[:num_reqs])
            judged = replace(judged, excluded=self._excluded)
        stride = max(1, num_reqs // MAX_ROWS_PER_STEP)
        observe_drafts(
            judged,
            self._logits,
            self._temperature,
            self.ring,
            stamp=self._stamp,
            draft_depth=draft_depth,
            sample_stride=stride,
            sample_offset=self._sample_offset(stride),
        )
        self._num_steps_observed += 1
        if self._num_steps_observed % FIT_INTERVAL == 0:
            self._fit()
        if self._log is not None:
            self._log.poll()

    def _sample_offset(self, stride: int) -> int:
        # Not the number of the step alone: where every other step can grade nothing,
        # half of the rows would never have their turn.
        step = self._num_steps_observed
        return (step + step // stride) % stride

    def pause(self) -> None:
        """Make all slots stale: a step has judged and drafted unobserved."""
        self._publishing = False

    def forget(self, slot: int) -> None:
        """Make a slot stale that was given to a new request.

        Args:
            slot: Request slot. While paused all are stale, so nothing is launched.
        """
        if self._publishing:
            self.ring.slot_stamp[slot].zero_()

    def _fit(self) -> None:
        fit_confidences(self.ring, self._prior, calibration_out=self.calibration)
        self._snapshot.copy_(self.calibration, non_blocking=True)
        self._snapshot_rows.copy_(self.ring.num_rows, non_blocking=True)
        self._snapshot_event.record()

    def current(self) -> ConfidenceCalibration:
        """Return the calibration of the last fit, waiting for its copy."""
        with gpu_sync_allowed():
            self._snapshot_event.synchronize()
        tables = self._snapshot.transpose(0, 1).tolist()
        scales, biases, bends = (tuple(map(tuple, table)) for table in tables)
        rows = zip(self._loaded_rows, self._snapshot_rows.tolist(), strict=True)
        return ConfidenceCalibration(
            scales,
            biases,
            bends,
            tuple(loaded + seen for loaded, seen in rows),
        )

    def state_json(self) -> dict[str, Any]:
        """Return the ``confidence_calibration`` section of a curve file.

        For whoever saves what was measured, between steps or at shutdown: it may wait
        for the copy of the last fit.
        """
        return self.current().to_json()

    def load_state_json(self, value: Any) -> None:
        """Start from a saved section: it is applied, and is the prior from now on.

        Args:
            value: Decoded JSON, as ``state_json`` returns it.

        Raises:
            DSparkCapacityConfigError: It is none, or is for fewer positions.
        """
        loaded = ConfidenceCalibration.from_json(value).first(self._logits.shape[1])
        table = calibration_tensor(loaded, self._logits.device)
        for tensor in (self.calibration, self._prior, self._snapshot):
            tensor.copy_(table)
        self.start = table.cpu().numpy()
        self._loaded_rows = loaded.num_rows


class _CalibrationLog:
    """Logs the calibration and its effect now and then. Per published step: ``poll``.

    The rows are copied to the host without waiting, and looked at in a later step;
    each line costs that step some milliseconds.
    """

    def __init__(self, sts: OnlineSTS, interval_s: float):
        self._sts, self._interval_s = sts, interval_s
        self._event = torch.cuda.Event()
        sources = [*sts.ring.tensors(), sts.calibration]
        self._copies = [
            torch.empty_like(t, device="cpu", pin_memory=t.device.type == "cuda")
            for t in sources
        ]
        self._in_flight = False
        self._next_s = time.monotonic() + interval_s

    def poll(self) -> None:
        """Start a copy when it is time, and log one that has landed."""
        if self._in_flight:
            # Polling is right here: nothing depends on what one rank logs when.
            if self._event.query():
                self._in_flight = False
                *ring, calibration = self._copies
                self._write(DraftRing(*ring), calibration)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._interval_s
            sources = [*self._sts.ring.tensors(), self._sts.calibration]
            for copy, source in zip(self._copies, sources, strict=True):
                copy.copy_(source, non_blocking=True)
            self._event.record()
            self._in_flight = True

    def _write(self, ring: DraftRing, calibration: torch.Tensor) -> None:
        for group, name in enumerate(CLASSES):
            rows = ring.graded_rows(group)
            if len(rows.accepted):
                logger.info(
                    "DSpark confidence calibration, %s: %s",
                    name,
                    describe(rows, calibration[group].numpy(), self._sts.start[group]),
                )


def describe(
    rows: sts_fit.GradedRows, calibration: np.ndarray, start: np.ndarray
) -> str:
    """Return one line: the calibration, and cumulative ECE with start and now.

    Args:
        rows: Graded rows.
        calibration: Scales, biases, bends. Shape [3, K].
        start: Likewise, as at start.
    """

    def numbers(values: np.ndarray) -> str:
        return " ".join(f"{value:.3g}" for value in values)

    before, after = (
        sts_metrics.by_position(
            sts_metrics.expected_calibration_error,
            sts_fit.survival_probs(rows.logits, table),
            rows,
        )
        for table in (start, calibration)
    )
    return (
        f"temperature {numbers(1.0 / calibration[0])}; bias {numbers(calibration[1])}; "
        f"bend {numbers(calibration[2])}; "
        f"cumulative ECE {numbers(before)} -> {numbers(after)} "
        f"({len(rows.accepted)} rows)"
    )
