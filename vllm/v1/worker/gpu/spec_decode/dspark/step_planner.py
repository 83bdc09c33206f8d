# SPDX-License-Identifier: Apache-2.0
"""The host's part of one step: gate by load, choose the budget, wish for a depth.

Gathers what :mod:`.planner` needs from the batch and the confidence mirror, calls
it, and returns a frozen plan. Touches no device memory.

Invariants (pinned by tests/.../dspark/test_step_planner.py):
  * Below the knee, and before the costs are known, the plan is ``FIXED``: nothing
    was read, computed or waited for.
  * The first step at or above the knee verifies everything.
  * A budget that covers every scheduled draft is no trimming at all.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vllm.config.dspark_capacity import DSparkCapacityConfig
from vllm.config.dspark_environ import DSparkCapacityEnv
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.dspark.acceptance_mirror import AcceptanceMirror
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_costs import CapacityCosts
from vllm.v1.worker.gpu.spec_decode.dspark.confidence_mirror import ConfidenceMirror
from vllm.v1.worker.gpu.spec_decode.dspark.cost_correction import CostCorrection
from vllm.v1.worker.gpu.spec_decode.dspark.cost_profile import SHORT_CONTEXT_TOKENS
from vllm.v1.worker.gpu.spec_decode.dspark.depth import DepthController
from vllm.v1.worker.gpu.spec_decode.dspark.planner import (
    PlanInputs,
    fraction_budget,
    plan_budget,
    plan_depth,
    threshold_budget,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_corrector import (
    PlannedBatch,
    StepCorrector,
)

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import BatchReqState

logger = init_logger(__name__)

# Steps between depth plans: a depth lasts for many steps, and a plan over all
# enabled depths sorts the survivals once per depth.
DEPTH_PLAN_INTERVAL = 8
# Relative change of the batch that asks for a new depth plan at once.
DEPTH_PLAN_RELOAD = 0.125


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does.

    Attributes:
        active: At or above the knee: confidences are published after drafting.
        draft_budget: Drafts to verify over the batch; None verifies them all.
        num_tokens: Target tokens of the batch at that budget.
        next_depth: Depth to draft at from the next scheduled step on; None is K.
        num_decodes: Decode requests in the batch.
    """

    active: bool
    draft_budget: int | None = None
    num_tokens: int = 0
    next_depth: int | None = None
    num_decodes: int = 0

    @property
    def trims(self) -> bool:
        """Whether some scheduled drafts are not verified."""
        return self.draft_budget is not None


FIXED = StepPlan(active=False)
VERIFY_ALL = StepPlan(active=True)


