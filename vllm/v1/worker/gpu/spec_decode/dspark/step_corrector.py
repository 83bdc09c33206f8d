# SPDX-License-Identifier: Apache-2.0
"""Compares planned steps with what they took, and corrects the costs by it.

Only steps whose cost one table entry describes are compared: decode requests alone,
on the uniform graph of the depth that was drafted, or trimmed.

Invariants (pinned by tests/.../dspark/test_step_corrector.py):
  * A step with prefill, or of mixed widths that trims nothing, teaches nothing.
  * Equal times give equal factors on every rank.
"""

from typing import NamedTuple

from vllm.v1.worker.gpu.spec_decode.dspark.cost_correction import CostCorrection
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts
from vllm.v1.worker.gpu.spec_decode.dspark.step_times import StepTimes

# Times that are taken in at once. Inside an engine the code of a first observation is
# cold; the following ones cost a fifth.
LEARN_BATCH = 8
# Steps whose times are still awaited: two exchanges, and some in flight.
_MAX_PENDING = 128


class PlannedBatch(NamedTuple):
    """What a plan knows about the batch that it decided on.

    Attributes:
        num_reqs: Requests R.
        num_tokens: Target tokens, after trimming.
        width: Drafts in hand of every request; -1 if they differ.
        trims: Some drafts are not verified.
        decode_only: No request is prefilling.
        context_tokens: Mean context of the requests.
    """

    num_reqs: int
    num_tokens: int
    width: int
    trims: bool
    decode_only: bool
    context_tokens: float


class StepCorrector:
    """Per step: ``learn`` before planning, ``note`` at publication.

    Args:
        costs: The measured tables.
        times: Canonical step times.
        learn_batch: Times that must have arrived before any is taken in.

    Attributes:
        correction: Factors for the planner.
        last_ratio: Measured over predicted time of the latest compared step.
    """

    def __init__(
        self, costs: StepCosts, times: StepTimes, *, learn_batch: int = LEARN_BATCH
    ):
        self._costs, self.times = costs, times
        self._learn_batch = learn_batch
        decode_tokens = (costs.depths[-1] + 1) * costs.max_num_reqs
        self.correction = CostCorrection(
            costs.depths, costs.max_num_reqs, min(decode_tokens, costs.max_num_tokens)
        )
        self._pending: dict[int, tuple[PlannedBatch, int]] = {}
        self.last_ratio = 1.0

    def learn(self) -> None:
        """Take in the times that have arrived, once they are a batch."""
        if self.times.num_ready < self._learn_batch:
            return
        for serial, ms in self.times.take():
            step = self._pending.pop(serial, None)
            if step is not None:
                self._compare(*step, ms)

    def _compare(self, batch: PlannedBatch, draft_depth: int, ms: float) -> None:
        costs, num_reqs = self._costs, batch.num_reqs
        is_uniform = not batch.trims
        if is_uniform:
            verify_ms = costs.verify_uniform_ms[draft_depth][num_reqs]
            factor = self.correction.uniform[draft_depth][num_reqs]
        else:
            verify_ms = costs.decode_varlen_ms(num_reqs)[batch.num_tokens - num_reqs]
            factor = self.correction.varlen[draft_depth][batch.num_tokens]
        tabled_ms = float(
            verify_ms
            + costs.draft_ms[draft_depth][num_reqs]
            + costs.overhead_ms
            + costs.context_ms(batch.width, draft_depth, num_reqs, batch.context_tokens)
        )
        self.last_ratio = ms / (tabled_ms * float(factor))
        self.correction.observe(
            draft_depth,
            batch.num_tokens,
            is_uniform=is_uniform,
            tabled_ms=tabled_ms,
            measured_ms=ms,
        )

    def note(self, serial: int, batch: PlannedBatch, draft_depth: int) -> None:
        """Await the time of a published step.

        Args:
            serial: Number of its publication.
            batch: The planned batch.
            draft_depth: Depth that it drafted at.
        """
        is_uniform = not batch.trims and batch.width == draft_depth
        comparable = batch.decode_only and (batch.trims or is_uniform)
        if not comparable or draft_depth not in self._costs.draft_ms:
            return
        if len(self._pending) >= _MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        self._pending[serial] = batch, draft_depth
