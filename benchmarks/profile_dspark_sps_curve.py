# SPDX-License-Identifier: Apache-2.0
"""Measures the step costs of a served configuration for ``dspark_sps_curve``.

    python benchmarks/profile_dspark_sps_curve.py TARGET --speculative-config \\
        '{"method": "dspark", "model": "DRAFT", "num_speculative_tokens": 7}' \\
        [any engine argument of vllm serve] -o curve.json --plot curve.png
    vllm serve TARGET --speculative-config '{..., "dspark_sps_curve": "curve.json"}'

The engine starts once, times what it would time under ``"dspark_sps_curve": "auto"``,
and stops. The file holds the full tables of every draft depth, and points of whole
steps for engines that these do not fit. ``--from-json curve.json`` prints and plots a
file again without a GPU.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from arguments import (
    image_file,
    list_of,
    natural,
    number,
    output_file,
    positive_int,
    readable_file,
)
from common import environment, repro_command

from vllm.config.dspark_capacity import load_sps_curve
from vllm.v1.worker.gpu.spec_decode.dspark.knee import (
    KNEE_MARGIN,
    best_budget,
    knee_from_costs,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts
from vllm.v1.worker.gpu.spec_decode.dspark.survival_history import PRIOR_CONFIDENCE

CONTEXT_TOKENS = 128


# ---- arguments -----------------------------------------------------------------


def _sizes(text: str) -> list[int]:
    return sorted(set(list_of(positive_int)(text)))


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return our arguments, checked, and those that are vLLM's."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-o", "--out", type=output_file, help="write the curve here")
    parser.add_argument("--plot", type=image_file, help="write a PNG here")
    parser.add_argument(
        "--from-json",
        type=readable_file,
        help="print and plot this file, measure nothing",
    )
    parser.add_argument(
        "--iters",
        type=positive_int,
        default=5,
        help="timings of each batch, of which the median counts (default 5)",
    )
    parser.add_argument(
        "--warmup",
        type=natural,
        default=1,
        help="runs of each batch before it is timed (default 1)",
    )
    parser.add_argument(
        "--overhead-ms",
        type=number(0),
        default=0.0,
        help="fixed cost that the file adds to every step (default 0)",
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=[],
        help="request counts to time, such as 1,8,64 (default: spread over the graphs)",
    )
    args, rest = parser.parse_known_args(argv)
    if args.from_json is not None:
        if rest or args.out:
            parser.error("--from-json measures nothing: give --plot only")
    elif args.out is None:
        parser.error("give -o FILE to write the curve to, or --from-json FILE")
    return args, rest


def engine_args(rest: Sequence[str], cache: str) -> Any:
    """Return vLLM's engine arguments, with costs measured and kept in ``cache``.

    Raises:
        SystemExit: They are not those of an engine with a DSpark draft.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("model_tag", nargs="?", help="the target model")
    parsed = parser.parse_args(list(rest))
    if parsed.model_tag is not None:
        parsed.model = parsed.model_tag
    made = AsyncEngineArgs.from_cli_args(parsed)
    speculative = made.speculative_config
    if not isinstance(speculative, dict) or speculative.get("method") != "dspark":
        parser.error(
            "--speculative-config must name a draft with method dspark, such as "
            '\'{"method": "dspark", "model": "DRAFT", "num_speculative_tokens": 7}\''
        )
    made.speculative_config = {
        **speculative,
        "dspark_sps_curve": "auto",
        "dspark_sps_cache": cache,
        "dspark_sps_overhead_ms": 0.0,
    }
    return made


# ---- measuring -----------------------------------------------------------------


