# SPDX-License-Identifier: Apache-2.0
"""Our arm: the product's step planner, depth controller and scheduler table.

Only what needs a device is replaced: the confidence mirror (:mod:`.mirror`) and the
timing of steps. Reports reach the scheduler ``REPORT_STEPS`` steps later, as under
asynchronous scheduling.
"""

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from benchmarks.simulator.calibrators import Calibrator, FixedTemperature
from benchmarks.simulator.mirror import HostMirror
from benchmarks.simulator.policies import Batch, Drafting
from vllm.config.dspark_capacity import DSparkCapacityConfig
from vllm.config.dspark_environ import DSparkCapacityEnv
from vllm.v1.core.sched.dspark_capacity_scheduler import depth_lookup
from vllm.v1.worker.gpu.spec_decode.dspark.knee import KNEE_MARGIN, knee_from_costs
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts
from vllm.v1.worker.gpu.spec_decode.dspark.step_planner import StepPlan, StepPlanner
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


class CapacityPolicy:
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

    @property
    def max_depth(self) -> int:
        """See ``Policy``."""
        return self._depth

    def start(self, num_slots: int) -> None:
        """Build the planner of a freshly started engine."""
        self._mirror = HostMirror(num_slots, self._depth)
        self._planner = StepPlanner(
            self._config,
            DSparkCapacityEnv(),
            costs=self._recorded,
            mirror=self._mirror,
            # The simulated engine's prices are of one context, too.
            num_computed_tokens=np.zeros(num_slots, dtype=np.int32),
            num_speculative_steps=self._depth,
            max_total_logits=self._max_total_logits,
            num_bonus_tokens=1,
        )
        self._depth_of_load = self._planner.depth_of_load()
        self._logits = np.zeros((num_slots, self._depth))
        self._observable = np.zeros(num_slots, dtype=bool)
        self._reports: deque[StepPlan | None] = deque([None] * REPORT_STEPS)

    def replaced(self, slots: np.ndarray) -> None:
        """Forget the confidences of slots that were given to new requests."""
        self._observable[slots] = False
        for slot in slots:
            self._mirror.reset_slot(int(slot), publishing=self._planner.publishing)

    def schedule(self, num_reqs: int) -> int:
        """The scheduler's table, by the report that has arrived."""
        report = self._reports.popleft()
        if report is None:
            return self._depth
        table = depth_lookup(self._depth_of_load, report.next_depth, report.num_decodes)
        return self._depth if table is None else table[min(num_reqs, len(table) - 1)]

    def next_depth(self, depth: int, drafting: Drafting, num_reqs: int) -> int:
        """As scheduled."""
        return depth

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

    def judged(
        self, batch: Batch, capacities: np.ndarray, accepted: np.ndarray
    ) -> None:
        """Give the calibrator the rounds whose confidences were published."""
        if self._plan.active and self._plan.publishes:
            known = (batch.drafts > 0) & self._observable[batch.slots]
            verified = np.where(known, capacities, 0)
            self.calibrator.observe(self._logits[batch.slots], accepted, verified)
