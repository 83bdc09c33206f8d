# SPDX-License-Identifier: Apache-2.0
"""The process of one arm: builds its engine, then serves loads on request."""

import json
import os
import random
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.acceptance.world import World
from benchmarks.simulator.engine import request_seed

# What the ranks apply, JSON: {"rates": unconditional acceptance by position} or
# {"world": World.to_json()} or {}.
SETUP_VARIABLE = "DSPARK_SWEEP_WORKER"
# By name only: importing it in this process would leave nothing to the ranks.
WORKER_EXTENSION = "benchmarks.sweep.worker.SweepWorkerExtension"


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
        world: Of coupled acceptance; then ``rates`` is not read.
        llm: Keyword arguments of ``LLM``.
        environ: Environment variables of the process.
    """

    arm: str
    target: str
    draft: str
    full_depth: int
    rates: tuple[float, ...] | None = None
    world: World | None = None
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
        held_depth: Depth to hold in a ``depths`` arm.
    """

    concurrency: int
    prompt_len: int
    output_len: int
    seed: int
    prompts: tuple[str, ...] | None = None
    return_tokens: bool = False
    held_depth: int | None = None


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
    config = arm.speculative_config(setup.draft, setup.full_depth)
    worker: dict[str, Any] = {}
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
    os.environ[SETUP_VARIABLE] = json.dumps(worker)

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


def _random_prompts(load: Load) -> list[dict[str, list[int]]]:
    draw = random.Random(load.seed)
    # Ids that every vocabulary has.
    return [
        {"prompt_token_ids": [draw.randrange(3, 700) for _ in range(load.prompt_len)]}
        for _ in range(load.concurrency)
    ]


def _serve(llm: Any, load: Load) -> dict[str, Any]:
    import torch

    from vllm import SamplingParams

    if load.held_depth is not None:
        llm.collective_rpc("sweep_hold_depth", args=(load.held_depth,))
    # Synthetic acceptance draws by seed and position: the same for every arm.
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=load.output_len,
            ignore_eos=load.prompts is None,
            detokenize=False,
            seed=request_seed(load.seed, number),
        )
        for number in range(load.concurrency)
    ]
    prompts = load.prompts or _random_prompts(load)
    llm.collective_rpc("sweep_take")
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
        **llm.collective_rpc("sweep_take")[0],
    }
