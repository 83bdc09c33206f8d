# SPDX-License-Identifier: Apache-2.0
"""Throughput by concurrency for several configurations of one model.

    python benchmarks/sweep_concurrency.py --arms fixed3,fixed7,upstream7,capacity7 \\
        --concurrency 8,64,256 --out sweep.jsonl
    ... --steady --seconds 20          keeps each concurrency in flight
    ... --arrival-rate 5,20            open loop, with latency
    ... --step-change 4,256,4          recovery after a change of load
    ... --churn 256 --seconds 600      random load, bursts, aborts; memory growth

--concurrency (with or without --steady), --arrival-rate, --step-change and --churn
combine: they follow each other on the same engines.

Every arm is an engine in a process of its own; all live on the GPU at once, and the
loads alternate between them, so that drift of the machine hits all arms alike. Arms
that profile their costs start last, when the others are idle. The first repetition
is a record of its own: it shows stalls.

Requests carry seeds, and synthetic acceptance draws by seed and token position, so
all arms see the same draws. ``--acceptance coupled`` gives each request and position
its own probability, which the sampler accepts with and the confidence head reports.
"""

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.progress import Progress  # noqa: E402

from benchmarks.acceptance.world import (  # noqa: E402
    DEFAULT_PROFILE,
    World,
    check_profile,
)
from benchmarks.arguments import (  # noqa: E402
    list_of,
    natural,
    number,
    output_file,
    positive_int,
    seed_number,
)
from benchmarks.common import (  # noqa: E402
    Record,
    append_records,
    new_records,
    print_table,
)
from benchmarks.sweep import checkpoints  # noqa: E402
from benchmarks.sweep.arms import Arm  # noqa: E402
from benchmarks.sweep.engine import EngineSetup, Load, run  # noqa: E402
from benchmarks.sweep.options import add_traffic_arguments, loads_of  # noqa: E402
from benchmarks.sweep.traffic import LengthRange  # noqa: E402

BENCH = "sweep_concurrency"

# Seconds for one engine to start, kernels compiled from cold.
START_LIMIT_S = 900


def add_engine_arguments(parser: argparse.ArgumentParser, *, arms: str) -> None:
    """Add the options that say which engines to start.

    Args:
        parser: Parser to extend.
        arms: Default of ``--arms``.
    """
    add = parser.add_argument
    add("--arms", type=list_of(str), default=arms.split(","))
    add("--preset", choices=sorted(checkpoints.PRESETS), default="tiny-dims")
    layers = "target layers of a preset; 0 for its own"
    add("--num-layers", type=natural, default=0, help=layers)
    add("--target", help="target checkpoint instead of a preset")
    add("--draft", help="draft checkpoint instead of a preset")
    add("--method", choices=("dspark", "dflash"), default="dspark")
    add(
        "--acceptance",
        choices=("rates", "coupled", "real"),
        default="rates",
        help="rates: vLLM's synthetic acceptance, the head reports the mean; coupled: "
        "a probability per request and position, which the head reports",
    )
    rate = number(0, 1, open_low=True)
    add("--rates", type=list_of(rate), default=list(DEFAULT_PROFILE))
    spread = "logits, of coupled acceptance"
    add("--spread-request", type=number(0, 3), default=1.0, help=spread)
    add("--spread-position", type=number(0, 3), default=1.0, help=spread)
    add("--confidence-scale", type=number(0, open_low=True), default=1.0)
    add("--confidence-shift", type=number(-40, 40), default=0.0, help="logits")
    add("--full-depth", type=positive_int, default=7, help="K of pinnedD arms")
    add("--max-model-len", type=positive_int, default=2048)
    add("--tensor-parallel-size", type=positive_int, default=1)
    add("--dtype", help="model dtype instead of the checkpoint's")
    add("--max-num-seqs", type=positive_int, default=256)
    add("--max-num-batched-tokens", type=positive_int, default=8192)
    add("--max-cudagraph-capture-size", type=positive_int, default=1024)
    add(
        "--cudagraph-capture-sizes",
        type=list_of(positive_int),
        help="token counts to capture instead of vLLM's own",
    )
    add("--gpu-memory-utilization", type=number(0, 1, open_low=True))
    add(
        "--kv-cache-gib",
        type=number(0, open_low=True),
        help="KV cache of each arm, instead of sizing it",
    )
    add("--seed", type=seed_number, default=0)
    parser.set_defaults(teacher=False)


