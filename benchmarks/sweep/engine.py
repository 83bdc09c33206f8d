# SPDX-License-Identifier: Apache-2.0
"""The process of one arm: builds its engine, then serves loads on request."""

import json
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.acceptance.world import World
from benchmarks.sweep.driver import Driver
from benchmarks.sweep.figures import figures_of
from benchmarks.sweep.stepped import (
    MemoryLog,
    SteppedEngine,
    prompt_of,
    sampling_params,
)
from benchmarks.sweep.traffic import LengthRange, Traffic, make_request

# What the ranks apply, JSON: {"rates": unconditional acceptance by position} or
# {"world": World.to_json()} or neither, and "stand_ins" and "teacher", true, where
# asked for.
SETUP_VARIABLE = "DSPARK_SWEEP_WORKER"
# By name only: importing it in this process would leave nothing to the ranks.
WORKER_EXTENSION = "benchmarks.sweep.worker.SweepWorkerExtension"


@dataclass(frozen=True)
class EngineSetup:
    """Everything an arm's process needs, picklable.

    Attributes:
        arm: Arm name, see ``arms.Arm``.
        target: Target checkpoint.
        draft: Draft checkpoint; None for one that is part of the target's.
        full_depth: K of arms that hold a lower depth.
        rates: Unconditional acceptance by position for synthetic acceptance; None
            verifies real drafts.
        world: Of coupled acceptance; then ``rates`` is not read.
        llm: Keyword arguments of ``LLM``.
        environ: Environment variables of the process.
        method: Of speculation, ``dspark`` or ``dflash``.
        stand_ins: Whether DeepSeek-V4 runs without its optional packages.
        teacher: Whether every request follows a given text, see ``teacher.py``.
    """

    arm: str
    target: str
    draft: str | None
    full_depth: int
    rates: tuple[float, ...] | None = None
    world: World | None = None
    llm: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    method: str = "dspark"
    stand_ins: bool = False
    teacher: bool = False


@dataclass(frozen=True)
class Load:
    """One load: ``concurrency`` requests at once until all are done, or a traffic.

    Attributes:
        concurrency: Requests.
        prompt: Prompt lengths.
        output: Output lengths.
        seed: Of prompts, lengths and draws.
        prompts: Texts instead of random prompts, ``concurrency`` of them.
        return_tokens: Send the output token ids back.
        held_depth: Depth to hold in a ``depths`` arm.
        traffic: Who sends what and when, instead of all at once.
        fault: Give tokens to wrong requests, in an engine with a teacher.
    """

    concurrency: int
    prompt: LengthRange
    output: LengthRange
    seed: int
    prompts: tuple[str, ...] | None = None
    return_tokens: bool = False
    held_depth: int | None = None
    traffic: Traffic | None = None
    fault: bool = False


def run(setup: EngineSetup, pipe: Connection) -> None:
    """Build the engine, report it, then answer ``Load``s until None arrives.

    Messages sent: ``("ready", {...})``, ``("done", {...})`` or ``("error", text)``.
    """
    os.environ.update(setup.environ)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        start = time.perf_counter()
        llm, described = _build(setup)
        pipe.send(("ready", {"start_s": time.perf_counter() - start, **described}))
        while (load := pipe.recv()) is not None:
            pipe.send(("done", _serve(llm, load)))
        llm.llm_engine.engine_core.shutdown()
    except Exception:
        pipe.send(("error", traceback.format_exc()))


def _build(setup: EngineSetup) -> tuple[Any, dict[str, Any]]:
    """Start the engine; return it and rank 0's description of it."""
    from benchmarks.sweep.arms import Arm

    arm = Arm.parse(setup.arm)
    config = arm.speculative_config(setup.draft, setup.full_depth, setup.method)
    worker: dict[str, Any] = {"stand_ins": True} if setup.stand_ins else {}
    if config is not None and setup.world is not None:
        num_tokens = config["num_speculative_tokens"]
        config["rejection_sample_method"] = "synthetic"
        config["synthetic_acceptance_rates"] = [1.0] * num_tokens
        worker["world"] = setup.world.up_to(num_tokens).to_json()
    elif config is not None and setup.rates is not None:
        rates = setup.rates[: config["num_speculative_tokens"]]
        config["rejection_sample_method"] = "synthetic"
        config["synthetic_acceptance_rates"] = list(rates)
        worker["rates"] = list(rates)
    if setup.teacher:
        worker["teacher"] = True
    os.environ[SETUP_VARIABLE] = json.dumps(worker)
    if setup.stand_ins:
        # Here too: reading the model's config imports the model.
        from benchmarks.sweep.deepseek_v4_stand_ins import install

        install()
    from vllm import LLM

    llm = LLM(
        model=setup.target,
        speculative_config=config,
        disable_log_stats=True,
        worker_extension_cls=WORKER_EXTENSION,
        **setup.llm,
    )
    if arm.kind == "pinned":
        llm.collective_rpc("sweep_hold_depth", args=(arm.depth,))
    return llm, llm.collective_rpc("sweep_start", args=(worker,))[0]


def _serve(llm: Any, load: Load) -> dict[str, Any]:
    import torch

    if load.held_depth is not None:
        llm.collective_rpc("sweep_hold_depth", args=(load.held_depth,))
    llm.collective_rpc("sweep_set_fault", args=(load.fault,))
    llm.collective_rpc("sweep_take")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    serve = _serve_all if load.traffic is None else _serve_traffic
    return {**serve(llm, load), **llm.collective_rpc("sweep_take")[0]}


def _serve_all(llm: Any, load: Load) -> dict[str, Any]:
    requests = [
        make_request(number, load.prompt, load.output, load.seed)
        for number in range(load.concurrency)
    ]
    params = [sampling_params(r, ignore_eos=load.prompts is None) for r in requests]
    prompts = load.prompts or [prompt_of(r) for r in requests]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    return {
        **({"tokens": tokens} if load.return_tokens else {}),
        "figures": {"throughput": (num_tokens / seconds, "tok/s")},
        "num_tokens": num_tokens,
        "seconds": seconds,
    }


def _serve_traffic(llm: Any, load: Load) -> dict[str, Any]:
    assert load.traffic is not None
    memory = MemoryLog()
    with SteppedEngine(llm) as engine:
        timeline = Driver(
            engine, load.traffic, load.prompt, load.output, load.seed, on_step=memory
        ).run()
    return {
        "figures": figures_of(timeline, load.traffic, memory.samples),
        "num_tokens": sum(n for _, n, _ in timeline.steps),
        "seconds": timeline.end_s,
    }
