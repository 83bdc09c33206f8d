# SPDX-License-Identifier: Apache-2.0
"""The V2 model runner with load-aware DSpark capacity.

Adds five things to the stock runner's step and changes nothing else:
  1. ``gather_batch_req_state``: plan the step, and shrink the batch if it trims.
  2. ``prepare_inputs``: lend the manager to upstream's compaction hooks, only in
     steps that trim; in every other step the runner has no manager at all.
  3. ``sample_tokens``: publish the confidences of the new drafts, or, for drafts
     without any, what was accepted.
  4. ``sample_tokens``: let the calibration see what became of the judged drafts.
  5. Report to the scheduler how many drafts were really verified.
"""

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.config.dspark_calibration import CALIBRATION_KEY
from vllm.config.dspark_values import DSparkCapacityConfigError
from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.spec_decode.dspark_capacity_report import (
    REPORT_ATTRIBUTE,
    CapacityReport,
)
from vllm.v1.worker.gpu.dspark_capture_meter import describe_capture
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.capacity import (
    CapacityManager,
    VarlenCapacityManager,
)
from vllm.v1.worker.gpu.spec_decode.capacity_factory import create_fixed_shape_manager
from vllm.v1.worker.gpu.spec_decode.capacity_profile import measure_sample_ms
from vllm.v1.worker.gpu.spec_decode.dspark.cost_key import make_cache
from vllm.v1.worker.gpu.spec_decode.dspark.cost_profile import ProfileHooks
from vllm.v1.worker.gpu.spec_decode.dspark.online_sts import (
    OnlineSTS,
    make_online_sts,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_planner import FIXED, StepPlan
from vllm.v1.worker.gpu.spec_decode.dspark.sts_reference import JudgedDrafts
from vllm.v1.worker.gpu.spec_decode.mask_capacity import MaskCapacityManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch

logger = init_logger(__name__)

# Reports in flight: async scheduling keeps at most two steps queued.
_NUM_REPORT_BUFFERS = 4


class CapacityModelOutput(AsyncModelRunnerOutput):
    """A step's output plus its capacity report, resolved when it is collected.

    Args:
        inner: The runner's own asynchronous output.
        plan: The step's plan.
        depth_of_load: See ``CapacityReport``.
        verified: Host buffer receiving the capacities; None when everything was
            verified. Its copy was queued on the main stream before the step's
            tokens were sampled, so it is there as soon as they are.
    """

    def __init__(
        self,
        inner: AsyncModelRunnerOutput,
        plan: StepPlan,
        depth_of_load: tuple[int, ...] | None,
        verified: torch.Tensor | None,
    ):
        self._inner, self._plan, self._verified = inner, plan, verified
        self._depth_of_load = depth_of_load

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step and return its output with the report attached."""
        output = self._inner.get_output()
        counts = None
        if self._verified is not None:
            counts = self._verified[: len(output.req_ids)].tolist()
        report = CapacityReport(
            self._plan.active,
            counts,
            self._plan.next_depth,
            self._plan.num_decodes,
            self._depth_of_load,
        )
        setattr(output, REPORT_ATTRIBUTE, report)
        return output

    def get_kv_connector_output(self) -> "KVConnectorOutput | None":
        """Return the wrapped output's KV connector part."""
        return self._inner.get_kv_connector_output()


class DSparkCapacityModelRunner(GPUModelRunner):
    """Stock V2 runner plus the capacity step.

    Args:
        vllm_config: Config whose ``speculative_config`` has capacity keys.
        device: Device of this rank.
    """

    def __init__(self, vllm_config: "VllmConfig", device: torch.device):
        super().__init__(vllm_config, device)
        self.capacity: CapacityManager | None = None
        # Set before the model is loaded, so that a bad one is refused in seconds.
        self.cost_cache_directory: Path | None = None
        self.online_sts: OnlineSTS | None = None
        self._num_judged: tuple[torch.Tensor, torch.Tensor] | None = None
        self._step_plan = FIXED
        self._sent_depths: tuple[int, ...] | None = None
        self._report_buffers: deque[torch.Tensor] = deque()
        self._pending_verified: torch.Tensor | None = None

    # -- start-up ------------------------------------------------------------

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load both models; a drafter that should report confidences must do so."""
        super().load_model(*args, **kwargs)
        if not self.speculative_config.reports_confidences:
            return
        speculator = self.speculator
        head = getattr(getattr(speculator.model, "model", None), "confidence_head", 0)
        if not head:
            raise ValueError(
                f"{type(speculator.model).__name__} was loaded without a confidence "
                "head, which the dspark_* capacity keys need. Use a checkpoint with "
                "enable_confidence_head, or remove the dspark_* keys."
            )
        # Mask mode leaves upstream's adaptive flag off, which would disable the head.
        speculator.use_confidence_head = True
        speculator.use_acceptance_estimator = False

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Build attention, graphs and the capacity manager."""
        super().initialize_kv_cache(*args, **kwargs)
        self.capacity = self.adaptive_verification or create_fixed_shape_manager(self)
        self.online_sts = make_online_sts(self)
        if not self._report_buffers:
            self._report_buffers.extend(
                torch.zeros(
                    self.max_num_reqs,
                    dtype=torch.int32,
                    pin_memory=self.device.type == "cuda",
                )
                for _ in range(_NUM_REPORT_BUFFERS)
            )

    def capture_model(self, *, profile_only: bool = False, **kwargs: Any) -> int:
        """Capture the graphs, price the steps and switch capacity on."""
        # Upstream's memory profiling builds and drops a runner state first;
        # 0.32 does not know the argument.
        if profile_only:
            return super().capture_model(profile_only=True, **kwargs)
        self.capacity.costs.bind(
            ProfileHooks(
                graphs=self.cudagraph_manager,
                measure_sample_ms=lambda: measure_sample_ms(self),
                set_depth=self._set_dummy_depth,
                draft_num_reqs=self.speculator.captured_num_reqs,
                max_model_len=self.max_model_len,
                num_kv_tokens=self.kv_cache_config.num_blocks
                * min(self.block_tables.block_sizes, default=0),
            ),
            make_cache(self, self.cost_cache_directory),
        )
        # Upstream times batches for whoever stands here, while it captures.
        standing, self.adaptive_verification = self.adaptive_verification, self.capacity
        try:
            size = super().capture_model(**kwargs)
        finally:
            self.adaptive_verification = standing
        self.capacity.finish_start_up()
        if self.online_sts is not None:
            self.online_sts.warm_up()
            self._load_calibration()
        managers = (self.cudagraph_manager, self.speculator.query_cudagraph_manager)
        logger.info_once(
            "DSpark capacity start-up: %s",
            describe_capture(managers, self.capacity.costs.profile_s),
        )
        return size

    def _load_calibration(self) -> None:
        """Start where the last run of this configuration ended, if it was kept."""
        saved = self.capacity.costs.cached_sections.get(CALIBRATION_KEY)
        if saved is None:
            return
        try:
            self.online_sts.load_state_json(saved)
        except DSparkCapacityConfigError as error:
            logger.warning("Ignoring the calibration in dspark_sps_cache: %s", error)

    def shutdown(self) -> None:
        """Keep the calibration for the next start, then release what the base holds."""
        # Also called for a runner that failed before it was complete.
        sts, capacity = getattr(self, "online_sts", None), self.capacity
        if sts is not None and capacity is not None and any(sts.current().num_rows):
            capacity.costs.save_sections({CALIBRATION_KEY: sts.state_json()})
        super().shutdown()

    def _set_dummy_depth(self, depth: int) -> None:
        """Make dummy decodes verify ``depth`` drafts a request and draft as many."""
        bonus = self.model_state.num_new_sampled_tokens_per_step
        self.decode_query_len = depth + bonus
        self.speculator.dummy_depth = depth

    # -- per step ------------------------------------------------------------

    def execute_model(
        self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any
    ) -> Any:
        """Run the target; the manager is lent out only inside a trimming step."""
        if not kwargs.get("dummy_run"):
            self.adaptive_verification = None
            self._step_plan = FIXED
        return super().execute_model(scheduler_output, *args, **kwargs)

    def finish_requests(self, scheduler_output: "SchedulerOutput") -> None:
        """Forget requests that have ended or were preempted."""
        ended = scheduler_output.finished_req_ids
        ended = ended.union(scheduler_output.preempted_req_ids or ())
        if ended and self.capacity is not None:
            slot_of = self.req_states.req_id_to_index
            self.capacity.remove_requests([slot_of[i] for i in ended if i in slot_of])
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: "SchedulerOutput") -> None:
        """Register new requests and forget what their slots drafted before."""
        super().add_requests(scheduler_output)
        if self.capacity is not None:
            for request in scheduler_output.scheduled_new_reqs:
                slot = self.req_states.req_id_to_index[request.req_id]
                self.capacity.add_request(slot)
                if self.online_sts is not None:
                    self.online_sts.forget(slot)

    def gather_batch_req_state(
        self, scheduler_output: "SchedulerOutput", dummy_run: bool
    ) -> tuple[Any, int | None]:
        """Gather the batch, then plan the step and shrink the batch if it trims."""
        batch, uniform = super().gather_batch_req_state(scheduler_output, dummy_run)
        if dummy_run or batch is None or self.capacity is None:
            return batch, uniform
        plan = self._step_plan = self.capacity.plan_step(batch)
        compact = plan.trims and isinstance(self.capacity, VarlenCapacityManager)
        if self.rejection_sampler is not None:
            # The flag forbids chunked verification, which only a compacted batch
            # (whose row boundaries the host does not know) cannot use.
            self.rejection_sampler.enable_adaptive_verification = compact
        if not compact:
            return batch, uniform
        return batch._replace(num_tokens=plan.num_tokens), None

    def prepare_inputs(
        self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any
    ) -> Any:
        """Lay out the batch, compacted on the device when the step trims."""
        if not self._step_plan.trims or not isinstance(
            self.capacity, VarlenCapacityManager
        ):
            return super().prepare_inputs(scheduler_output, *args, **kwargs)
        self.adaptive_verification = self.capacity
        try:
            input_batch = super().prepare_inputs(scheduler_output, *args, **kwargs)
        finally:
            self.adaptive_verification = None
        self._start_report_copy()
        return input_batch

    def sample(self, hidden_states: Any, input_batch: Any, *args: Any) -> Any:
        """Verify; in mask mode, drafts beyond the capacity are rejected unjudged."""
        if isinstance(self.capacity, MaskCapacityManager) and self._step_plan.trims:
            self.rejection_sampler.capacity_invalid_drafts = (
                self.capacity.invalid_drafts(input_batch)
            )
            self._start_report_copy()
        output = super().sample(hidden_states, input_batch, *args)
        self._num_judged = output[1], output[2]
        if self.capacity is not None:
            self.capacity.note_judged(*self._num_judged)
        return output

    def sample_tokens(self, grammar_output: "GrammarOutput | None") -> Any:
        """Sample, draft, then publish the new confidences and attach the report."""
        state = self.execute_model_state
        output = super().sample_tokens(grammar_output)
        if state is None or self.capacity is None:
            return output
        plan, verified = self._step_plan, self._pending_verified
        self._pending_verified = None
        depth = state.num_spec_tokens_to_schedule
        if plan.active:
            self.capacity.finish_step(
                self.speculator.draft_token_confidence_probs, state.input_batch, depth
            )
        if self.online_sts is not None:
            self._calibrate(state.input_batch, depth, grammar_output)
        if depth < self.num_speculative_steps:
            # Upstream marks columns beyond the depth with -1. A request whose
            # placeholders outnumber them must still find valid token ids.
            self.req_states.draft_tokens.clamp_(min=0)
        if isinstance(output, AsyncModelRunnerOutput):
            table = self.capacity.depth_of_load
            unchanged, self._sent_depths = table is self._sent_depths, table
            return CapacityModelOutput(
                output, plan, None if unchanged else table, verified
            )
        return output

    def _calibrate(
        self,
        input_batch: "InputBatch",
        draft_depth: int,
        grammar_output: "GrammarOutput | None",
    ) -> None:
        judged, self._num_judged = self._num_judged, None
        plan = self._step_plan
        # A step that is not published drafts unobserved: what it makes is never graded.
        if not (plan.active and plan.publishes) or judged is None:
            self.online_sts.pause()
            return
        masked = plan.trims and isinstance(self.capacity, MaskCapacityManager)
        grammar_rows = None
        if grammar_output is not None:
            names = grammar_output.structured_output_request_ids
            grammar_rows = np.flatnonzero(np.isin(input_batch.req_ids, names))
        self.online_sts.observe(
            JudgedDrafts(
                input_batch.idx_mapping,
                *judged,
                capacities=self.capacity.capacities if masked else None,
            ),
            draft_depth,
            grammar_rows,
        )

    def _start_report_copy(self) -> None:
        # On the main stream: the copy is a kilobyte, and a side stream would cost
        # more host time than it hides. It needs no event: see CapacityModelOutput.
        buffer = self._report_buffers[0]
        self._report_buffers.rotate(-1)
        buffer.copy_(self.capacity.capacities, non_blocking=True)
        self._pending_verified = buffer
