# SPDX-License-Identifier: Apache-2.0
"""Compares every arm's logits with those of no speculation, teacher-forced.

    python benchmarks/check_logits.py --preset deepseek-v4-reduced --full-depth 5 \\
        --arms fixed5,half5,mask5,zero5,depths5 --prompt-len 30-2600

For targets whose greedy output rounding decides, dummy weights above all: see
``benchmarks/sweep/teacher.py``. The error of a row is its largest difference from the
reference, in standard deviations of the reference row. What rounding alone does is
measured by the reference itself, which serves the same requests in batches of several
sizes. An arm fails if its median error is over ``MEDIAN_FACTOR`` times that of
rounding, or if more than ``MAX_SHARE`` of its rows are further off than 99 % of those;
so must the control: the first trimming arm, in which the last token of the first
request of each step is given to the second one. Exits 1 where an arm fails or the
control does not.

The drafter's rows are compared alike: with those of the first arm that drafted at the
same depth in every step (``fixedK``; ``depthsK`` for the others, so name them first).
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.arguments import list_of, output_file, positive_int  # noqa: E402
from benchmarks.common import Record, append_records, new_records  # noqa: E402
from benchmarks.sweep.arms import variants_of  # noqa: E402
from benchmarks.sweep.engine import Load  # noqa: E402
from benchmarks.sweep.options import length_range  # noqa: E402
from benchmarks.sweep.traffic import LengthRange  # noqa: E402
from benchmarks.sweep_concurrency import (  # noqa: E402
    ArmProcess,
    add_engine_arguments,
    check_engine_arguments,
    running_arms,
)

BENCH = "check_logits"
MEDIAN_FACTOR = 2.0
MAX_SHARE = 0.05
# Rounding below this, in standard deviations, is not told apart from none.
LEAST_ERROR = 1e-6
# Stands for what is no number.
LARGEST_ERROR = 1e6


@dataclass(frozen=True)
class Rounding:
    """Errors between batches of different sizes of the reference.

    Attributes:
        median: Of all compared rows.
        p99: 99th percentile.
    """

    median: float
    p99: float

    @classmethod
    def of(cls, errors: np.ndarray) -> "Rounding":
        """Return the summary of some rows' errors. ``errors``: shape [N]."""
        median, p99 = np.percentile(errors, (50, 99))
        return cls(max(float(median), LEAST_ERROR), max(float(p99), LEAST_ERROR))

    def share_beyond(self, errors: np.ndarray) -> float:
        """Return the share of rows that are further off than 99 % of these."""
        return float((errors > self.p99).mean())

    def accepts(self, errors: np.ndarray) -> bool:
        """Return whether errors are those of rounding."""
        near = float(np.median(errors)) <= MEDIAN_FACTOR * self.median
        return near and self.share_beyond(errors) <= MAX_SHARE


Rows = dict[tuple[int, ...], list[np.ndarray]]


def rows_of(found: list[dict[str, Any]], kind: str) -> Rows:
    """Return kept rows by their key, in the order they came.

    Args:
        found: What each load returned.
        kind: ``logits`` or ``drafts``.
    """
    rows: Rows = {}
    for load in found:
        if load[kind] is not None:
            keys, values = load[kind]
            for key, row in zip(keys.tolist(), values, strict=True):
                rows.setdefault(tuple(key), []).append(row)
    return rows


def errors_of(reference: Rows, other: Rows) -> np.ndarray:
    """Return the errors of all rows that both have. Shape [N], float64."""
    errors = []
    for key, values in other.items():
        if key in reference:
            want = reference[key][0].astype(np.float64)
            scale = max(want.std(), 1e-12)
            errors += [float(np.abs(v - want).max()) / scale for v in values]
    return np.nan_to_num(np.array(errors), nan=LARGEST_ERROR).clip(max=LARGEST_ERROR)


def rounding_of(reference: Rows) -> Rounding:
    """Return what batches of other sizes do to the reference's own rows.

    Raises:
        ValueError: No row was served in more than one batch, or rows say nothing.
    """
    if any(values[0].std() == 0 for values in reference.values()):
        raise ValueError("the reference has rows of equal logits")
    again = {key: values[1:] for key, values in reference.items() if len(values) > 1}
    if not again:
        raise ValueError("no request was served in batches of several sizes")
    return Rounding.of(errors_of(reference, again))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine_arguments(parser, arms="fixed7,half7,depths7")
    parser.set_defaults(acceptance="coupled", teacher=True)
    add = parser.add_argument
    waves = "requests at once, one load after another, of the same requests"
    add("--waves", type=list_of(positive_int), default=[64, 1, 17], help=waves)
    add("--prompt-len", type=length_range, default=LengthRange(30, 300))
    add("--output-len", type=length_range, default=LengthRange(8, 96))
    add("-o", "--out", type=output_file, default="out/logits.jsonl")
    args = parser.parse_args(argv)
    args.arms = ["none", *(a for a in args.arms if a != "none")]
    check_engine_arguments(parser, args, depths_by_load=True)
    if args.acceptance != "coupled":
        parser.error("--acceptance must be coupled: drafts are the text's tokens")
    if args.tensor_parallel_size > 1:
        parser.error("--tensor-parallel-size must be 1: only rank 0 is looked at")
    longest = args.prompt_len.high + args.output_len.high
    if longest > args.max_model_len:
        parser.error(f"{longest} tokens a request exceed --max-model-len")
    if len(set(args.waves)) < 2 or max(args.waves) > args.max_num_seqs:
        parser.error("--waves needs two sizes, none over --max-num-seqs")
    args.loads = [
        Load(w, args.prompt_len, args.output_len, args.seed, return_tokens=True)
        for w in args.waves
    ]
    return args


