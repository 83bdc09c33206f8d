# SPDX-License-Identifier: Apache-2.0
"""Options of the demo: the argument parser and what depends on the machine."""

import argparse
import shlex
from pathlib import Path

from benchmarks.arguments import integer, output_file
from tools.demo.arms import EXAMPLE_CURVE, ROOT, Settings

_DEFAULT_CONCURRENCY = {"cpu": (1, 2, 4, 8), "gpu": (1, 2, 4, 8, 16, 32, 64)}
# A level ends with fewer requests than it began with; at the top, a second round
# keeps it full for longer. On a CPU that would cost minutes.
_PROMPTS_PER_TOP_LEVEL = {"cpu": 1, "gpu": 2}

EPILOG = (
    "Exit status: 0 passed; 1 a completion differs, a request failed, capacity was "
    "not active at the top level or was active at C=1, or a server failed; 2 wrong "
    "usage; 130 interrupted."
)


def concurrency_list(text: str) -> tuple[int, ...]:
    """Parse "1,2,8" into increasing positive integers (an argparse type)."""
    try:
        levels = tuple(int(part) for part in text.split(","))
    except ValueError:
        levels = ()
    if not levels or levels[0] < 1 or list(levels) != sorted(set(levels)):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give increasing positive integers, such as 1,2,4,8"
        )
    return levels


def cost_curve(text: str) -> str:
    """Return "auto" or the absolute path of a curve file (an argparse type)."""
    if text == "auto":
        return text
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r}: no such file; give 'auto' or a JSON file with "
            "[[tokens, steps_per_s], ...]"
        )
    return str(path.resolve())


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the demo's options."""
    parser = argparse.ArgumentParser(
        prog="tools/run_demo.sh",
        description=(
            "Serve the bundled checkpoint without speculation and with load-aware "
            "capacity, sweep the load, compare every completion, print a table."
        ),
        epilog=EPILOG,
    )
    _add_load_options(parser)
    _add_server_options(parser)
    return parser


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        type=output_file,
        default=str(ROOT / "out" / "demo" / "demo.json"),
        metavar="FILE",
        help="result; the plot (.png) and the servers' logs go next to it "
        "(default: out/demo/demo.json)",
    )
    parser.add_argument(
        "--concurrency",
        type=concurrency_list,
        metavar="C,C,...",
        help="levels (default: 1,2,4,8 on a cpu; up to 64 on a gpu)",
    )
    parser.add_argument(
        "--num-prompts",
        type=integer(1),
        metavar="N",
        help="prompts per level, the same at each (default: the top concurrency on a "
        "cpu, twice that on a gpu)",
    )
    parser.add_argument(
        "--max-tokens",
        type=integer(1),
        default=64,
        metavar="N",
        help="limit of tokens per completion (default: %(default)s)",
    )
    parser.add_argument(
        "--request-timeout",
        type=integer(1),
        default=120,
        metavar="SECONDS",
        help="limit for one request (default: %(default)s)",
    )


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto is gpu where torch sees one, else the CPU rehearsal "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--sps-curve",
        type=cost_curve,
        metavar="auto|FILE",
        help="cost curve (default: a made-up example on a cpu, auto on a gpu)",
    )
    parser.add_argument(
        "--activation-batch-size",
        type=integer(0),
        default=4,
        metavar="R",
        help="running requests from which capacity is active; 0 is the knee of the "
        "cost curve, which a model this small may not have (default: %(default)s)",
    )
    parser.add_argument(
        "--server-args",
        type=shlex.split,
        default=[],
        metavar="'ARGS'",
        help="further vllm serve arguments, for both servers (default: none)",
    )
    parser.add_argument(
        "--ready-timeout",
        type=integer(1),
        default=300,
        metavar="SECONDS",
        help="limit for the start of a server (default: %(default)s)",
    )


def _detect_device() -> str:
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


def parse_settings(argv: list[str] | None = None) -> Settings:
    """Parse the command line and fill in what depends on the machine.

    Raises:
        SystemExit: status 2 with a usage message, or 0 after --help.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    device = _detect_device() if args.device == "auto" else args.device
    concurrency = args.concurrency or _DEFAULT_CONCURRENCY[device]
    top = concurrency[-1]
    num_prompts = args.num_prompts or _PROMPTS_PER_TOP_LEVEL[device] * top
    if num_prompts < top:
        parser.error(
            f"--num-prompts {num_prompts}: the top concurrency {top} needs at least "
            "that many; raise it or lower --concurrency"
        )
    return Settings(
        device=device,
        concurrency=concurrency,
        num_prompts=num_prompts,
        max_tokens=args.max_tokens,
        sps_curve=args.sps_curve or (EXAMPLE_CURVE if device == "cpu" else "auto"),
        activation_batch_size=args.activation_batch_size,
        server_args=tuple(args.server_args),
        json_path=args.json,
        ready_timeout_s=args.ready_timeout,
        request_timeout_s=args.request_timeout,
    )