def check_engine_arguments(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    *,
    depths_by_load: bool = False,
) -> None:
    """Exit with a message unless the engine options fit together.

    Args:
        parser: Reports the errors.
        args: What it parsed; gets ``parsed_arms``.
        depths_by_load: Whether each load says which depth a ``depthsK`` arm holds.
    """
    try:
        args.parsed_arms = [Arm.parse(name) for name in args.arms]
    except ValueError as e:
        parser.error(str(e))
    held_by_load = [a.name for a in args.parsed_arms if a.kind == "depths"]
    if held_by_load and not depths_by_load:
        parser.error(f"{held_by_load[0]}: only check_lossless.py has depthsK arms")
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together")
    if args.method == "dflash" and (args.target is None or args.acceptance != "real"):
        parser.error(
            "--method dflash needs --target, --draft and --acceptance real: presets "
            "have DSpark drafts, and only those report confidences"
        )
    if args.acceptance == "real" and args.target is None and not depths_by_load:
        parser.error("--acceptance real needs --target and --draft: presets have none")
    deepest = max(
        arm.num_speculative_tokens(args.full_depth) for arm in args.parsed_arms
    )
    if args.target is not None and args.num_layers:
        parser.error("--num-layers is for presets; --target has its own")
    try:
        checkpoints.check_num_layers(args.preset, args.num_layers)
    except ValueError as e:
        parser.error(f"--num-layers: {e}")
    if args.acceptance == "real":
        return
    if len(args.rates) < deepest:
        parser.error(f"--rates has {len(args.rates)} entries, the arms need {deepest}")
    try:
        check_profile(args.rates)
    except ValueError as e:
        parser.error(f"--rates: {e}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser, arms="none,fixed3,capacity7")
    add_traffic_arguments(parser)
    add = parser.add_argument
    add("--repetitions", type=positive_int, default=3, help="the first is apart")
    add("-o", "--out", type=output_file, default="out/sweep.jsonl")
    args = parser.parse_args(argv)
    check_engine_arguments(parser, args)
    try:
        args.levels = loads_of(args)
    except ValueError as e:
        parser.error(str(e))
    most = max(concurrency for _, concurrency, _ in args.levels)
    if most > args.max_num_seqs:
        parser.error(f"{most} requests at once exceed --max-num-seqs")
    longest = args.prompt_len.high + args.output_len.high
    if longest > args.max_model_len:
        parser.error(
            f"--prompt-len and --output-len reach {longest} tokens, --max-model-len "
            f"is {args.max_model_len}"
        )
    return args


def _llm_arguments(args: argparse.Namespace) -> dict[str, Any]:
    share = args.gpu_memory_utilization or min(0.8, 0.94 / len(args.arms))
    llm: dict[str, Any] = {
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "gpu_memory_utilization": share,
        "seed": args.seed,
        "tensor_parallel_size": args.tensor_parallel_size,
        "enable_prefix_caching": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "max_cudagraph_capture_size": args.max_cudagraph_capture_size,
        },
    }
    if args.cudagraph_capture_sizes:
        sizes = sorted(args.cudagraph_capture_sizes)
        llm["compilation_config"]["cudagraph_capture_sizes"] = sizes
        llm["compilation_config"]["max_cudagraph_capture_size"] = sizes[-1]
    if args.kv_cache_gib:
        # Sizing by what is free does not work while other arms allocate.
        llm["kv_cache_memory_bytes"] = int(args.kv_cache_gib * 2**30)
    if args.dtype:
        llm["dtype"] = args.dtype
    if args.target is None:
        llm |= {"load_format": "dummy", "skip_tokenizer_init": True}
        llm |= checkpoints.LLM_ARGUMENTS.get(args.preset, {})
    return llm


def _world(args: argparse.Namespace) -> World:
    return World.with_profile(
        args.rates,
        spread_request=args.spread_request,
        spread_position=args.spread_position,
        confidence_scale=args.confidence_scale,
        confidence_shift=args.confidence_shift,
    )


