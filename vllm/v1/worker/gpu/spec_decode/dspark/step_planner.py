# SPDX-License-Identifier: Apache-2.0
"""The host's part of one step: gate by load, choose the budget, wish for a depth.

Gathers what :mod:`.planner` needs from the batch and the confidence mirror, calls
it, and returns a frozen plan. Touches no device memory.

Invariants (pinned by tests/.../dspark/test_step_planner.py):
  * Below the knee, and before the costs are known, the plan is ``FIXED``: nothing
    was read, computed or waited for.
  * The first step at or above the knee verifies everything.
  * A budget that covers every scheduled draft is no trimming at all.
  * In a quiet step (:mod:`.plan_cadence`) nothing is landed, looked up or decided.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm.config.dspark_capacity import DSparkCapacityConfig
from vllm.config.dspark_environ import DSparkCapacityEnv
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.dspark.acceptance_mirror import AcceptanceMirror
from vllm.v1.worker.gpu.spec_decode.dspark.batch_facts import (
    BatchFacts,
    count_decodes,
    gather_facts,
)
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_costs import CapacityCosts
from vllm.v1.worker.gpu.spec_decode.dspark.confidence_mirror import ConfidenceMirror
from vllm.v1.worker.gpu.spec_decode.dspark.cost_correction import CostCorrection
from vllm.v1.worker.gpu.spec_decode.dspark.cost_profile import SHORT_CONTEXT_TOKENS
from vllm.v1.worker.gpu.spec_decode.dspark.depth import DepthController
from vllm.v1.worker.gpu.spec_decode.dspark.plan_cadence import Load, PlanCadence
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
        active: At or above the knee.
        draft_budget: Drafts to verify over the batch; None verifies them all.
        num_tokens: Target tokens of the batch at that budget.
        next_depth: Depth to draft at from the next scheduled step on; None is K.
        num_decodes: Decode requests in the batch.
        publishes: Of an active step: confidences are published after drafting.
    """

    active: bool
    draft_budget: int | None = None
    num_tokens: int = 0
    next_depth: int | None = None
    num_decodes: int = 0
    publishes: bool = True

    @property
    def trims(self) -> bool:
        """Whether some scheduled drafts are not verified."""
        return self.draft_budget is not None


# plan_depth does not look at the drafts in hand.
_NO_DRAFTS = np.zeros(0, dtype=np.int32)

