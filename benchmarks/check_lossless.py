# SPDX-License-Identifier: Apache-2.0
"""Checks that every arm's greedy output equals that without speculation.

    python benchmarks/check_lossless.py --arms fixed7,capacity7,pinned1,pinned3 \\
        --target TARGET --draft DRAFT --acceptance real --prompts heldout.jsonl

An arm depthsK holds every depth 0..K in turn. Prints one line an arm or depth and
exits 1 on any difference. With the dummy weights of a preset the best two tokens are
often closer than rounding, which depends on the batch's shape: set
VLLM_BATCH_INVARIANT=1 VLLM_USE_BREAKABLE_CUDAGRAPH=0 there.
"""

import argparse
import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.arguments import output_file, positive_int  # noqa: E402
from benchmarks.common import Record, append_records, new_records  # noqa: E402
from benchmarks.json_files import read_lines  # noqa: E402
from benchmarks.sweep.arms import variants_of  # noqa: E402
from benchmarks.sweep.engine import Load  # noqa: E402
from benchmarks.sweep.traffic import LengthRange  # noqa: E402
from benchmarks.sweep_concurrency import (  # noqa: E402
    add_engine_arguments,
    check_engine_arguments,
    running_arms,
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser, arms="fixed7,capacity7")
    add = parser.add_argument
    add("--prompts", type=Path, help="JSON lines with a field 'prompt'")
    add("--num-prompts", type=positive_int, default=64)
    add("--waves", default="64,1,17", help="requests at once, one load after another")
    add("--prompt-len", type=positive_int, default=32, help="of random prompts")
    add("--output-len", type=positive_int, default=96)
    add("-o", "--out", type=output_file, default="out/lossless.jsonl")
    args = parser.parse_args(argv)
    args.arms = ["none", *(a for a in args.arms if a != "none")]
    check_engine_arguments(parser, args, depths_by_load=True)
    try:
        args.loads = make_loads(args)
    except (ValueError, KeyError, TypeError) as e:
        parser.error(f"--prompts {args.prompts} or --waves {args.waves!r}: {e!r}")
    if not sum(load.concurrency for load in args.loads):
        parser.error(f"--prompts {args.prompts} and --waves leave nothing to compare")
    return args


def make_loads(args: argparse.Namespace) -> list[Load]:
    """Return the loads: the same prompts in waves of different sizes."""
    prompts = None
    if args.prompts is not None:
        lines = itertools.islice(read_lines(args.prompts), args.num_prompts)
        prompts = [row["prompt"] for _, row in lines]
    found = []
    for wave in (int(w) for w in args.waves.split(",")):
        chosen = None if prompts is None else tuple(prompts[:wave])
        size = wave if chosen is None else len(chosen)
        found.append(
            Load(
                size,
                LengthRange(args.prompt_len, args.prompt_len),
                LengthRange(args.output_len, args.output_len),
                args.seed,
                chosen,
                True,
            )
        )
    return found


def main(argv: list[str] | None = None) -> int:
    """Compare all arms with the first one, which does not speculate."""
    args = parse_args(argv)
    num_different = 0
    with (
        new_records(args.out) as args.out,
        tempfile.TemporaryDirectory() as root,
        running_arms(args, Path(root)) as arms,
    ):
        expected = [arms[0].serve(load)["tokens"] for load in args.loads]
        for arm, parsed in zip(arms[1:], args.parsed_arms[1:], strict=True):
            for name, depth in variants_of(parsed):
                loads = [replace(load, held_depth=depth) for load in args.loads]
                found = [arm.serve(load) for load in loads]
                num_different += _compare(args.out, name, expected, found)
    return 1 if num_different else 0


def _compare(
    out: Path, name: str, expected: list[list[Any]], found: list[dict[str, Any]]
) -> int:
    """Print and record one comparison; return the number of outputs that differ."""
    pairs = [
        (a, b)
        for want, got in zip(expected, found, strict=True)
        for a, b in zip(want, got["tokens"], strict=True)
    ]
    equal = sum(a == b for a, b in pairs)
    summed = ("num_steps", "num_active", "num_trimmed", "num_tokens")
    figures: dict[str, Any] = {k: sum(f[k] or 0 for f in found) for k in summed}
    # Every width that the target verified at a full load, so depth + 1.
    figures["widths"] = sorted({w for f in found for w in f["step_ms"]})
    print(f"{name}: {equal} of {len(pairs)} outputs equal, {figures}", flush=True)
    case = {"outputs": len(pairs), **figures}
    record = Record("check_lossless", case, name, "equal outputs", "1", [float(equal)])
    append_records(out, [record])
    return len(pairs) - equal


if __name__ == "__main__":
    raise SystemExit(main())
