# SPDX-License-Identifier: Apache-2.0
"""Options that say what traffic a sweep sends."""

import argparse
from typing import Any

from benchmarks.arguments import list_of, natural, number, positive_int
from benchmarks.sweep.traffic import LengthRange, Traffic

# Seconds of a load, or of a phase of a step change.
DEFAULT_SECONDS = 20.0


def length_range(text: str) -> LengthRange:
    """Read ``N`` or ``LOW-HIGH``."""
    low, dash, high = text.partition("-")
    found = LengthRange(positive_int(low), positive_int(high if dash else low))
    if found.low > found.high:
        raise argparse.ArgumentTypeError(f"{text!r}: the range must not fall")
    return found


def add_traffic_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of traffic and lengths."""
    add = parser.add_argument
    lengths = "tokens: N, or LOW-HIGH drawn for each request"
    add("--prompt-len", type=length_range, default=LengthRange(64, 64), help=lengths)
    add("--output-len", type=length_range, default=LengthRange(128, 128), help=lengths)
    add(
        "--concurrency",
        type=list_of(positive_int),
        help="closed loops; 1,8 where no other traffic is asked for",
    )
    add(
        "--steady",
        action="store_true",
        help="closed loops that refill: the drain of a batch is not measured",
    )
    add(
        "--arrival-rate",
        type=list_of(number(0, open_low=True)),
        help="open loop: requests per second, Poisson; reports latency",
    )
    add(
        "--step-change",
        type=list_of(positive_int),
        metavar="C,C,C",
        help="change the load from one concurrency to the next, e.g. 4,256,4",
    )
    add(
        "--churn",
        type=positive_int,
        metavar="C",
        help="random loads up to C with bursts and aborts; reports growth",
    )
    add(
        "--seconds",
        type=number(1),
        default=DEFAULT_SECONDS,
        help="of a steady, open or churning load; of each phase of a step change",
    )
    add("--max-requests", type=natural, default=0, help="of a load; 0: no limit")


def loads_of(args: argparse.Namespace) -> list[tuple[dict, int, Traffic | None]]:
    """Return (labels, concurrency, traffic) of every load level.

    Kinds of traffic follow each other in the order closed, open, step change, churn.

    Raises:
        ValueError: Options that exclude each other.
    """
    others = _open_loads(args) + _changing_loads(args)
    if args.steady and others and not args.concurrency:
        raise ValueError("--steady needs --concurrency beside other traffic")
    return _closed_loads(args, args.concurrency or ([] if others else [1, 8])) + others


def _timed(args: argparse.Namespace) -> dict[str, Any]:
    return {"seconds": args.seconds, "max_requests": args.max_requests}


def _closed_loads(
    args: argparse.Namespace, levels: list[int]
) -> list[tuple[dict, int, Traffic | None]]:
    if not args.steady:
        return [({"concurrency": c}, c, None) for c in levels]
    return [
        (
            {"concurrency": c, "traffic": "steady"},
            c,
            Traffic("steady", levels=(c,), **_timed(args)),
        )
        for c in levels
    ]


def _open_loads(args: argparse.Namespace) -> list[tuple[dict, int, Traffic | None]]:
    return [
        (
            {"traffic": "open", "arrival_rate": rate},
            0,
            Traffic("open", arrival_rate=rate, **_timed(args)),
        )
        for rate in args.arrival_rate or ()
    ]


def _changing_loads(
    args: argparse.Namespace,
) -> list[tuple[dict, int, Traffic | None]]:
    found: list[tuple[dict, int, Traffic | None]] = []
    if args.step_change:
        if len(args.step_change) < 2 or args.seconds < 4:
            raise ValueError(
                "--step-change needs at least two loads, and --seconds at least 4 "
                "for each: 2 s to recover and 2 s to compare with"
            )
        levels = tuple(args.step_change)
        text = ",".join(map(str, levels))
        traffic = Traffic("change", args.seconds, levels)
        found.append(({"traffic": "change", "levels": text}, max(levels), traffic))
    if args.churn:
        labels = {"traffic": "churn", "up_to": args.churn}
        traffic = Traffic("churn", levels=(args.churn,), **_timed(args))
        found.append((labels, args.churn, traffic))
    return found
