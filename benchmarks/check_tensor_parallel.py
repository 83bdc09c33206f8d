# SPDX-License-Identifier: Apache-2.0
"""Do tensor-parallel ranks take the same decisions under churn, and never hang?

    python benchmarks/check_tensor_parallel.py --tensor-parallel-size 2 --num-steps 5000

Three engines in turn, with VLLM_DSPARK_TP_CHECK=1 where ranks are compared:
  * ``drift``: the confidences of every rank but 0 are changed in each step (by an
    ulp, to their complement, to NaN). The broadcast undoes it: no mismatch.
  * ``lost-broadcast``: the same without the broadcast. The check must stop it.
  * ``orders``: no fault, no check: loads of 1, 64, 1 from a fresh engine, a drain of
    64 requests of very different lengths, 4 -> 64 -> 4, and a timeline of the
    broadcasts. A phase that does not end in time is a hang.
The load of the first two changes all the time, with aborts. A given steep curve makes
budgets and depths change from step to step. Exits 1 on any finding.
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.arguments import (  # noqa: E402
    integer,
    number,
    output_file,
    positive_int,
    seed_number,
)
from benchmarks.common import ROOT, Record, append_records, new_records  # noqa: E402
from benchmarks.sweep.stepped import SteppedEngine  # noqa: E402
from benchmarks.sweep.traffic import Request  # noqa: E402

BUNDLED = ROOT / "tests" / "fixtures" / "tiny-dspark"
SCENARIOS = ("drift", "lost-broadcast", "orders")
# Loads between which the churn moves, requests.
CHURN_LOADS = (1, 2, 8, 24, 64)
ABORT_PROBABILITY = 0.02
PROMPT_LEN = 8
BENCH = "check_tensor_parallel"
WORKER_EXTENSION = "benchmarks.sweep.rank_faults.RankFaultExtension"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tensor-parallel-size", type=integer(2), default=2)
    add("--num-steps", type=positive_int, default=5000)
    add("--scenarios", default=",".join(SCENARIOS))
    add("--target", default=str(BUNDLED / "target"))
    add("--draft", default=str(BUNDLED / "draft"))
    add("--num-speculative-tokens", type=positive_int, default=7)
    add("--dtype", default="float16")
    add("--max-num-seqs", type=integer(max(CHURN_LOADS)), default=64)
    add("--max-output-len", type=integer(8), default=256)
    add("--kv-cache-gib", type=number(0, open_low=True), default=2.0)
    add("--gpu-memory-utilization", type=number(0, 1, open_low=True), default=0.1)
    add("--phase-limit-s", type=number(1), default=120.0, help="longer is a hang")
    add("--seed", type=seed_number, default=0)
    add("-o", "--out", type=output_file, default="out/tensor_parallel.jsonl")
    args = parser.parse_args(argv)
    args.scenarios = args.scenarios.split(",")
    for name in args.scenarios:
        if name not in SCENARIOS:
            parser.error(f"--scenarios has {name!r}; allowed: {', '.join(SCENARIOS)}")
    return args


class Driver:
    """Feeds an engine request by request and counts its steps.

    Args:
        engine: The engine.
        seed: Of lengths, prompts and aborts.
        max_output_len: Longest output, tokens.
    """

    def __init__(self, engine: SteppedEngine, seed: int, max_output_len: int):
        self.engine = engine
        self.random = random.Random(seed)
        self.max_output_len = max_output_len
        self.num_steps = self.num_aborted = self.num_tokens = self._next_number = 0
        self.running: set[int] = set()

    def add(self, output_len: int | None = None) -> None:
        """Start one request; without a length, of a random one."""
        length = output_len or self.random.randint(4, self.max_output_len)
        seed = self.random.randrange(1 << 31)
        self.engine.submit(Request(self._next_number, PROMPT_LEN, length, seed))
        self.running.add(self._next_number)
        self._next_number += 1

    def abort_one(self) -> None:
        """Drop a running request."""
        victim = self.random.choice(sorted(self.running))
        self.engine.abort(victim)
        self.running.remove(victim)
        self.num_aborted += 1

    def step(self) -> None:
        """Run one engine step."""
        self.num_steps += 1
        for number_, new_tokens, finished in self.engine.step():
            self.num_tokens += new_tokens
            if finished:
                self.running.discard(number_)

    def hold(self, load: int, steps: int) -> float:
        """Keep ``load`` requests running for some steps; return tokens/s."""
        start, tokens = time.perf_counter(), self.num_tokens
        for _ in range(steps):
            while len(self.running) < load:
                self.add()
            self.step()
        return (self.num_tokens - tokens) / (time.perf_counter() - start)

    def drain(self) -> None:
        """Run until every request is done."""
        while self.running:
            self.step()

    def churn(self, num_steps: int) -> None:
        """Change the load all the time and abort requests in between."""
        while self.num_steps < num_steps:
            load = self.random.choice(CHURN_LOADS)
            for _ in range(self.random.randint(5, 60)):
                while len(self.running) < load:
                    self.add()
                if self.running and self.random.random() < ABORT_PROBABILITY:
                    self.abort_one()
                self.step()
                if len(self.running) > load and self.random.random() < 0.2:
                    self.drain()
        self.drain()


def run_scenario(args: argparse.Namespace, name: str, pipe: Connection) -> None:
    """Build one engine and send ``(phase, figures)``, then ``("end", None)``."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_DSPARK_TP_CHECK"] = "0" if name == "orders" else "1"
    os.environ["VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE"] = "2"
    try:
        llm = _build(args)
        pipe.send(("start", {}))
        phases = _orders if name == "orders" else _churn
        with SteppedEngine(llm) as engine:
            driver = Driver(engine, args.seed, args.max_output_len)
            for phase, figures in phases(args, name, llm, driver):
                pipe.send((phase, figures))
        pipe.send(("end", None))
        llm.llm_engine.engine_core.shutdown()
    except Exception:
        pipe.send(("error", traceback.format_exc()))


