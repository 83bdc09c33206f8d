# SPDX-License-Identifier: Apache-2.0
"""The process of one arm: builds its engine, then serves loads on request."""

import itertools
import os
import random
import statistics
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class EngineSetup:
    """Everything an arm's process needs, picklable.

    Attributes:
        arm: Arm name, see ``arms.Arm``.
        target: Target checkpoint.
        draft: Draft checkpoint.
        full_depth: K of arms that hold a lower depth.
        rates: Unconditional acceptance by position for synthetic acceptance; None
            verifies real drafts.
        llm: Keyword arguments of ``LLM``.
        environ: Environment variables of the process.
    """

    arm: str
    target: str
    draft: str
    full_depth: int
    rates: tuple[float, ...] | None = None
    llm: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """One closed-loop load: ``concurrency`` requests at once until all are done.

    Attributes:
        concurrency: Requests.
        prompt_len: Prompt tokens.
        output_len: Output tokens.
        seed: Of the prompts.
        prompts: Texts instead of random prompts, ``concurrency`` of them.
        return_tokens: Send the output token ids back.
    """

    concurrency: int
    prompt_len: int
    output_len: int
    seed: int
    prompts: tuple[str, ...] | None = None
    return_tokens: bool = False


def run(setup: EngineSetup, pipe: Connection) -> None:
    """Build the engine, report it, then answer ``Load``s until None arrives.

    Messages sent: ``("ready", {...})``, ``("done", {...})`` or ``("error", text)``.
    """
    os.environ.update(setup.environ)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        start = time.perf_counter()
        llm, probe = _build(setup)
        pipe.send(("ready", {"start_s": time.perf_counter() - start, **probe.setup()}))
        while (load := pipe.recv()) is not None:
            pipe.send(("done", _serve(llm, load, probe)))
    except Exception:
        pipe.send(("error", traceback.format_exc()))


class _Probe:
    """Times the steps of the in-process runner and reads what capacity planned."""

    def __init__(self, llm: Any):
        engine = llm.llm_engine.engine_core.engine_core
        self._runner = engine.model_executor.driver_worker.worker.model_runner
        self._steps: list[tuple[float, int, int]] = []
        self._plans: list[tuple[bool, int | None, int | None]] = []
        execute_model = self._runner.execute_model

        def timed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            scheduled = scheduler_output.num_scheduled_tokens
            self._steps.append(
                (time.perf_counter(), len(scheduled), sum(scheduled.values()))
            )
            return execute_model(scheduler_output, *args, **kwargs)

        self._runner.execute_model = timed
        capacity = getattr(self._runner, "capacity", None)
        if capacity is None:
            return
        plan = capacity.planner.plan

        def record(batch: Any) -> Any:
            made = plan(batch)
            self._plans.append((made.active, made.draft_budget, made.next_depth))
            return made

        capacity.planner.plan = record

    def setup(self) -> dict[str, Any]:
        """Return the knee and the cost tables, where the arm has them."""
        import torch

        found: dict[str, Any] = {"peak_gib": None}
        if torch.cuda.is_available():
            found["peak_gib"] = torch.cuda.max_memory_reserved() / 2**30
        capacity = getattr(self._runner, "capacity", None)
        if capacity is not None:
            found["knee_reqs"] = capacity.costs.activation_num_reqs
            found["depth_of_load"] = capacity.depth_of_load
            found["costs"] = capacity.costs.step_costs.to_json()
        return found

    def take(self) -> dict[str, Any]:
        """Return and forget what happened since the last call.

        ``step_ms`` maps the scheduled width to the median time between the starts
        of two steps of the largest batch at that width: with asynchronous
        scheduling, the time of a step once the device is the bottleneck.
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
            "step_ms": _step_ms(steps),
        }


def _mean(values: list[Any]) -> float | None:
    return sum(values) / len(values) if values else None


def _step_ms(steps: list[tuple[float, int, int]]) -> dict[str, float]:
    largest = max((n for _, n, _ in steps), default=0)
    gaps: dict[str, list[float]] = {}
    for (start, num_reqs, num_tokens), (end, *_) in itertools.pairwise(steps):
        if num_reqs == largest and num_tokens <= 16 * num_reqs:
            width = f"{num_tokens / num_reqs:.2f}"
            gaps.setdefault(width, []).append(1e3 * (end - start))
    return {w: statistics.median(g) for w, g in gaps.items() if len(g) > 2}


def _build(setup: EngineSetup) -> tuple[Any, _Probe]:
    from benchmarks.sweep.arms import Arm
    from vllm import LLM

    arm = Arm.parse(setup.arm)
    config = arm.speculative_config(setup.draft, setup.full_depth)
    if config is not None and setup.rates is not None:
        rates = setup.rates[: config["num_speculative_tokens"]]
        config["rejection_sample_method"] = "synthetic"
        config["synthetic_acceptance_rates"] = list(rates)
        _report_true_confidence(rates)
    llm = LLM(
        model=setup.target,
        speculative_config=config,
        disable_log_stats=True,
        **setup.llm,
    )
    if arm.kind == "pinned":
        _pin_depth(llm, arm.depth)
    return llm, _Probe(llm)


def _report_true_confidence(rates: tuple[float, ...]) -> None:
    """Make the confidence head report the synthetic sampler's true rates."""
    import torch

    from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    conditional = [r / p for r, p in zip(rates, (1.0, *rates), strict=False)]
    table: dict[str, Any] = {}
    original = DSparkSpeculator._sample_sequential

    def sample_sequential(self: Any, num_reqs: int, head_hidden: Any) -> None:
        # The number of positions of this pass: less than K at a lower depth.
        table["depth"] = self.num_speculative_steps
        original(self, num_reqs, head_hidden)

    def compute_confidence(self: Any, head_hidden: Any, markov_embed: Any) -> Any:
        if "probs" not in table:
            table["probs"] = torch.tensor(conditional, device=head_hidden.device)
        depth = table["depth"]
        return table["probs"][:depth].repeat(head_hidden.shape[0] // depth)

    DSparkSpeculator._sample_sequential = sample_sequential
    Qwen3DSparkForCausalLM.compute_confidence = compute_confidence


def _pin_depth(llm: Any, depth: int) -> None:
    """Hold one depth and verify everything, whatever the load."""
    engine = llm.llm_engine.engine_core.engine_core
    runner = engine.model_executor.driver_worker.worker.model_runner
    controller = runner.capacity.planner._controller
    if controller is not None:
        controller.update = lambda wished_depth, num_reqs: depth


def _random_prompts(load: Load) -> list[dict[str, list[int]]]:
    draw = random.Random(load.seed)
    # Ids that every vocabulary has.
    return [
        {"prompt_token_ids": [draw.randrange(3, 700) for _ in range(load.prompt_len)]}
        for _ in range(load.concurrency)
    ]


def _serve(llm: Any, load: Load, probe: _Probe) -> dict[str, Any]:
    import torch

    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=load.output_len,
        ignore_eos=load.prompts is None,
        detokenize=False,
    )
    prompts = load.prompts or _random_prompts(load)
    probe.take()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    return {
        **({"tokens": tokens} if load.return_tokens else {}),
        "tok_s": num_tokens / seconds,
        "num_tokens": num_tokens,
        "seconds": seconds,
        **probe.take(),
    }
