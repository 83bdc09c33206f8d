# SPDX-License-Identifier: Apache-2.0
"""Draws throughput by concurrency from the JSON lines of sweep_concurrency.py.

    python benchmarks/plot.py benchmarks/results/*sweep*.jsonl --out sweep.png

Of several files with the same arm and concurrency, the last one counts.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path


def read_throughput(paths: Iterable[Path]) -> dict[str, dict[int, float]]:
    """Return the median of the later repetitions: arm -> concurrency -> tok/s."""
    curves: dict[str, dict[int, float]] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            case = record["case"]
            if record["bench"] == "sweep_concurrency" and "part" not in case:
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
    parser.add_argument("--out", type=Path, default=Path("out/sweep.png"))
    args = parser.parse_args(argv)
    curves = read_throughput(args.files)
    if not curves:
        parser.error("no throughput records in " + ", ".join(map(str, args.files)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(curves, args.out)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