class ArmProcess:
    """An arm's engine in its own process."""

    def __init__(self, setup: EngineSetup):
        context = multiprocessing.get_context("spawn")
        self.name = setup.arm
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=run, args=(setup, child))
        self._process.start()
        child.close()

    def receive(self, limit_s: float) -> dict[str, Any]:
        """Wait for the next message.

        Raises:
            RuntimeError: The process failed, died or did not answer in time.
        """
        deadline = time.monotonic() + limit_s
        while not self._pipe.poll(1.0):
            if not self._process.is_alive() or time.monotonic() > deadline:
                raise RuntimeError(f"arm {self.name} died or gave no answer")
        kind, payload = self._receive(self._pipe)
        if kind == "error":
            raise RuntimeError(f"arm {self.name} failed:\n{payload}")
        return payload

    def _receive(self, pipe: Connection) -> tuple[str, Any]:
        try:
            return pipe.recv()
        except EOFError as e:
            raise RuntimeError(f"arm {self.name} died") from e

    def serve(self, load: Load) -> dict[str, Any]:
        """Run one load and return its figures."""
        self._pipe.send(load)
        lasting = load.traffic.end_s if load.traffic else 0.0
        return self.receive(START_LIMIT_S + lasting)

    def stop(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(5)
        self._process.kill()


@contextlib.contextmanager
def running_arms(args: argparse.Namespace, root: Path) -> Iterator[list[ArmProcess]]:
    """Start every arm's engine: those that profile last, when the rest is idle."""
    target, draft = args.target, args.draft
    if target is None:
        target, draft = checkpoints.write_preset(
            root, args.preset, args.full_depth, args.num_layers
        )
    arms: dict[str, ArmProcess] = {}

    def start(arm: Arm) -> None:
        rates = tuple(args.rates) if args.acceptance == "rates" else None
        preset = args.preset if args.target is None else ""
        arms[arm.name] = ArmProcess(
            EngineSetup(
                arm=arm.name,
                target=target,
                draft=draft,
                full_depth=args.full_depth,
                rates=rates,
                world=_world(args) if args.acceptance == "coupled" else None,
                llm=_llm_arguments(args),
                environ=arm.environ | checkpoints.ENVIRON.get(preset, {}),
                method=args.method,
                stand_ins=preset == checkpoints.DEEPSEEK_V4,
                teacher=args.teacher,
            )
        )

    def wait(names: list[str]) -> None:
        for name in names:
            ready = arms[name].receive(START_LIMIT_S)
            start_s = ready.pop("start_s")
            print(f"{name}: ready in {start_s:.0f} s", flush=True)
            record = Record(f"{BENCH}.setup", ready, name, "start", "s", [start_s])
            append_records(args.out, [record])

    profiling = [a for a in args.parsed_arms if a.kind in ("upstream", "capacity")]
    quiet = [a for a in args.parsed_arms if a not in profiling]
    try:
        for arm in quiet:
            start(arm)
        wait([a.name for a in quiet])
        for arm in profiling:
            start(arm)
            wait([arm.name])
        yield [arms[a.name] for a in args.parsed_arms]
    finally:
        for arm in arms.values():
            arm.stop()


def sweep(args: argparse.Namespace, arms: list[ArmProcess]) -> list[Record]:
    """Alternate the loads between the arms and return the records."""
    samples: dict[tuple[int, str], list[dict[str, Any]]] = {}
    with Progress() as progress:
        total = len(args.levels) * args.repetitions * len(arms)
        task = progress.add_task("sweep", total=total)
        for level, (_, concurrency, traffic) in enumerate(args.levels):
            for repetition in range(args.repetitions):
                load = Load(
                    concurrency,
                    args.prompt_len,
                    args.output_len,
                    args.seed + repetition,
                    traffic=traffic,
                )
                for arm in arms:
                    figures = arm.serve(load)
                    samples.setdefault((level, arm.name), []).append(figures)
                    progress.advance(task)
    return [
        record
        for (level, arm), found in samples.items()
        for record in _records(args, args.levels[level][0], arm, found)
    ]


def _records(
    args: argparse.Namespace,
    labels: dict[str, Any],
    arm: str,
    found: list[dict[str, Any]],
) -> Iterator[Record]:
    """Yield a level's records: each figure of the first repetition, and of the rest."""
    case = {**labels, "acceptance": args.acceptance}
    if args.acceptance == "coupled":
        case["spread"] = [args.spread_request, args.spread_position]
    for metric, (_, unit) in found[0]["figures"].items():
        values = [f["figures"][metric][0] for f in found if metric in f["figures"]]
        first = {**case, "part": "first"}
        yield Record(BENCH, first, arm, metric, unit, values[:1], args.seed)
        later = values[1:] or values
        yield Record(BENCH, case, arm, metric, unit, later, args.seed)
    kept = ("num", "mean", "step", "survival", "host")
    for labels, figures in ({**case, "part": "first"}, found[0]), (case, found[-1]):
        steps = {k: v for k, v in figures.items() if k.startswith(kept)}
        yield Record(f"{BENCH}.steps", {**labels, **steps}, arm, "steps", "1", [0.0])


def main(argv: list[str] | None = None) -> int:
    """Run the sweep, write JSON lines and print the table."""
    args = parse_args(argv)
    with new_records(args.out) as args.out:
        with (
            tempfile.TemporaryDirectory() as root,
            running_arms(args, Path(root)) as arms,
        ):
            for arm in arms:  # kernels that only serving compiles
                arm.serve(Load(8, args.prompt_len, LengthRange(16, 16), args.seed))
            records = sweep(args, arms)
        append_records(args.out, records)
    for part in ("first", None):
        print_table(
            [r for r in records if r.bench == BENCH and r.case.get("part") == part],
            title="first repetition" if part else "later repetitions",
        )
    for record in records:
        if record.bench == f"{BENCH}.steps" and "part" not in record.case:
            print(record.arm, record.case)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
