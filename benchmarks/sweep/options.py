# SPDX-License-Identifier: Apache-2.0
"""Options that say what traffic a sweep sends."""

import argparse

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
    add("--concurrency", type=list_of(positive_int), default=[1, 8])
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--steady",
        action="store_true",
        help="closed loop that refills: the drain of a batch is not measured",
    )
    kind.add_argument(
        "--arrival-rate",
        type=list_of(number(0, open_low=True)),
        help="open loop: requests per second, Poisson; reports latency",
    )
    kind.add_argument(
        "--step-change",
        type=list_of(positive_int),
        metavar="C,C,C",
        help="change the load from one concurrency to the next, e.g. 4,256,4",
    )
    kind.add_argument(
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

    Raises:
        ValueError: Options that exclude each other.
    """
    timed = {"seconds": args.seconds, "max_requests": args.max_requests}
    if args.arrival_rate:
        return [
            (
                {"traffic": "open", "arrival_rate": rate},
                0,
                Traffic("open", arrival_rate=rate, **timed),
            )
            for rate in args.arrival_rate
        ]
    if args.step_change:
        if len(args.step_change) < 2 or args.seconds < 4:
            raise ValueError(
                "--step-change needs at least two loads, and --seconds at least 4 "
                "for each: 2 s to recover and 2 s to compare with"
            )
        levels = tuple(args.step_change)
        text = ",".join(map(str, levels))
        traffic = Traffic("change", args.seconds, levels)
        return [({"traffic": "change", "levels": text}, max(levels), traffic)]
    if args.churn:
        traffic = Traffic("churn", levels=(args.churn,), **timed)
        return [({"traffic": "churn", "up_to": args.churn}, args.churn, traffic)]
    levels = args.concurrency
    if args.steady:
        return [
            (
                {"concurrency": c, "traffic": "steady"},
                c,
                Traffic("steady", levels=(c,), **timed),
            )
            for c in levels
        ]
    return [({"concurrency": c}, c, None) for c in levels]