FIXED = StepPlan(active=False, publishes=False)


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
        self._mode = config.mode
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
        # Other modes give each step its own budget; they promise nothing of rates.
        self.cadence = PlanCadence(enabled=config.mode == "curve")
        self._last_plan = FIXED
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
        num_decodes = count_decodes(batch)
        if not self.costs.ready or num_decodes < self.costs.activation_num_reqs:
            self.publishing = False
            return FIXED
        load = Load(len(batch.req_ids), num_decodes, batch.num_tokens)
        if not self.publishing:
            self.publishing = True
            self.cadence.reset()
            self.mirror.restart()
            if self._controller is not None:
                self._controller.reset()
            self._steps_since_wish = DEPTH_PLAN_INTERVAL
            self._decode_rate = 0.0
        elif self.cadence.is_quiet(load):
            return self._plan_quietly(batch, num_decodes)
        self.mirror.land()
        facts = self._look_at(batch, num_decodes)
        if self.corrector is not None:
            self.corrector.learn()
        budget = self._plan_budget(batch, facts)
        num_tokens = 0 if budget is None else facts.num_non_drafts + budget
        self._expect(facts, budget)
        depth, is_settled = None, True
        if self._controller is not None:
            depth = self._plan_depth(batch, facts)
            is_settled = depth == self._controller.depth == self._wished_depth
        self.cadence.planned(
            load,
            is_calm=budget is None and is_settled and facts.width >= 0,
            age=0 if self._controller is None else self._steps_since_wish,
        )
        publishes = self.cadence.publishes
        reqs = 0 if depth is None else num_decodes
        plan = StepPlan(True, budget, num_tokens, depth, reqs, publishes)
        self._last_plan = plan
        return plan

    def _look_at(self, batch: "BatchReqState", num_decodes: int) -> BatchFacts:
        facts = gather_facts(batch, num_decodes)
        # An upper bound by the drafts in flight, which is nothing beside a context.
        contexts = self._num_computed_tokens.take(batch.idx_mapping_np)
        self._context_tokens = int(np.add.reduce(contexts)) / facts.num_reqs
        return facts

    def _expect(self, facts: BatchFacts, budget: int | None) -> None:
        """Describe the step to whoever compares plans with times."""
        if self.corrector is None:
            return
        num_drafts = facts.num_drafts if budget is None else budget
        self._planned = PlannedBatch(
            facts.num_reqs,
            facts.num_non_drafts + num_drafts,
            facts.width,
            budget is not None,
            facts.decode_only,
            self._context_tokens,
        )

    def _plan_quietly(self, batch: "BatchReqState", num_decodes: int) -> StepPlan:
        """Do as the last plan said: verify everything, and keep the depth."""
        self._planned = None
        if self.cadence.follows_publication:
            # The one step of a period whose time is that of one step.
            self._expect(self._look_at(batch, num_decodes), None)
        last, publishes = self._last_plan, self.cadence.publishes
        reqs = 0 if last.next_depth is None else num_decodes
        if (reqs, publishes) != (last.num_decodes, last.publishes):
            last = StepPlan(True, None, 0, last.next_depth, reqs, publishes)
            self._last_plan = last
        return last

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
        for num_reqs in range(min(knee, len(table)), len(table)):
            inputs = PlanInputs(
                survival_probs=np.zeros((0, full)),
                scheduled_drafts=_NO_DRAFTS,
                num_non_draft_tokens=num_reqs,
                num_sampling_reqs=num_reqs,
                max_draft_budget=num_reqs * full,
                current_depth=self._controller.depth,
                next_survival=self.mirror.prior.astype(np.float64),
                depths=self.depths,
                context_tokens=self._context_tokens,
            )
            wish = plan_depth(inputs, self.costs.step_costs).draft_depth
            table[num_reqs] = self._controller.clamp(wish)
        return tuple(table)

    def _plan_budget(self, batch: "BatchReqState", facts: BatchFacts) -> int | None:
        """Return the drafts to verify; None: all."""
        if facts.num_drafts == 0 or isinstance(self.mirror, AcceptanceMirror):
            return None
        drafts, slots = batch.num_draft_tokens_np, batch.idx_mapping_np
        if facts.num_verifying < facts.num_reqs:
            drafts, slots = drafts[: facts.num_verifying], slots[: facts.num_verifying]
        if not self.mirror.all_fresh(slots):
            return None
        budget = self._choose_budget(batch, facts, drafts, slots)
        budget = self._cap(budget, facts.num_drafts, facts.num_reqs)
        return None if budget >= facts.num_drafts else budget

    def _choose_budget(
        self,
        batch: "BatchReqState",
        facts: BatchFacts,
        drafts: np.ndarray,
        slots: np.ndarray,
    ) -> int:
        if self._mode == "fraction":
            return fraction_budget(
                facts.num_verifying,
                self.num_speculative_steps,
                self.config.dspark_budget_frac,
                facts.num_drafts,
            )
        survival = self.mirror.survival_probs(slots)
        if self._mode == "threshold":
            threshold = self.config.dspark_confidence_threshold
            return threshold_budget(survival, drafts, threshold)
        inputs = PlanInputs(
            survival_probs=survival,
            scheduled_drafts=drafts,
            num_non_draft_tokens=facts.num_non_drafts,
            num_sampling_reqs=self._count_sampling(batch, facts),
            max_draft_budget=facts.num_drafts,
            current_depth=self._depth_in_use,
            next_survival=survival,
            depths=self.depths,
            context_tokens=self._context_tokens,
            decode_rate=self._decode_rate,
            width=None if facts.width < 0 else facts.width,
        )
        return plan_budget(
            inputs, self.costs.step_costs, correction=self._correction
        ).draft_budget

    @staticmethod
    def _count_sampling(batch: "BatchReqState", facts: BatchFacts) -> int:
        """Return the requests that yield a token in this step whatever happens."""
        if facts.decode_only:
            return facts.num_reqs
        non_drafts = batch.num_scheduled_tokens - batch.num_draft_tokens_np
        num_computed = batch.num_computed_prefill_tokens_np + non_drafts
        return int(np.count_nonzero(num_computed >= batch.prefill_len_np))

    @property
    def _depth_in_use(self) -> int:
        return self._controller.depth if self._controller else self.depths[-1]

    @property
    def _correction(self) -> CostCorrection | None:
        return None if self.corrector is None else self.corrector.correction

    def _plan_depth(self, batch: "BatchReqState", facts: BatchFacts) -> int:
        assert self._controller is not None
        num_decodes, num_skipped = facts.num_decodes, self.cadence.num_skipped
        self._controller.hold(num_skipped)
        self._steps_since_wish += 1 + num_skipped
        change = abs(num_decodes - self._reqs_at_wish)
        if (
            self._steps_since_wish >= DEPTH_PLAN_INTERVAL
            or change > DEPTH_PLAN_RELOAD * self._reqs_at_wish
        ):
            self._steps_since_wish, self._reqs_at_wish = 0, num_decodes
            self._wish_for_depth(batch, facts)
        return self._controller.update(self._wished_depth, num_decodes)

    def _wish_for_depth(self, batch: "BatchReqState", facts: BatchFacts) -> None:
        slots, num_decodes = batch.idx_mapping_np, facts.num_decodes
        if not facts.decode_only:
            slots = slots[~batch.is_prefilling_np]
        # The next drafts are expected to fare as the last ones did.
        survival = self.mirror.survival_probs(slots)
        inputs = PlanInputs(
            survival_probs=survival,
            scheduled_drafts=_NO_DRAFTS,
            num_non_draft_tokens=num_decodes,
            num_sampling_reqs=num_decodes,
            max_draft_budget=num_decodes * self.num_speculative_steps,
            current_depth=self._depth_in_use,
            next_survival=survival,
            depths=self.depths,
            context_tokens=self._context_tokens,
            decode_rate=self._decode_rate,
        )
        correction = self._correction
        wish = plan_depth(inputs, self.costs.step_costs, correction=correction)
        self._wished_depth, self._decode_rate = wish.draft_depth, wish.tokens_per_ms
        if correction is not None:
            # Mixed steps have no correction, so it is taken back here.
            self._decode_rate *= correction.common_ratio

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
