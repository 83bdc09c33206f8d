# SPDX-License-Identifier: Apache-2.0
"""What online STS makes of a distorted confidence head: table, records, diagram.

    python benchmarks/plot_calibration.py RECORD --plot reliability.png --out out.jsonl

RECORD comes from record_calibration.py; no model is loaded and nothing is recorded
anew. The confidence logits are scaled or shifted, the calibration sees --drafts
graded drafts of half the requests, and the other half is measured: cumulative ECE
(15 bins), Brier score and AUROC by position, greedy and sampled apart. With --costs
(the records of a sweep on a GPU) also the regret of the budget: how much less a plan
by these survivals is worth than one by true ones, taken from a fit of the undistorted
head to all measured rows.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import calibration as cal  # noqa: E402
from benchmarks.arguments import output_file, positive_int  # noqa: E402
from benchmarks.common import Record, append_records  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.dspark.sts_fit import (  # noqa: E402
    NUM_ECE_BINS,
    GradedRows,
    fit_calibration,
    survival_probs,
)

ARMS = ("before", "after")
REGRET_BATCHES = (64, 256)


def read_costs(path: Path) -> StepCosts:
    """Return the last cost table in a file of benchmark records.

    Raises:
        ValueError: There is none.
    """
    found = None
    try:
        for line in path.read_text().splitlines():
            found = json.loads(line).get("case", {}).get("costs", found)
        if found is None:
            raise ValueError("no line has a cost table")
        return StepCosts.from_json(found)
    except (AttributeError, ValueError) as e:
        raise ValueError(
            f"{path} is no record of costs ({e}); give one of sweep_concurrency.py"
        ) from e


class Comparison:
    """One class of requests under every distortion.

    Args:
        name: ``greedy`` or ``sampled``.
        requests: Its rows by request.
        num_drafts: Graded drafts that the calibration sees.
    """

    def __init__(self, name: str, requests: list[np.ndarray], num_drafts: int):
        self.name = name
        self.seen = cal.in_turns(requests[::2])
        self.measured = cal.in_turns(requests[1::2])
        self.num_drafts = num_drafts
        self.unchanged = cal.identity(self.seen.logits.shape[1])
        self.truth = self._reference()

    def _reference(self) -> np.ndarray:
        fitted = self.unchanged
        for _ in range(4):
            fitted = fit_calibration(self.measured, fitted, self.unchanged, decay=1.0)
        return survival_probs(self.measured.logits, fitted)

    def tables(self, distortion: str) -> tuple[GradedRows, dict[str, np.ndarray]]:
        """Return the measured rows of a distorted head, and both calibrations."""
        how = cal.DISTORTIONS[distortion]
        fitted = cal.fit_online(cal.distort(self.seen, *how), self.num_drafts)
        rows = cal.distort(self.measured, *how)
        return rows, dict(zip(ARMS, (self.unchanged, fitted), strict=True))

    def records(self, costs: StepCosts | None) -> list[Record]:
        """Measure every distortion."""
        found = []
        for distortion in cal.DISTORTIONS:
            rows, tables = self.tables(distortion)
            for arm, table in tables.items():
                figures = cal.measure(rows, table)
                for metric in ("ece", "brier", "survival_auroc", "auroc"):
                    values = getattr(figures, metric)
                    found.append(self._record(distortion, arm, metric, "1", values))
                if costs is not None:
                    estimates = survival_probs(rows.logits, table)
                    for batch in REGRET_BATCHES:
                        lost = 100 * cal.regret(estimates, self.truth, costs, batch)
                        metric = f"regret_{batch}_requests"
                        found.append(
                            self._record(distortion, arm, metric, "%", [lost.mean()])
                        )
        return found

    def _record(
        self, distortion: str, arm: str, metric: str, unit: str, values: Any
    ) -> Record:
        case = {
            "class": self.name,
            "distortion": distortion,
            "graded_drafts": self.num_drafts,
            "measured_rows": len(self.measured.accepted),
        }
        samples = [round(float(v), 5) for v in values]
        return Record("calibration", case, arm, metric, unit, samples)


def print_figures(records: list[Record]) -> None:
    """Print one line per class, distortion and measure: before, then after."""
    lines: dict[tuple[str, str, str], dict[str, Record]] = {}
    for record in records:
        key = (record.case["class"], record.case["distortion"], record.metric)
        lines.setdefault(key, {})[record.arm] = record
    for (name, distortion, metric), arms in lines.items():
        before, after = (" ".join(f"{v:.3f}" for v in arms[a].samples) for a in ARMS)
        unit = arms[ARMS[0]].unit.replace("1", "")
        print(f"{name:8}{distortion:11}{metric + unit:22}{before}  ->  {after}")


def draw(comparisons: list[Comparison], out: Path) -> None:
    """Write the reliability of the survivals, all positions together."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    distorted = list(cal.DISTORTIONS)
    figure, grid = pyplot.subplots(
        len(comparisons),
        len(distorted),
        figsize=(2.6 * len(distorted), 2.8 * len(comparisons)),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for row, comparison in zip(grid, comparisons, strict=True):
        for axes, distortion in zip(row, distorted, strict=True):
            rows, tables = comparison.tables(distortion)
            axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
            for arm, table in tables.items():
                ece = np.nanmax(cal.measure(rows, table).ece)
                label = f"{arm} (worst ECE {ece:.3f})"
                axes.plot(*reliability(rows, table), marker=".", label=label)
            axes.set_title(f"{comparison.name}, {distortion}", fontsize=9)
            axes.legend(fontsize=7)
    figure.supxlabel("survival probability")
    figure.supylabel("share accepted")
    figure.savefig(out, dpi=110)


def reliability(rows: GradedRows, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean survival and share accepted of each bin that holds 20 drafts."""
    survival = survival_probs(rows.logits, table)
    positions = np.arange(survival.shape[1])
    known = rows.verified[:, None] > positions
    probs = survival[known]
    hits = (rows.accepted[:, None] > positions)[known]
    bins = np.minimum((probs * NUM_ECE_BINS).astype(int), NUM_ECE_BINS - 1)
    counts = np.bincount(bins, minlength=NUM_ECE_BINS)
    kept = counts >= 20
    means = [
        np.bincount(bins, values, minlength=NUM_ECE_BINS)[kept] / counts[kept]
        for values in (probs, hits)
    ]
    return means[0], means[1]


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path)
    parser.add_argument(
        "--drafts", type=positive_int, default=3000, help="graded drafts seen"
    )
    parser.add_argument("--costs", type=Path, help="records of a sweep, for the regret")
    parser.add_argument(
        "--out", type=output_file, help="append records here (JSON lines)"
    )
    parser.add_argument("--plot", type=output_file, help="write the diagram here (PNG)")
    args = parser.parse_args(argv)
    if args.drafts < 1:
        parser.error(f"--drafts={args.drafts}: must be at least 1. Ask for more")
    for path in (args.record, args.costs):
        if path is not None and not path.is_file():
            parser.error(f"{path}: there is no such file. Correct the path")
    try:
        record = cal.read_record(args.record)
        costs = None if args.costs is None else read_costs(args.costs)
    except ValueError as e:
        parser.error(str(e))
    short = [name for name, requests in record.items() if len(requests) < 2]
    if short or not record:
        parser.error(f"{args.record}: two requests of each class are needed. Add some")
    comparisons = [Comparison(n, r, args.drafts) for n, r in record.items()]
    records = [r for c in comparisons for r in c.records(costs)]
    print_figures(records)
    if args.out is not None:
        append_records(args.out, records)
    if args.plot is not None:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(comparisons, args.plot)
        print(f"wrote {args.plot}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
