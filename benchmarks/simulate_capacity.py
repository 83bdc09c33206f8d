# SPDX-License-Identifier: Apache-2.0
"""Expected throughput by concurrency, without a GPU.

    python benchmarks/simulate_capacity.py --costs benchmarks/results/RUN.jsonl \\
        --spread-request 1 --spread-position 1 --out out/simulated.jsonl

Replays recorded step costs under a model of acceptance, in the closed loop of
sweep_concurrency.py, for: no speculation, each fixed depth, upstream's adaptive
verification, ours (the product's planner and depth controller) and an oracle that
knows the true probabilities and the costs and decides without delay. All arms see
the same draws. What it is worth: docs/simulator.md.
"""

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm  # noqa: E402

from benchmarks.acceptance.world import DEFAULT_PROFILE, World  # noqa: E402
from benchmarks.arguments import (  # noqa: E402
    image_file,
    list_of,
    natural,
    number,
    output_file,
    positive_int,
    readable_file,
    seed_number,
)
from benchmarks.common import (  # noqa: E402
    Record,
    append_records,
    new_records,
    print_table,
)
from benchmarks.plot import draw  # noqa: E402
from benchmarks.simulator.arms import (  # noqa: E402
    DEFAULT_MAX_LOGITS,
    default_arms,
    make_policy,
)
from benchmarks.simulator.correction import correct_costs  # noqa: E402
from benchmarks.simulator.engine import (  # noqa: E402
    Engine,
    LoadResult,
    SimulatedLoad,
    Simulation,
)
from benchmarks.simulator.policies import Policy  # noqa: E402
from benchmarks.simulator.recorded import (  # noqa: E402
    load_costs,
    load_served_steps,
    load_start_ms,
    load_throughput,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts  # noqa: E402

BENCH = "simulate_capacity"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; loads the files that it names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--costs",
        type=readable_file,
        required=True,
        help="cost file, or records of a sweep with a capacity arm",
    )
    add(
        "--correct-by",
        type=list_of(readable_file),
        default=[],
        help="records of sweeps, A[,B...]: scale the costs by their served step times",
    )
    add(
        "--compare",
        type=readable_file,
        help="records of a sweep: print the error of each of its cells",
    )
    add("--arms", type=list_of(str), help="default: all, at every depth of the costs")
    add(
        "--concurrency",
        type=list_of(positive_int),
        default=[1, 4, 8, 16, 32, 64, 128, 256],
    )
    add("--prompt-len", type=positive_int, default=64)
    add("--output-len", type=positive_int, default=160)
    add(
        "--steady-waves",
        type=natural,
        default=0,
        help="refill the batch this many times and leave the drain out; 0 drains",
    )
    add("--repetitions", type=positive_int, default=5)
    add("--seed", type=seed_number, default=0)
    rate = number(0, 1, open_low=True)
    add(
        "--profile",
        type=list_of(rate),
        default=list(DEFAULT_PROFILE),
        help="mean chance that the first k drafts are all accepted, k = 1..K",
    )
    add("--spread-request", type=number(0, 3), default=0.0, help="logits")
    add("--spread-position", type=number(0, 3), default=0.0, help="logits")
    add("--confidence-scale", type=number(0, open_low=True), default=1.0)
    add("--confidence-shift", type=number(-40, 40), default=0.0)
    add("--confidence-temperature", type=number(0.01, 100), default=1.0)
    add("--online-sts", action="store_true", help="the capacity arm calibrates itself")
    add(
        "--draft-depths",
        type=list_of(natural),
        help="depths to keep of the costs; default: all",
    )
    add("--knee", type=natural, default=0, help="requests; 0: the automatic knee")
    add("--max-num-batched-tokens", type=positive_int, default=8192)
    add("--max-logits", type=positive_int, default=DEFAULT_MAX_LOGITS)
    add("--host-ms-per-request", type=number(0), default=0.0)
    add(
        "--start-ms",
        type=number(0),
        help="what a load takes besides its steps; default: what --correct-by shows",
    )
    add("-o", "--out", type=output_file, help="write JSON lines here")
    add("--plot", type=image_file, help="write a PNG here")
    args = parser.parse_args(argv)
    try:
        _load(args)
    except ValueError as e:
        parser.error(str(e))
    return args


