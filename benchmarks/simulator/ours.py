# SPDX-License-Identifier: Apache-2.0
"""Our arm: the product's step planner, depth controller and scheduler table.

Only what needs a device is replaced: the confidence mirror (:mod:`.mirror`) and the
clock. The tables that it plans with are corrected by what steps take, as the product
does. Reports reach the scheduler ``REPORT_STEPS`` steps later, as under asynchronous
scheduling.
"""

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.simulator.calibrators import Calibrator, FixedTemperature
from benchmarks.simulator.mirror import HostMirror
from benchmarks.simulator.policies import Batch, Drafting, Policy
from vllm.config.dspark_capacity import DSparkCapacityConfig
from vllm.config.dspark_environ import DSparkCapacityEnv
from vllm.v1.core.sched.dspark_capacity_scheduler import depth_lookup
from vllm.v1.worker.gpu.spec_decode.dspark.knee import KNEE_MARGIN, knee_from_costs
from vllm.v1.worker.gpu.spec_decode.dspark.step_corrector import StepCorrector
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts
from vllm.v1.worker.gpu.spec_decode.dspark.step_planner import (
    FIXED,
    StepPlan,
    StepPlanner,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_times import StepTimes
from vllm.v1.worker.gpu.spec_decode.dspark.survival_history import PRIOR_CONFIDENCE

# Step t is scheduled while step t - 1 runs, with the output of step t - 2 known.
REPORT_STEPS = 2


@dataclass(frozen=True, slots=True)
class RecordedCosts:
    """Cost tables in the place of ``CapacityCosts``, which measures them.

    Attributes:
        step_costs: The tables.
        activation_num_reqs: Knee in requests.
        ready: Costs are known from the first step on.
    """

    step_costs: StepCosts
    activation_num_reqs: int
    ready: bool = True

    @classmethod
    def at_knee(cls, costs: StepCosts, depth: int, knee: int = 0) -> "RecordedCosts":
        """Take the product's automatic knee, or an explicit one above 0."""
        prior = np.cumprod(np.full(depth, PRIOR_CONFIDENCE))
        return cls(costs, knee or knee_from_costs(costs, depth, prior, KNEE_MARGIN))

    @property
    def max_num_reqs(self) -> int:
        """Largest request count of the tables."""
        return self.step_costs.max_num_reqs


class CapacityPolicy(Policy):
    """Load-aware capacity at K. Per load: ``start``; per step: see ``Policy``.

    Args:
        recorded: Cost tables and knee.
        depth: Logical depth K.
        depths: Enabled draft depths, K last.
        max_total_logits: Most logits rows of a trimmed batch.
        calibrator: Between the confidence head and everybody who reads it.
    """

    uniform_graphs = True

    def __init__(
        self,
        recorded: RecordedCosts,
        depth: int,
        depths: tuple[int, ...],
        max_total_logits: int,
        calibrator: Calibrator | None = None,
    ):
        self._recorded = recorded
        self._depth = depth
        self._config = DSparkCapacityConfig.from_keys(
            {"dspark_sps_curve": "auto", "dspark_draft_depths": list(depths)},
            num_speculative_tokens=depth,
        )
        self._max_total_logits = max_total_logits
        self.calibrator: Calibrator = calibrator or FixedTemperature()
        self._mirror: HostMirror | None = None
        # What the scheduler has yet to see; an idle engine has sent its table.
        self._reports: deque[StepPlan] = deque()
        # Whether the step before this one was published: else its end is unknown.
        self._was_published = False

    @property
    def max_depth(self) -> int:
        """See ``Policy``."""
        return self._depth

    def start(self, num_slots: int) -> None:
        """Begin a load, on the engine that served the last one if it has the slots."""
        if self._mirror is None or len(self._mirror.probs) != num_slots:
            self._build(num_slots)
        slots = np.arange(num_slots)
        self._mirror.drop_slots(slots)
        self.replaced(slots)
        self._reports = deque([FIXED] * REPORT_STEPS)
        self._was_published = False

    def _build(self, num_slots: int) -> None:
        costs = self._recorded
        self._mirror = HostMirror(num_slots, self._depth)
        self._planner = StepPlanner(
            self._config,
            DSparkCapacityEnv(),
            costs=costs,
            mirror=self._mirror,
            # The simulated engine's prices are of one context, too.
            num_computed_tokens=np.zeros(num_slots, dtype=np.int32),
            num_speculative_steps=self._depth,
            max_total_logits=self._max_total_logits,
            num_bonus_tokens=1,
        )
        times = StepTimes(SimpleNamespace(world_size=1), torch.device("cpu"))
        self._planner.corrector = StepCorrector(costs.step_costs, times)
        self._depth_of_load = self._planner.depth_of_load()
        self._logits = np.zeros((num_slots, self._depth))
        self._observable = np.zeros(num_slots, dtype=bool)

    def replaced(self, slots: np.ndarray) -> None:
        """Forget the confidences of slots that were given to new requests."""
        self._observable[slots] = False
        for slot in slots:
            self._mirror.reset_slot(int(slot), publishing=self._planner.publishing)

    def schedule(self, num_reqs: int) -> int:
        """The scheduler's table, by the report that has arrived."""
        report = self._reports.popleft()
        table = depth_lookup(self._depth_of_load, report.next_depth, report.num_decodes)
        return self._depth if table is None else table[min(num_reqs, len(table) - 1)]

    def budget(self, batch: Batch) -> int:
        """The product's plan of this step."""
        num_reqs = len(batch.slots)
        plan = self._planner.plan(
            SimpleNamespace(
                req_ids=range(num_reqs),
                is_prefilling_np=batch.prefilling,
                num_draft_tokens_np=batch.drafts if batch.num_drafts else None,
                idx_mapping_np=batch.slots,
                num_scheduled_tokens=batch.non_drafts + batch.drafts,
                num_tokens=int(batch.non_drafts.sum()) + batch.num_drafts,
                num_computed_prefill_tokens_np=np.zeros(num_reqs, dtype=np.int32),
                prefill_len_np=np.where(batch.sampling, 0, np.iinfo(np.int32).max),
            )
        )
        self._plan = plan
        self._reports.append(plan)
        return batch.num_drafts if plan.draft_budget is None else plan.draft_budget

    def rank(self, batch: Batch) -> np.ndarray:
        """By current calibrated confidence."""
        return np.cumprod(self._mirror.probs[batch.slots], axis=1)

    def drafted(self, drafting: Drafting) -> None:
        """Publish this round's confidences at or above the knee."""
        self._logits[drafting.slots] = drafting.confidence_logits
        if not (self._plan.active and self._plan.publishes):
            # The product's calibration pauses: every slot is stale.
            self._observable[:] = False
            if self._plan.active:
                self._mirror.skip_step()
            return
        self._observable[drafting.slots] = True
        probs = self.calibrator.apply(drafting.confidence_logits)
        self._mirror.publish(probs.astype(np.float32), drafting.slots, drafting.depth)
        self._planner.published(drafting.depth)

    def took(self, ms: float) -> None:
        """Let the product's correction see what it would: see ``host_copies``."""
        publishes = self._plan.active and self._plan.publishes
        if publishes and self._was_published:
            self._planner.corrector.times.add(self._mirror.serial, ms)
        self._was_published = publishes

    def judged(
        self, batch: Batch, capacities: np.ndarray, accepted: np.ndarray
    ) -> None:
        """Give the calibrator the rounds whose confidences were published."""
        if self._plan.active and self._plan.publishes:
            known = (batch.drafts > 0) & self._observable[batch.slots]
            verified = np.where(known, capacities, 0)
            self.calibrator.observe(self._logits[batch.slots], accepted, verified)
