# SPDX-License-Identifier: Apache-2.0
"""Capacity managers: how many drafts of each request the target verifies.

``VarlenCapacityManager`` compacts the batch to the admitted drafts;
``mask_capacity.py`` keeps the fixed shape and rejects the others. Both share
the gate, the confidences and the budget.

Why trimming stays lossless. Rejection sampling is exact if whether draft k of a
request is judged is settled without looking at draft k: an unjudged draft counts as
absent. Confidence k is computed from the tokens before draft k, so it may be looked
at; confidence k + 1 knows draft k and may not.
  * Ranking: the place of slot (r, k) among the slots of row r is always k, because
    survivals never rise along a row (confidences are clamped to [0, 1]) and of
    equals the earlier position goes first; zeros that ``fill_budget`` admits keep
    that order. How many slots of other rows rank above it depends on its survival,
    that is on confidences 1..k of r, and on the other rows, whose drafts were drawn
    independently of draft (r, k). Row by row, given the others, the output is exact,
    so it is exact jointly.
  * Budget: from confidences of drafts that were judged before, of a request that a
    step left out as well (its row of the mirror is held back), and from priors
    learned from such rows. The budget itself therefore is known before the drafts in
    hand are drawn; a global search over saw-tooth costs would otherwise admit
    draft k for the sake of draft k + 1. Threshold and fraction modes, the cap at a
    logits chunk and the fallback to verify-all add nothing that depends on them.
  * Costs: corrected by the times of steps that had ended before the drafts in hand
    were drawn (for a request that a step left out: of steps that did not judge them).
  * Depth: it bounds drafts that are made later, and only through old confidences.
    Drafts in hand keep the depth they were made at.
  * Cadence: whether a step is planned follows from loads and earlier plans, so from
    nothing of the drafts in hand; unplanned steps verify them all.
The statistical side is tests/.../dspark/test_non_anticipation.py and
tests/.../spec_decode/test_lossless_sampling.py.

Invariants (pinned by tests/v1/worker/gpu/spec_decode/test_capacity.py):
  * In a step that does not trim, nothing is ranked or launched for verification.
  * Only rank 0's confidences are ever published.
  * The capacities of a trimmed step sum to its budget, so no row of the compact
    batch is without an owner.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from vllm.config.dspark_capacity import DSparkCapacityConfig
from vllm.config.dspark_environ import DSparkCapacityEnv
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.dspark.acceptance_mirror import AcceptanceMirror
from vllm.v1.worker.gpu.spec_decode.dspark.capacity import warm_up
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_costs import CapacityCosts
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_log import CapacityLog
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_native import pick_admission
from vllm.v1.worker.gpu.spec_decode.dspark.confidence_mirror import ConfidenceMirror
from vllm.v1.worker.gpu.spec_decode.dspark.cost_profile import ProfileOptions
from vllm.v1.worker.gpu.spec_decode.dspark.step_corrector import StepCorrector
from vllm.v1.worker.gpu.spec_decode.dspark.step_planner import (
    FIXED,
    StepPlan,
    StepPlanner,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_times import StepTimes
from vllm.v1.worker.gpu.spec_decode.dspark.tp_check import make_tp_check

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import BatchReqState
    from vllm.v1.worker.gpu.states import RequestState


class _Views(NamedTuple):
    """Parts of persistent tensors for one batch size: slicing anew costs host time."""

    num_reqs: int
    counts: torch.Tensor
    drafts: torch.Tensor
    non_drafts: torch.Tensor
    capacities: torch.Tensor


class CapacityManager:
    """Plans, ranks and publishes; shared by both verification modes.

    Lifecycle: built with the KV cache; ``finish_start_up`` after graph capture; per
    step: ``plan_step``, then (when trimming) ``admit``, then ``finish_step``.

    Args:
        config: The capacity keys.
        env: The operational switches.
        req_states: The runner's request states.
        num_bonus_tokens: Sampled tokens per request and step besides drafts.
        max_total_logits: Largest number of logits rows that the rejection sampler
            verifies in one chunk; a compacted batch cannot be split.
    """

    def __init__(
        self,
        config: DSparkCapacityConfig,
        env: DSparkCapacityEnv,
        *,
        req_states: "RequestState",
        num_bonus_tokens: int,
        max_total_logits: int,
    ):
        max_reqs, device = req_states.max_num_reqs, req_states.device
        num_steps = req_states.num_speculative_steps
        self.req_states = req_states
        self.num_bonus_tokens = num_bonus_tokens
        self.mirror = self._make_mirror()
        self.costs = CapacityCosts(
            config,
            req_states,
            depths=config.resolve_depths(num_steps, env),
            activation_batch_size=env.activation_batch_size,
            options=ProfileOptions(
                env.profile_repeats, env.profile_warmup, env.profile_sizes
            ),
        )
        self.planner = StepPlanner(
            config,
            env,
            costs=self.costs,
            mirror=self.mirror,
            num_computed_tokens=req_states.num_computed_tokens_np,
            num_speculative_steps=num_steps,
            max_total_logits=max_total_logits,
            num_bonus_tokens=num_bonus_tokens,
        )
        self._tp_group = get_tp_group()
        self._tp_check = make_tp_check(
            env.tp_check, self._tp_group, self.mirror, max_reqs
        )
        self._log: CapacityLog | None = None
        if env.log_interval_s and self._tp_group.rank_in_group == 0:
            self._log = CapacityLog(env.log_interval_s)
        self._admit_drafts = pick_admission(env.admission_op, device)
        self.capacities = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self._counts = torch.zeros(2 * max_reqs, dtype=torch.int32, device=device)
        # What they hold, so that a steady batch is not sent again.
        self._sent_counts: tuple[bytes, bytes] | None = None
        self._views = self._views_of(0)
        # Depth to begin with at each load, for the scheduler.
        self.depth_of_load: tuple[int, ...] = ()
        self._plan = FIXED
        self._batch: BatchReqState | None = None

    def _make_mirror(self) -> ConfidenceMirror | AcceptanceMirror:
        states = self.req_states
        return ConfidenceMirror(
            states.max_num_reqs, states.num_speculative_steps, states.device
        )

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, Any]]:
        """Yield the runner's dummy batches whose timings price a step."""
        return self.costs.batches_to_profile()

    def set_initial_cost_curves(self, samples: list) -> None:
        """Build the cost tables from the timings of those batches."""
        self.costs.set_samples(samples)

    def finish_start_up(self) -> None:
        """Compile the admission kernel, complete the costs and let capacity run.

        Called after graph capture, so that no serving step compiles anything.
        """
        self._warm_up()
        self.costs.finish()
        if self.costs.measured:
            times = StepTimes(self._tp_group, self.req_states.device)
            self.mirror.on_step_time = times.add
            self.planner.corrector = StepCorrector(self.costs.step_costs, times)
        self.depth_of_load = self.planner.depth_of_load()

    def _warm_up(self) -> None:
        states = self.req_states
        warm_up(
            states.max_num_reqs,
            states.num_speculative_steps,
            states.device,
            idx_dtype=torch.int64,
            admit=self._admit_drafts,
        )

    def add_request(self, slot: int) -> None:
        """Forget what a slot's former request drafted."""
        self.mirror.reset_slot(slot, publishing=self.planner.publishing)

    def remove_requests(self, slots: Sequence[int]) -> None:
        """Let go of what is kept for requests that have ended.

        Args:
            slots: The slots they had, each once.
        """
        self.mirror.drop_slots(slots)

    def note_judged(
        self, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Take note of what the step verified; used where nothing else is known.

        Args:
            num_sampled: Tokens of each request. Shape [R], int32, device.
            num_rejected: Its rejected drafts. Shape [R], int32, device.
        """

    def plan_step(self, batch: "BatchReqState") -> StepPlan:
        """Decide how many scheduled drafts this step verifies.

        Args:
            batch: The scheduled batch in batch order, requests with drafts first.
        """
        self._plan, self._batch = self.planner.plan(batch), batch
        if self._tp_check is not None:
            self._tp_check.compare_plan(self._plan, batch)
        if self._log is not None:
            self._note_step(self._log, self._plan, batch)
        return self._plan

    def _note_step(
        self, log: CapacityLog, plan: StepPlan, batch: "BatchReqState"
    ) -> None:
        drafts, corrector = batch.num_draft_tokens_np, self.planner.corrector
        depth = self.planner.num_speculative_steps if plan.active else None
        log.note(
            num_decodes=len(batch.req_ids) - int(batch.is_prefilling_np.sum()),
            knee=self.costs.activation_num_reqs,
            depth=depth if plan.next_depth is None else plan.next_depth,
            num_drafts=0 if drafts is None else int(drafts.sum()),
            draft_budget=plan.draft_budget,
            ratio=None if corrector is None else corrector.last_ratio,
        )

    def admit(
        self,
        idx_mapping: torch.Tensor,
        cu_num_logits: torch.Tensor,
        query_start_loc: torch.Tensor,
    ) -> torch.Tensor:
        """Rank the drafts in hand and admit the planned budget, in one launch.

        Args:
            idx_mapping: Batch row to slot. Shape [R], int64, device.
            cu_num_logits: Out. Shape [>= R + 1], int32, device.
            query_start_loc: Out. Shape [max_num_reqs + 1], int32, device.

        Returns:
            Admitted drafts per request. Shape [R], int32, device; valid until the
            next call.
        """
        assert self._batch is not None and self._plan.draft_budget is not None
        num_reqs = len(self._batch.req_ids)
        if self._views.num_reqs != num_reqs:
            self._views = self._views_of(num_reqs)
        views = self._views
        drafts = self._batch.num_draft_tokens_np
        scheduled = self._batch.num_scheduled_tokens
        counts = drafts.tobytes(), scheduled.tobytes()
        if counts != self._sent_counts:
            self._sent_counts = counts
            both = np.concatenate((drafts, scheduled - drafts))
            async_tensor_h2d(both, out=views.counts)
        self._admit_drafts(
            self.mirror.probs,
            idx_mapping,
            views.drafts,
            views.non_drafts,
            self._plan.draft_budget,
            num_bonus_tokens=self.num_bonus_tokens,
            fill_budget=True,
            capacities_out=self.capacities,
            cu_num_logits_out=cu_num_logits,
            query_start_loc_out=query_start_loc,
        )
        if self._tp_check is not None:
            self._tp_check.compare_capacities(views.capacities)
        return views.capacities

    def _views_of(self, num_reqs: int) -> "_Views":
        counts = self._counts[: 2 * num_reqs]
        return _Views(
            num_reqs,
            counts,
            counts[:num_reqs],
            counts[num_reqs:],
            self.capacities[:num_reqs],
        )

    def _publishes(self) -> bool:
        """Tell whether to publish the step; the mirror learns of one that is left."""
        plan = self._plan
        if plan.active and not plan.publishes:
            self.mirror.skip_step()
        return plan.active and plan.publishes

    def finish_step(
        self, probs: torch.Tensor, input_batch: "InputBatch", draft_depth: int
    ) -> None:
        """Publish the confidences of the drafts that this step made, if it shall.

        Args:
            probs: Confidences in batch order, rank 0's if published. Shape [>= R, K],
                float32, device.
            input_batch: The batch that was drafted for.
            draft_depth: Positions that were drafted.
        """
        if not self._publishes():
            return
        if self._tp_group.world_size > 1:
            # Rank 0 decides: every later choice is a function of these values.
            self._tp_group.broadcast(probs[: input_batch.num_reqs], src=0)
        if self._tp_check is not None:
            drafted = probs[: input_batch.num_reqs, :draft_depth]
            self._tp_check.compare_confidences(drafted)
        self.mirror.publish(
            probs, input_batch.idx_mapping, input_batch.idx_mapping_np, draft_depth
        )
        self.planner.published(draft_depth)


class VarlenCapacityManager(CapacityManager):
    """Compact verification: only admitted drafts reach the target.

    It stands where the runner expects upstream's adaptive verification manager,
    for the steps that trim.

    Args:
        query_start_loc: The runner's persistent buffer. Shape [max_num_reqs + 1].
        reports_admitted_counts: Whether this vLLM's runner takes the admitted host
            counts as a fourth result of ``reallocate_drafts``.
        kwargs: See ``CapacityManager``.
    """

    def __init__(
        self,
        config: DSparkCapacityConfig,
        env: DSparkCapacityEnv,
        *,
        query_start_loc: torch.Tensor,
        reports_admitted_counts: bool,
        **kwargs: Any,
    ):
        super().__init__(config, env, **kwargs)
        self.query_start_loc = query_start_loc
        self._reports_admitted_counts = reports_admitted_counts
        self._cu_num_logits = torch.zeros_like(query_start_loc)
        self._cu_num_logits_view = self._cu_num_logits

    def compact_batch(
        self,
        num_draft_tokens_per_req: np.ndarray,
        num_scheduled_tokens: np.ndarray,
        cu_num_logits_np: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Give the host an even split of the budget; the device holds the real one.

        Args:
            num_draft_tokens_per_req: Scheduled drafts. Shape [R], int32.
            num_scheduled_tokens: Scheduled tokens. Shape [R], int32.
            cu_num_logits_np: Untrimmed prefix sums. Shape [R + 1], int32.

        Returns:
            Token counts whose sum is the compacted batch, and logits prefix sums:
            exact at budget 0, else the untrimmed ones (an upper bound).
        """
        budget = self._plan.draft_budget
        assert budget is not None
        non_drafts = num_scheduled_tokens - num_draft_tokens_per_req
        if budget == 0:
            num_reqs = num_scheduled_tokens.shape[0]
            exact = np.arange(num_reqs + 1, dtype=cu_num_logits_np.dtype)
            return non_drafts, exact * self.num_bonus_tokens
        num_verifying = int(np.count_nonzero(num_draft_tokens_per_req))
        share, rest = divmod(budget, num_verifying)
        counts = non_drafts
        counts[:num_verifying] += share
        counts[:rest] += 1
        return counts, cu_num_logits_np

    def reallocate_drafts(
        self, req_ids: list[str], idx_mapping: torch.Tensor
    ) -> tuple[torch.Tensor | int | None, ...]:
        """Admit the drafts and lay the compact batch out on the device.

        Args:
            req_ids: Requests in batch order.
            idx_mapping: Batch row to slot. Shape [R], int64, device.

        Returns:
            Logits prefix sums, query start locations, the budget and, where the
            runner takes it, None for the admitted host counts.
        """
        self.admit(idx_mapping, self._cu_num_logits, self.query_start_loc)
        size = len(req_ids) + 1
        if len(self._cu_num_logits_view) != size:
            self._cu_num_logits_view = self._cu_num_logits[:size]
        result = (
            self._cu_num_logits_view,
            self.query_start_loc,
            self._plan.draft_budget,
        )
        return (*result, None) if self._reports_admitted_counts else result