def _load(args: argparse.Namespace) -> None:
    """Read the files and build the world.

    Raises:
        ValueError: They do not fit each other or the options.
    """
    args.planned = load_costs(args.costs)
    if args.draft_depths:
        args.planned = _at_depths(args.planned, args.draft_depths)
    args.true = args.planned
    if args.correct_by:
        served = [s for path in args.correct_by for s in load_served_steps(path)]
        args.true = correct_costs(args.planned, served)
        if args.start_ms is None:
            starts = map(load_start_ms, args.correct_by)
            args.start_ms = next(filter(None, starts), None)
    args.start_ms = args.start_ms or 0.0
    args.measured = load_throughput(args.compare) if args.compare else {}
    args.arms = args.arms or default_arms(args.planned)
    if max(args.concurrency) > args.planned.max_num_reqs:
        raise ValueError(
            f"--concurrency {max(args.concurrency)} exceeds the "
            f"{args.planned.max_num_reqs} requests that {args.costs} covers"
        )
    if args.max_num_batched_tokens > args.planned.max_num_tokens:
        raise ValueError(
            f"--max-num-batched-tokens {args.max_num_batched_tokens} exceeds the "
            f"{args.planned.max_num_tokens} tokens that {args.costs} covers"
        )
    args.world = World.with_profile(
        args.profile,
        spread_request=args.spread_request,
        spread_position=args.spread_position,
        confidence_scale=args.confidence_scale,
        confidence_shift=args.confidence_shift,
    )
    deepest = max(_policy(args, arm).max_depth for arm in args.arms)
    if deepest > len(args.profile):
        raise ValueError(
            f"--profile has {len(args.profile)} entries, the arms need {deepest}"
        )
    args.world = args.world.up_to(max(deepest, 1))


def _at_depths(costs: StepCosts, depths: list[int]) -> StepCosts:
    try:
        return costs.fitted(
            sorted(set(depths)), costs.max_num_reqs, costs.max_num_tokens
        )
    except ValueError as e:
        raise ValueError(f"--draft-depths does not fit the costs: {e}") from None


def _policy(args: argparse.Namespace, arm: str) -> Policy:
    return make_policy(
        arm,
        args.true if arm.startswith("oracle") else args.planned,
        knee=args.knee,
        temperature=args.confidence_temperature,
        online_sts=args.online_sts,
        max_total_logits=args.max_logits,
    )


def simulate(args: argparse.Namespace) -> dict[tuple[int, str], list[LoadResult]]:
    """Run every arm at every concurrency; the same loads for all arms."""
    engine = Engine(
        args.true, args.max_num_batched_tokens, args.host_ms_per_request, args.start_ms
    )
    cells = [(c, arm) for c in args.concurrency for arm in args.arms]
    results: dict[tuple[int, str], list[LoadResult]] = {}
    for concurrency, arm in tqdm(cells, desc="simulate", file=sys.stderr):
        policy = _policy(args, arm)
        results[concurrency, arm] = [
            Simulation(
                engine,
                args.world,
                policy,
                SimulatedLoad(
                    concurrency,
                    args.prompt_len,
                    args.output_len,
                    args.seed + repetition,
                    args.steady_waves * concurrency,
                ),
            ).run()
            for repetition in range(args.repetitions)
        ]
    return results


def to_records(
    args: argparse.Namespace, results: dict[tuple[int, str], list[LoadResult]]
) -> list[Record]:
    """Return one throughput record per cell, with what the steps were like."""
    records = []
    for (concurrency, arm), found in results.items():
        case = {
            "concurrency": concurrency,
            "spread_request": args.spread_request,
            "spread_position": args.spread_position,
            "confidence_scale": args.confidence_scale,
            "confidence_shift": args.confidence_shift,
            "online_sts": args.online_sts,
        }
        rates = [r.tok_s for r in found]
        records.append(
            Record(BENCH, case, arm, "throughput", "tok/s", rates, args.seed)
        )
        last = found[-1]
        steps = {
            "num_steps": last.num_steps,
            "num_trimmed": last.num_trimmed_steps,
            "num_drafted": last.num_drafted,
            "num_verified": last.num_verified,
            "num_accepted": last.num_accepted,
        }
        records.append(
            Record(f"{BENCH}.steps", {**case, **steps}, arm, "steps", "1", [0.0])
        )
    return records


def compare(
    args: argparse.Namespace, results: dict[tuple[int, str], list[LoadResult]]
) -> list[Record]:
    """Return simulated / measured - 1 of every cell that was measured."""
    return [
        Record(
            f"{BENCH}.error",
            {"concurrency": c},
            arm,
            "error",
            "%",
            [
                100.0
                * (
                    statistics.median(r.tok_s for r in found) / args.measured[c, arm]
                    - 1
                )
            ],
            args.seed,
        )
        for (c, arm), found in results.items()
        if (c, arm) in args.measured
    ]


def main(argv: list[str] | None = None) -> int:
    """Simulate, print the tables, write records and plot."""
    args = parse_args(argv)
    results = simulate(args)
    records = to_records(args, results)
    throughput = [r for r in records if r.bench == BENCH]
    print_table(throughput, title="simulated tok/s: median (IQR)")
    if args.measured:
        errors = compare(args, results)
        print_table(errors, title="simulated / measured - 1")
        records += errors
    if args.out:
        with new_records(args.out) as out:
            append_records(out, records)
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        curves: dict[str, dict[int, float]] = {}
        for record in throughput:
            curve = curves.setdefault(record.arm, {})
            curve[record.case["concurrency"]] = record.median
        draw(curves, args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