def measure(args: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    """Start the engine, let it measure, stop it, and return the curve file."""
    options = {"REPEATS": args.iters, "WARMUP": args.warmup}
    if args.sizes:
        options["SIZES"] = ",".join(map(str, args.sizes))
    for name, value in options.items():
        # Workers are other processes; the environment reaches all of them.
        os.environ[f"VLLM_DSPARK_PROFILE_{name}"] = str(value)
    with tempfile.TemporaryDirectory(prefix="dspark-costs-") as cache:
        made = engine_args(rest, cache)
        from vllm.v1.engine.llm_engine import LLMEngine

        engine = LLMEngine.from_engine_args(made)
        engine.engine_core.shutdown()
        [entry] = [json.loads(path.read_text()) for path in Path(cache).iterdir()]
    costs = StepCosts.from_json(entry["sections"]["costs"])
    costs = replace(costs, overhead_ms=args.overhead_ms)
    points = [list(point) for point in costs.sps_curve(context_tokens=CONTEXT_TOKENS)]
    return {
        **costs.to_json(),
        "sps_curve": points,
        "measured": entry["key"],
        "env": environment(),
        "repro": repro_command(),
    }


# ---- showing -------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What the costs say about one batch size.

    Attributes:
        num_reqs: Requests.
        step_ms: Whole step by depth, everything verified.
        best_depth: Depth of the best plan at the assumed confidence.
        best_budget: Its verification budget.
        gain: Its throughput against the deepest depth, everything verified.
    """

    num_reqs: int
    step_ms: dict[int, float]
    best_depth: int
    best_budget: int
    gain: float


def make_rows(costs: StepCosts, sizes: Sequence[int]) -> list[Row]:
    """Plan for each batch size, with every request at the assumed confidence."""
    full, rows = costs.depths[-1], []
    prior = np.cumprod(np.full(full, PRIOR_CONFIDENCE))
    for num_reqs in sizes:
        expected = np.cumsum(np.concatenate(([num_reqs], np.repeat(prior, num_reqs))))
        plans = {
            d: best_budget(costs, d, num_reqs, expected, CONTEXT_TOKENS)
            for d in costs.depths
        }
        step_ms = {
            d: costs.uniform_step_ms(d, num_reqs, CONTEXT_TOKENS) for d in costs.depths
        }
        best = max(plans, key=lambda d, plans=plans: plans[d][1])
        fixed = expected[-1] / step_ms[full]
        rows.append(
            Row(num_reqs, step_ms, best, plans[best][0], plans[best][1] / fixed - 1.0)
        )
    return rows


def knee_of(costs: StepCosts) -> int:
    """Return the knee that an engine with these costs finds."""
    full = costs.depths[-1]
    prior = np.cumprod(np.full(full, PRIOR_CONFIDENCE))
    return knee_from_costs(costs, full, prior, KNEE_MARGIN, CONTEXT_TOKENS)


def print_costs(costs: StepCosts) -> None:
    """Print one row per batch size and where capacity would begin to act."""
    from rich.console import Console
    from rich.table import Table

    sizes = [1 << i for i in range(costs.max_num_reqs.bit_length())]
    table = Table(title=f"Step time in ms, {CONTEXT_TOKENS} tokens of context")
    for name in ("requests", *(f"depth {d}" for d in costs.depths)):
        table.add_column(name, justify="right")
    for name in ("best depth", "budget", "gain"):
        table.add_column(name, justify="right")
    for row in make_rows(costs, sorted({*sizes, costs.max_num_reqs})):
        times = [f"{ms:.2f}" for ms in row.step_ms.values()]
        best = (str(row.best_depth), str(row.best_budget), f"{row.gain:+.1%}")
        table.add_row(str(row.num_reqs), *times, *best)
    Console(width=max(80, 34 + 11 * len(costs.depths))).print(table)
    knee = knee_of(costs)
    where = f"from {knee} requests on" if knee <= costs.max_num_reqs else "never"
    print(f"Capacity acts {where} (confidence {PRIOR_CONFIDENCE} assumed).")


def plot_costs(costs: StepCosts, out: Path) -> None:
    """Draw steps per second by depth, the knee and the region of each best depth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = list(range(1, costs.max_num_reqs + 1))
    rows = make_rows(costs, sizes)
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    colours = {d: f"C{i}" for i, d in enumerate(costs.depths)}
    for depth in costs.depths:
        rates = [1000.0 / row.step_ms[depth] for row in rows]
        axes.plot(sizes, rates, color=colours[depth], label=f"depth {depth}")
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i].best_depth != rows[start].best_depth:
            colour = colours[rows[start].best_depth]
            right = sizes[min(i, len(rows) - 1)]
            axes.axvspan(sizes[start], right, color=colour, alpha=0.12, linewidth=0)
            start = i
    knee = knee_of(costs)
    if knee <= costs.max_num_reqs:
        axes.axvline(knee, color="black", linestyle="--", label=f"knee: {knee}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("decoding requests (shaded: depth of the best plan)")
    axes.set_ylabel("steps / s, everything verified")
    axes.grid(alpha=0.3)
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def read_curve(path: Path) -> StepCosts:
    """Return the full tables of a curve file.

    Raises:
        SystemExit: It cannot be read or holds no tables.
    """
    try:
        curve = load_sps_curve(path)
        if curve.document is None:
            raise ValueError("a list of points holds no tables; write a file with -o")
        costs = StepCosts.from_json(curve.document)
        if costs.max_num_reqs < 1:
            raise ValueError("its tables cover no request; measure it again with -o")
        return costs
    except ValueError as error:
        sys.exit(f"--from-json {path}: {error}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or read, then write, print and plot."""
    args, rest = parse_args(sys.argv[1:] if argv is None else argv)
    if args.from_json is None:
        document = measure(args, rest)
        args.out.write_text(json.dumps(document) + "\n")
        print(f"wrote {args.out}")
        costs = StepCosts.from_json(document)
    else:
        costs = read_curve(args.from_json)
    print_costs(costs)
    if args.plot is not None:
        plot_costs(costs, args.plot)
        print(f"wrote {args.plot}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