class StepPlanner:
    """Decides each step from the batch, old survivals and costs.

    Lifecycle: built with the manager; ``plan`` once per step, before the forward.

    Args:
        config: The capacity keys.
        env: The operational switches.
        costs: Step costs and knee of this worker.
        mirror: The confidences; learned acceptance for drafts without any, of which
            all are verified and only the depth is chosen.
        num_computed_tokens: The runner's host view of each slot's context, the same
            on every rank. Shape [max_num_reqs], int32.
        num_speculative_steps: Logical depth K.
        max_total_logits: Most logits rows that a trimmed batch may have.
        num_bonus_tokens: Logits rows of a request besides its drafts.
    """

    def __init__(
        self,
        config: DSparkCapacityConfig,
        env: DSparkCapacityEnv,
        *,
        costs: CapacityCosts,
        mirror: ConfidenceMirror | AcceptanceMirror,
        num_computed_tokens: np.ndarray,
        num_speculative_steps: int,
        max_total_logits: int,
        num_bonus_tokens: int,
    ):
        self.config = config
        self.costs = costs
        self.mirror = mirror
        self._num_computed_tokens = num_computed_tokens
        self._context_tokens = float(SHORT_CONTEXT_TOKENS)
        # What serving teaches about measured costs; None for costs that were given.
        self.corrector: StepCorrector | None = None
        self._planned: PlannedBatch | None = None
        self.num_speculative_steps = num_speculative_steps
        self._max_total_logits = max_total_logits
        self._num_bonus_tokens = num_bonus_tokens
        self.publishing = False
        self.depths = config.resolve_depths(num_speculative_steps, env)
        self._controller: DepthController | None = None
        if config.mode == "curve" and len(self.depths) > 1:
            self._controller = DepthController(
                self.depths, window=env.draft_depth_window
            )
        self._wished_depth = num_speculative_steps
        self._steps_since_wish = DEPTH_PLAN_INTERVAL
        self._reqs_at_wish = 0
        self._decode_rate = 0.0
        self._cap_was_logged = False

    def plan(self, batch: "BatchReqState") -> StepPlan:
        """Decide how many scheduled drafts to verify and how deep to draft next.

        Args:
            batch: The scheduled batch in batch order, requests with drafts first.

        Returns:
            ``FIXED`` below the knee, else a plan with ``active`` set.
        """
        num_decodes = len(batch.req_ids) - int(batch.is_prefilling_np.sum())
        if not self.costs.ready or num_decodes < self.costs.activation_num_reqs:
            self.publishing = False
            return FIXED
        if not self.publishing:
            self.publishing = True
            self.mirror.restart()
            if self._controller is not None:
                self._controller.reset()
            self._steps_since_wish = DEPTH_PLAN_INTERVAL
            self._decode_rate = 0.0
        self.mirror.land()
        # An upper bound by the drafts in flight, which is nothing beside a context.
        slots = batch.idx_mapping_np
        self._context_tokens = float(self._num_computed_tokens[slots].mean())
        if self.corrector is not None:
            self.corrector.learn()
        plan = self._plan_budget(batch)
        if self.corrector is not None:
            self._planned = self._describe(batch, plan)
        if self._controller is None:
            return plan
        depth = self._plan_depth(batch, num_decodes)
        return replace(plan, next_depth=depth, num_decodes=num_decodes)

    def published(self, draft_depth: int) -> None:
        """Await the time of the step that was just published.

        Args:
            draft_depth: Depth that it drafted at.
        """
        if self.corrector is None:
            return
        serial = self.mirror.serial
        if self._planned is not None:
            self.corrector.note(serial, self._planned, draft_depth)
        self.corrector.times.exchange(serial)

    def _describe(self, batch: "BatchReqState", plan: StepPlan) -> PlannedBatch:
        drafts = batch.num_draft_tokens_np
        if drafts is None:
            width = 0  # a step after one at depth 0
        elif drafts.min() == drafts.max():
            width = int(drafts[0])
        else:
            width = -1
        return PlannedBatch(
            num_reqs=len(batch.req_ids),
            num_tokens=plan.num_tokens if plan.trims else batch.num_tokens,
            width=width,
            trims=plan.trims,
            decode_only=not batch.is_prefilling_np.any(),
            context_tokens=self._context_tokens,
        )

    def depth_of_load(self) -> tuple[int, ...]:
        """Return the depth to begin with by number of requests, K below the knee.

        It serves the scheduler for the first steps of a new load, for which no wish
        is known yet: without it they would draft K positions at any load.

        Returns:
            Shape [max_num_reqs + 1]; empty where the depth is fixed.
        """
        if self._controller is None:
            return ()
        full, knee = self.num_speculative_steps, self.costs.activation_num_reqs
        table = [full] * (self.costs.max_num_reqs + 1)
        nothing = np.zeros(0, dtype=np.int32)
        for num_reqs in range(min(knee, len(table)), len(table)):
            inputs = self._inputs(
                np.zeros((0, full)),
                nothing,
                num_reqs,
                num_reqs,
                self.mirror.prior.astype(np.float64),
            )
            inputs = replace(inputs, max_draft_budget=num_reqs * full)
            wish = plan_depth(inputs, self.costs.step_costs).draft_depth
            table[num_reqs] = self._controller.clamp(wish)
        return tuple(table)

    def _plan_budget(self, batch: "BatchReqState") -> StepPlan:
        drafts = batch.num_draft_tokens_np
        if drafts is None or isinstance(self.mirror, AcceptanceMirror):
            return VERIFY_ALL
        num_verifying = int(np.count_nonzero(drafts))
        slots = batch.idx_mapping_np[:num_verifying]
        if not self.mirror.all_fresh(slots):
            return VERIFY_ALL
        num_scheduled = int(drafts.sum())
        non_drafts = batch.num_scheduled_tokens - drafts
        budget = self._choose_budget(batch, drafts[:num_verifying], non_drafts, slots)
        budget = self._cap(budget, num_scheduled, len(batch.req_ids))
        if budget >= num_scheduled:
            return VERIFY_ALL
        return StepPlan(True, budget, int(non_drafts.sum()) + budget)

    def _choose_budget(
        self,
        batch: "BatchReqState",
        drafts: np.ndarray,
        non_drafts: np.ndarray,
        slots: np.ndarray,
    ) -> int:
        if self.config.mode == "fraction":
            return fraction_budget(
                len(slots),
                self.num_speculative_steps,
                self.config.dspark_budget_frac,
                int(drafts.sum()),
            )
        survival = self.mirror.survival_probs(slots)
        if self.config.mode == "threshold":
            threshold = self.config.dspark_confidence_threshold
            return threshold_budget(survival, drafts, threshold)
        sampling = (
            batch.num_computed_prefill_tokens_np + non_drafts >= batch.prefill_len_np
        )
        inputs = self._inputs(
            survival,
            drafts,
            int(non_drafts.sum()),
            int(np.count_nonzero(sampling)),
            survival,
        )
        return plan_budget(
            inputs, self.costs.step_costs, correction=self._correction
        ).draft_budget

    @property
    def _correction(self) -> CostCorrection | None:
        return None if self.corrector is None else self.corrector.correction

    def _inputs(
        self,
        survival: np.ndarray,
        drafts: np.ndarray,
        num_non_draft_tokens: int,
        num_sampling_reqs: int,
        next_survival: np.ndarray,
    ) -> PlanInputs:
        depth = self._controller.depth if self._controller else self.depths[-1]
        return PlanInputs(
            survival_probs=survival,
            scheduled_drafts=drafts,
            num_non_draft_tokens=num_non_draft_tokens,
            num_sampling_reqs=num_sampling_reqs,
            max_draft_budget=int(drafts.sum()),
            current_depth=depth,
            next_survival=next_survival,
            depths=self.depths,
            context_tokens=self._context_tokens,
            decode_rate=self._decode_rate,
        )

    def _plan_depth(self, batch: "BatchReqState", num_decodes: int) -> int:
        assert self._controller is not None
        self._steps_since_wish += 1
        change = abs(num_decodes - self._reqs_at_wish)
        if (
            self._steps_since_wish >= DEPTH_PLAN_INTERVAL
            or change > DEPTH_PLAN_RELOAD * self._reqs_at_wish
        ):
            self._steps_since_wish, self._reqs_at_wish = 0, num_decodes
            slots = batch.idx_mapping_np[~batch.is_prefilling_np]
            # The next drafts are expected to fare as the last ones did.
            survival = self.mirror.survival_probs(slots)
            drafts = np.full(len(slots), self.num_speculative_steps, dtype=np.int32)
            inputs = self._inputs(survival, drafts, num_decodes, num_decodes, survival)
            correction = self._correction
            wish = plan_depth(inputs, self.costs.step_costs, correction=correction)
            self._wished_depth, self._decode_rate = wish.draft_depth, wish.tokens_per_ms
            if correction is not None:
                # Mixed steps have no correction, so it is taken back here.
                self._decode_rate *= correction.common_ratio
        return self._controller.update(self._wished_depth, num_decodes)

    def _cap(self, budget: int, num_scheduled: int, num_reqs: int) -> int:
        cap = max(self._max_total_logits - num_reqs * self._num_bonus_tokens, 0)
        if budget <= cap or budget >= num_scheduled:
            return budget
        # Not warning_once: that tells messages apart by their figures, which change.
        log = logger.debug if self._cap_was_logged else logger.warning
        self._cap_was_logged = True
        log(
            "DSpark capacity planned %d drafts for %d requests, but a trimmed batch "
            "must fit one chunk of %d logits rows (1 GiB of float32 logits); "
            "verifying %d. More replicas serve such loads better.",
            budget,
            num_reqs,
            self._max_total_logits,
            cap,
        )
        return cap