def _build(args: argparse.Namespace) -> Any:
    from vllm import LLM

    depth = args.num_speculative_tokens
    return LLM(
        model=args.target,
        speculative_config={
            "method": "dspark",
            "model": args.draft,
            "num_speculative_tokens": depth,
            # Drops at every load of the churn, so that budgets and depths vary.
            "dspark_sps_curve": [[8, 100.0], [24, 80.0], [64, 50.0], [512, 9.0]],
            "dspark_draft_depths": sorted({max(depth // 2, 1), depth}),
        },
        tensor_parallel_size=args.tensor_parallel_size,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_output_len + 64,
        dtype=args.dtype,
        kv_cache_memory_bytes=int(args.kv_cache_gib * 2**30),
        gpu_memory_utilization=args.gpu_memory_utilization,
        seed=args.seed,
        disable_log_stats=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        worker_extension_cls=WORKER_EXTENSION,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    )


def _churn(
    args: argparse.Namespace, name: str, llm: Any, driver: Driver
) -> Iterator[tuple[str, dict[str, Any]]]:
    llm.collective_rpc("fault_inject", args=(True, name == "lost-broadcast"))
    driver.churn(args.num_steps)
    yield (
        "churn",
        {
            "num_steps": driver.num_steps,
            "num_tokens": driver.num_tokens,
            "num_aborted": driver.num_aborted,
            "by_rank": llm.collective_rpc("fault_counts"),
        },
    )


def _orders(
    args: argparse.Namespace, name: str, llm: Any, driver: Driver
) -> Iterator[tuple[str, dict[str, Any]]]:
    for i, load in enumerate((1, 64, 1)):
        rates = [driver.hold(load, 50) for _ in range(3)]
        driver.drain()
        yield f"load {load}, place {i + 1}", {"tok_s": rates}
    for i in range(64):
        driver.add(4 + i * (args.max_output_len - 4) // 63)
    driver.drain()
    yield "drain of 64", {"num_steps": driver.num_steps}
    rates = {f"{i}: {load}": driver.hold(load, 100) for i, load in enumerate((4, 64))}
    rates["2: 4"] = driver.hold(4, 100)
    driver.drain()
    yield "4 to 64 to 4", {"tok_s": rates}
    driver.hold(64, 20)
    llm.collective_rpc("timeline_start")
    driver.hold(64, 50)
    timelines = llm.collective_rpc("timeline_stop")
    driver.drain()
    yield (
        "timeline of load 64",
        {
            "num_steps": 50,
            "broadcasts_by_rank": [
                {
                    event: {"count": len(us), "median_us": statistics.median(us)}
                    for event, us in by_event.items()
                }
                for by_event in timelines
            ],
        },
    )


def judge(name: str, phases: dict[str, Any], args: argparse.Namespace) -> str | None:
    """Return what is wrong with a scenario's outcome, or None.

    Args:
        name: The scenario.
        phases: Figures by phase; the key "error" holds a traceback.
        args: The command line.
    """
    error = phases.get("error")
    if "hang" in phases:
        return f"no answer within {args.phase_limit_s:.0f} s"
    if name == "lost-broadcast":
        if error is None:
            return "the check did not notice the lost broadcast"
        if "TensorParallelMismatchError" not in error and "disagree" not in error:
            return "it failed, but not by the check"
        return None
    if error is not None:
        return "it failed"
    if name == "drift":
        ranks = phases["churn"]["by_rank"]
        if not ranks[0]["num_active"]:
            return "no step was active"
        if any(r["num_drifted"] != ranks[0]["num_active"] for r in ranks[1:]):
            return "the other ranks did not drift in every active step"
    return None


def collect(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Run one scenario in a process of its own and return its figures by phase."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=run_scenario, args=(args, name, child))
    process.start()
    child.close()
    phases: dict[str, Any] = {}
    limit = 420.0
    try:
        while pipe.poll(limit):
            phase, figures = pipe.recv()
            if phase == "end":
                return phases
            phases[phase], limit = figures, args.phase_limit_s
            print(f"{name}: {phase} {json.dumps(figures)[-2000:]}", flush=True)
            if phase == "error":
                return phases
        phases["hang"] = True
    except EOFError:
        phases["error"] = "the engine's process died"
    finally:
        process.join(20)
        process.kill()
    return phases


def main(argv: list[str] | None = None) -> int:
    """Run the scenarios; return 1 if any of them went wrong."""
    args = parse_args(argv)
    num_wrong = 0
    with new_records(args.out) as out:
        for name in args.scenarios:
            phases = collect(args, name)
            wrong = judge(name, phases, args)
            num_wrong += wrong is not None
            print(f"{name}: {wrong or 'as it should be'}", flush=True)
            case = {"scenario": name, "wrong": wrong, "phases": phases}
            found = [float(bool(wrong))]
            append_records(out, [Record(BENCH, case, name, "findings", "1", found)])
    return 1 if num_wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
