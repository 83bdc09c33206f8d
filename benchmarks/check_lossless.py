# SPDX-License-Identifier: Apache-2.0
"""Checks that every arm's greedy output equals that without speculation.

    python benchmarks/check_lossless.py --arms fixed7,capacity7,pinned1,pinned3 \\
        --target TARGET --draft DRAFT --acceptance real --prompts heldout.jsonl

Prints one line an arm and exits 1 on any difference. With dummy weights use
``--dtype float32``: near-ties in bfloat16 fall differently at different batch shapes.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import Record, append_records  # noqa: E402
from benchmarks.sweep.engine import Load  # noqa: E402
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
    add("--num-prompts", type=int, default=64)
    add("--waves", default="64,1,17", help="requests at once, one load after another")
    add("--prompt-len", type=int, default=32, help="of random prompts")
    add("--output-len", type=int, default=96)
    add("--out", type=Path, default=Path("out/lossless.jsonl"))
    args = parser.parse_args(argv)
    args.arms = ["none", *(a for a in args.arms if a != "none")]
    check_engine_arguments(parser, args)
    try:
        args.loads = make_loads(args)
    except (OSError, ValueError, KeyError) as e:
        parser.error(f"--prompts {args.prompts} or --waves {args.waves!r}: {e!r}")
    if not sum(load.concurrency for load in args.loads):
        parser.error(f"--prompts {args.prompts} and --waves leave nothing to compare")
    return args


def make_loads(args: argparse.Namespace) -> list[Load]:
    """Return the loads: the same prompts in waves of different sizes."""
    prompts = None
    if args.prompts is not None:
        lines = args.prompts.read_text().splitlines()[: args.num_prompts]
        prompts = [json.loads(line)["prompt"] for line in lines]
    found = []
    for wave in (int(w) for w in args.waves.split(",")):
        chosen = None if prompts is None else tuple(prompts[:wave])
        size = wave if chosen is None else len(chosen)
        found.append(
            Load(size, args.prompt_len, args.output_len, args.seed, chosen, True)
        )
    return found


def main(argv: list[str] | None = None) -> int:
    """Compare all arms with the first one, which does not speculate."""
    args = parse_args(argv)
    args.out.unlink(missing_ok=True)
    num_different = 0
    with tempfile.TemporaryDirectory() as root, running_arms(args, Path(root)) as arms:
        expected = [arms[0].serve(load)["tokens"] for load in args.loads]
        for arm in arms[1:]:
            found = [arm.serve(load) for load in args.loads]
            pairs = [
                (a, b)
                for want, got in zip(expected, found, strict=True)
                for a, b in zip(want, got["tokens"], strict=True)
            ]
            equal = sum(a == b for a, b in pairs)
            num_different += len(pairs) - equal
            figures = {
                k: sum(f[k] or 0 for f in found)
                for k in ("num_steps", "num_active", "num_trimmed")
            }
            print(f"{arm.name}: {equal} of {len(pairs)} outputs equal, {figures}")
            append_records(
                args.out,
                [
                    Record(
                        "check_lossless",
                        {"outputs": len(pairs), **figures},
                        arm.name,
                        "equal outputs",
                        "1",
                        [float(equal)],
                    )
                ],
            )
    return 1 if num_different else 0


if __name__ == "__main__":
    raise SystemExit(main())