class Comparison:
    """The reference, and every other arm against it.

    Args:
        out: Where records go.
        loads: What every arm serves.
        reference: The arm without speculation.
    """

    def __init__(self, out: Path, loads: list[Load], reference: ArmProcess):
        self._out, self._loads = out, loads
        found = [reference.serve(load) for load in loads]
        self._tokens = [f["tokens"] for f in found]
        self._rows = rows_of(found, "logits")
        self._rounding = rounding_of(self._rows)
        self._draft_rows: Rows = {}
        self._draft_rounding: Rounding | None = None
        print(f"rounding: {self._rounding}", flush=True)

    def compare(
        self, arm: ArmProcess, name: str, *, steady_depth: bool, **changes: Any
    ) -> tuple[bool, bool]:
        """Serve, print and record one arm.

        Args:
            arm: Arm to serve.
            name: Of the record.
            steady_depth: Whether it drafts at one depth in every step.
            changes: To every load.

        Returns:
            Whether its rows differ by rounding alone; whether its outputs are the
            reference's.
        """
        found = [arm.serve(replace(load, **changes)) for load in self._loads]
        errors = errors_of(self._rows, rows_of(found, "logits"))
        # Lengths alone could differ: every token is the text's.
        same_text = [f["tokens"] for f in found] == self._tokens
        near = self._rounding.accepts(errors)
        summed = ("num_steps", "num_active", "num_trimmed", "num_tokens")
        case: dict[str, Any] = {
            **{k: sum(f[k] or 0 for f in found) for k in summed},
            "widths": sorted({w for f in found for w in f["step_ms"]}),
            **_described(self._rounding, errors),
            "same_text": same_text,
        }
        drafts = rows_of(found, "drafts")
        if steady_depth:
            self._learn(drafts)
        draft_errors = errors_of(self._draft_rows, drafts)
        if len(draft_errors) and self._draft_rounding is not None:
            near = near and self._draft_rounding.accepts(draft_errors)
            described = _described(self._draft_rounding, draft_errors)
            case |= {f"draft_{k}": v for k, v in described.items()}
            case["draft_depths"] = sorted({key[3] for key in drafts})
        case["near"] = near
        print(f"{name}: {'rounding' if near else 'DIFFERS'}, {case}", flush=True)
        sample = [float(errors.max())]
        append_records(
            self._out, [Record(BENCH, case, name, "largest error", "std", sample)]
        )
        return near, same_text

    def _learn(self, drafts: Rows) -> None:
        """Keep the rows of depths that are new, and what rounding does to them."""
        known = {key[3] for key in self._draft_rows}
        new = {key: rows for key, rows in drafts.items() if key[3] not in known}
        if new and self._draft_rounding is None:
            self._draft_rounding = rounding_of(new)
        self._draft_rows |= new


def _described(rounding: Rounding, errors: np.ndarray) -> dict[str, float]:
    median, p99 = np.percentile(errors, (50, 99))
    return {
        "num_rows": len(errors),
        "rounding_median": rounding.median,
        "rounding_p99": rounding.p99,
        "median": float(median),
        "p99": float(p99),
        "share_beyond_rounding": rounding.share_beyond(errors),
    }


def main(argv: list[str] | None = None) -> int:
    """Compare all arms with the first one, which does not speculate."""
    args = parse_args(argv)
    num_failed, control = 0, None
    with (
        new_records(args.out) as args.out,
        tempfile.TemporaryDirectory() as root,
        running_arms(args, Path(root)) as arms,
    ):
        comparison = Comparison(args.out, args.loads, arms[0])
        for arm, parsed in zip(arms[1:], args.parsed_arms[1:], strict=True):
            for name, depth in variants_of(parsed):
                steady = parsed.kind in ("fixed", "depths")
                same = comparison.compare(
                    arm, name, steady_depth=steady, held_depth=depth
                )
                num_failed += not all(same)
            if control is None and parsed.kind in ("half", "capacity"):
                control = arm
        if control is not None:
            name = f"control: {control.name} with a fault"
            near, _ = comparison.compare(control, name, steady_depth=False, fault=True)
            if near:
                print("the control was not found out: this check proves nothing")
                num_failed += 1
    return 1 if num_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
