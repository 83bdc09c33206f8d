# SPDX-License-Identifier: Apache-2.0
"""What the sweep does inside every worker process, through ``worker_extension_cls``.

vLLM imports this module in each rank before the model is built, so it is the place
for what must be in a captured graph; ``SETUP_VARIABLE`` says what that is. Nothing
else may import it first: it acts once, at import.
"""

import json
import os
import time
from typing import Any

from benchmarks.sweep.engine import SETUP_VARIABLE
from benchmarks.sweep.host_times import HostTimes
from benchmarks.sweep.step_gaps import decode_step_ms, prompt_step_ms
from benchmarks.sweep.teacher import Teacher


class StepProbe:
    """Times the steps of a runner and reads what capacity planned.

    Args:
        runner: The V2 model runner of this rank.
    """

    def __init__(self, runner: Any):
        self._runner = runner
        self._steps: list[tuple[float, int, int]] = []
        self._plans: list[tuple[bool, int | None, int | None]] = []
        execute_model = runner.execute_model
        capacity = getattr(runner, "capacity", None)
        self._host_times = None if capacity is None else HostTimes(runner)

        def timed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            scheduled = scheduler_output.num_scheduled_tokens
            self._steps.append(
                (time.perf_counter(), len(scheduled), sum(scheduled.values()))
            )
            if self._host_times is not None:
                self._host_times.begin_step()
            return execute_model(scheduler_output, *args, **kwargs)

        runner.execute_model = timed
        if capacity is None:
            return
        plan = capacity.planner.plan

        def record(batch: Any) -> Any:
            made = plan(batch)
            self._plans.append((made.active, made.draft_budget, made.next_depth))
            return made

        capacity.planner.plan = record

    def describe(self) -> dict[str, Any]:
        """Return the peak memory, the knee and the cost tables, where there are any."""
        import torch

        found: dict[str, Any] = {"peak_gib": None}
        if torch.cuda.is_available():
            found["peak_gib"] = torch.cuda.max_memory_reserved() / 2**30
        capacity = getattr(self._runner, "capacity", None)
        if capacity is not None:
            found["knee_reqs"] = capacity.costs.activation_num_reqs
            found["depth_of_load"] = capacity.depth_of_load
            if capacity.planner.config.mode == "curve":
                found["costs"] = capacity.costs.step_costs.to_json()
        return found

    def take(self) -> dict[str, Any]:
        """Return and forget what happened since the last call.

        ``step_ms`` maps the scheduled width to the median time between the starts
        of two steps of the largest batch at that width: with asynchronous
        scheduling, the time of a step once the device is the bottleneck.
        ``step_ms_p99`` has their 99th percentile, ``step_ms_max`` the longest.
        ``step_ms_prompts`` is the median of steps that hold prompts.
        """
        steps, self._steps = self._steps, []
        plans, self._plans = self._plans, []
        active = [p for p in plans if p[0]]
        trimmed = [p[1] for p in active if p[1] is not None]
        depths = [p[2] for p in active if p[2] is not None]
        return {
            "num_steps": len(steps),
            "num_active": len(active),
            "num_trimmed": len(trimmed),
            "mean_budget": _mean(trimmed),
            "mean_next_depth": _mean(depths),
            "step_ms": decode_step_ms(steps, 50),
            "step_ms_p99": decode_step_ms(steps, 99),
            "step_ms_max": decode_step_ms(steps, 100),
            "step_ms_prompts": prompt_step_ms(steps),
            "survival_prior": self._survival_prior(),
            "host_us": None if self._host_times is None else self._host_times.take(),
        }

    def _survival_prior(self) -> list[float] | None:
        """Return the mean survival by position that capacity has learned."""
        capacity = getattr(self._runner, "capacity", None)
        return None if capacity is None else capacity.mirror.prior.tolist()


class SweepWorkerExtension:
    """Methods that ``LLM.collective_rpc`` reaches in every rank."""

    model_runner: Any

    def sweep_start(self, setup: dict[str, Any]) -> dict[str, Any]:
        """Start the probe and describe the engine.

        Args:
            setup: What this rank must have applied before the model was built.

        Raises:
            RuntimeError: It was not, so the arm would not be what it says.
        """
        if setup != _APPLIED:
            raise RuntimeError(
                f"this rank applied {_APPLIED} instead of {setup}: {__name__} was "
                f"imported before {SETUP_VARIABLE} was set"
            )
        self._sweep_probe = StepProbe(self.model_runner)
        self._teacher = Teacher(self.model_runner) if setup.get("teacher") else None
        return self._sweep_probe.describe()

    def sweep_hold_depth(self, depth: int) -> None:
        """Draft at one enabled depth from the next step on, whatever the load.

        Args:
            depth: The depth; the scheduler learns it with the next report.
        """
        capacity = self.model_runner.capacity
        controller = capacity.planner._controller
        if controller is None:
            return
        controller.update = lambda wished_depth, num_reqs: depth
        capacity.depth_of_load = (depth,) * (capacity.costs.max_num_reqs + 1)

    def sweep_set_fault(self, fault: bool) -> None:
        """Give tokens to wrong requests from now on, or no more.

        Raises:
            RuntimeError: There is no teacher to find it out.
        """
        if self._teacher is not None:
            self._teacher.fault = fault
        elif fault:
            raise RuntimeError("a fault needs an engine with a teacher")

    def sweep_take(self) -> dict[str, Any]:
        """Return and forget the figures since the last call, and the logits kept."""
        taken = self._sweep_probe.take()
        return taken if self._teacher is None else taken | self._teacher.take()


def _mean(values: list[Any]) -> float | None:
    return sum(values) / len(values) if values else None


def _report_true_confidence(rates: list[float]) -> None:
    """Make the confidence head report the synthetic sampler's true rates."""
    import torch

    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    conditional = [r / p for r, p in zip(rates, (1.0, *rates), strict=False)]
    table: dict[str, Any] = {}
    original = DSparkSpeculator._sample_sequential

    def sample_sequential(self: Any, num_reqs: int, head_hidden: Any) -> None:
        # The number of positions of this pass: less than K at a lower depth.
        table["depth"] = self.num_speculative_steps
        # Of the model at hand, whatever its family.
        self.model.compute_confidence = compute_confidence
        original(self, num_reqs, head_hidden)

    def compute_confidence(head_hidden: Any, markov_embed: Any) -> Any:
        if "probs" not in table:
            table["probs"] = torch.tensor(conditional, device=head_hidden.device)
        depth = table["depth"]
        return table["probs"][:depth].repeat(head_hidden.shape[0] // depth)

    DSparkSpeculator._sample_sequential = sample_sequential


_APPLIED = json.loads(os.environ.get(SETUP_VARIABLE, "{}"))
if _APPLIED.get("stand_ins"):
    from benchmarks.sweep.deepseek_v4_stand_ins import install as install_stand_ins

    install_stand_ins()
if "rates" in _APPLIED:
    _report_true_confidence(_APPLIED["rates"])
if "world" in _APPLIED:
    from benchmarks.acceptance.world import World
    from benchmarks.sweep.coupled import install

    install(World.from_json(_APPLIED["world"]))
if _APPLIED.get("teacher"):
    from benchmarks.sweep.teacher import install as install_teacher

    install_teacher()
