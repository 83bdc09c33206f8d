# SPDX-License-Identifier: Apache-2.0
"""Draws throughput by concurrency from the JSON lines of a sweep or a simulation.

    python benchmarks/plot.py benchmarks/results/*sweep*.jsonl --out sweep.png

Of several files with the same arm and concurrency, the last one counts.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.arguments import image_file  # noqa: E402
from benchmarks.json_files import read_lines  # noqa: E402

DRAWN = ("sweep_concurrency", "simulate_capacity")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines.

    Raises:
        ValueError: The file is unreadable, or a line is not a record.
    """
    records = []
    for number, record in read_lines(path):
        try:
            if not isinstance(record["bench"], str) or "case" not in record:
                raise KeyError("case")
        except (KeyError, TypeError) as e:
            raise ValueError(f"{path}:{number} is not a benchmark record: {e!r}") from e
        records.append(record)
    return records


def read_throughput(paths: Iterable[Path]) -> dict[str, dict[int, float]]:
    """Return the median of the later repetitions: arm -> concurrency -> tok/s.

    Raises:
        ValueError: See :func:`read_records`.
    """
    curves: dict[str, dict[int, float]] = {}
    for path in paths:
        for record in read_records(path):
            case = record["case"]
            drawn = record["bench"] in DRAWN and record["metric"] == "throughput"
            if drawn and "part" not in case and "concurrency" in case:
                curve = curves.setdefault(record["arm"], {})
                curve[case["concurrency"]] = record["median"]
    return curves


def draw(curves: dict[str, dict[int, float]], out: Path) -> None:
    """Write one line per arm, concurrency on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for arm, curve in sorted(curves.items()):
        levels = sorted(curve)
        bold = arm.startswith("capacity")
        axes.plot(
            levels,
            [curve[c] for c in levels],
            marker="o",
            linewidth=2.5 if bold else 1.2,
            label=arm,
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel("tokens / s")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=130)


def main(argv: list[str] | None = None) -> int:
    """Read the files and write the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=image_file, default="out/sweep.png")
    args = parser.parse_args(argv)
    try:
        curves = read_throughput(args.files)
    except ValueError as e:
        parser.error(str(e))
    if not curves:
        parser.error("no throughput records in " + ", ".join(map(str, args.files)))
    draw(curves, args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
