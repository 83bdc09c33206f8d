# SPDX-License-Identifier: Apache-2.0
"""What online STS makes of a distorted confidence head: table, records, diagram.

    python benchmarks/plot_calibration.py RECORD --plot reliability.png --out out.jsonl

RECORD comes from record_calibration.py; no model is loaded and nothing is recorded
anew. The confidence logits are scaled or shifted, the calibration sees --drafts
graded drafts of some requests, and the others are measured: cumulative ECE (15 bins),
Brier score and AUROC by position, greedy and sampled apart. All figures are means of
--draws random splits of the requests. Beside ``before`` and ``after`` stand ``limit``,
the calibration fitted to the measured rows themselves, which is the best that its
family can do for this head, ``truth``, survivals whose outcomes were drawn from them
(what chance leaves of an ECE on so many rows), and ``ideal``, what ``after`` is for a
head whose error is of the fitted family, all outcomes drawn so. With --costs (the
records of a sweep on a GPU) also the regret of the budget: how much less a plan by
these survivals is worth than one by true ones, taken from the limit of the undistorted
head.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import calibration as cal  # noqa: E402
from benchmarks.arguments import image_file, output_file, positive_int  # noqa: E402
from benchmarks.common import Record, append_records  # noqa: E402
from benchmarks.json_files import read_lines  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.dspark.sts_fit import (  # noqa: E402
    NUM_ECE_BINS,
    GradedRows,
    survival_probs,
)

PLOTTED_ARMS = ("before", "after")
METRICS = ("ece", "brier", "survival_auroc", "auroc")
REGRET_BATCHES = (64, 256)


def read_costs(path: Path) -> StepCosts:
    """Return the last cost table in a file of benchmark records.

    Raises:
        ValueError: There is none.
    """
    found = None
    try:
        for _, record in read_lines(path):
            found = record.get("case", {}).get("costs", found)
        if found is None:
            raise ValueError("no line has a cost table")
        return StepCosts.from_json(found)
    except (AttributeError, ValueError) as e:
        raise ValueError(
            f"{path} is no record of costs ({e}); give one of sweep_concurrency.py"
        ) from e


class Split:
    """One random split of a class's requests.

    Args:
        requests: Rows by request.
        num_drafts: Graded drafts that the calibration sees.
        seed: Of the split.
    """

    def __init__(self, requests: list[np.ndarray], num_drafts: int, seed: int):
        seen, measured = cal.split(requests, seed)
        self.seen = cal.in_turns(seen, stride=cal.ROW_STRIDE)
        self.measured = cal.in_turns(measured)
        self.num_drafts = num_drafts
        limit = cal.fit_limit(self.measured)
        self.truth = survival_probs(self.measured.logits, limit)
        rng = np.random.default_rng(seed)
        self.ideal_seen = cal.draw_outcomes(
            self.seen, survival_probs(self.seen.logits, limit), rng
        )
        self.ideal_measured = cal.draw_outcomes(self.measured, self.truth, rng)

    def tables(self, distortion: str) -> tuple[GradedRows, dict[str, np.ndarray]]:
        """Return the measured rows of a distorted head, and each arm's calibration."""
        how = cal.DISTORTIONS[distortion]
        rows = cal.distort(self.measured, *how)
        return rows, {
            "before": cal.identity(rows.logits.shape[1]),
            "after": cal.fit_online(cal.distort(self.seen, *how), self.num_drafts),
            "limit": cal.fit_limit(rows),
        }

    def figures(
        self, distortion: str, costs: StepCosts | None
    ) -> dict[tuple[str, str], np.ndarray]:
        """Return the figures of one distortion by arm and metric."""
        rows, tables = self.tables(distortion)
        ideal_seen = cal.distort(self.ideal_seen, *cal.DISTORTIONS[distortion])
        ideal = survival_probs(rows.logits, cal.fit_online(ideal_seen, self.num_drafts))
        found = {
            ("truth", "ece"): cal.cumulative_ece(self.ideal_measured, self.truth),
            ("ideal", "ece"): cal.cumulative_ece(self.ideal_measured, ideal),
        }
        for arm, table in tables.items():
            figures = cal.measure(rows, table)
            found |= {(arm, metric): getattr(figures, metric) for metric in METRICS}
            if costs is not None:
                estimates = survival_probs(rows.logits, table)
                for batch in REGRET_BATCHES:
                    lost = 100 * cal.regret(estimates, self.truth, costs, batch)
                    found[arm, f"regret_{batch}_requests"] = lost.mean(keepdims=True)
        return found


class Comparison:
    """One class of requests under every distortion.

    Args:
        name: ``greedy`` or ``sampled``.
        requests: Its rows by request.
        num_drafts: Graded drafts that the calibration sees.
        num_draws: Random splits.
    """

    def __init__(
        self, name: str, requests: list[np.ndarray], num_drafts: int, num_draws: int
    ):
        self.name, self.num_drafts = name, num_drafts
        self.splits = [Split(requests, num_drafts, seed) for seed in range(num_draws)]

    def records(self, costs: StepCosts | None) -> list[Record]:
        """Measure every distortion: means over the splits, and the worst ECE."""
        found = []
        for distortion in cal.DISTORTIONS:
            drawn = [split.figures(distortion, costs) for split in self.splits]
            for arm, metric in drawn[0]:
                values = np.array([figures[arm, metric] for figures in drawn])
                found.append(self._record(distortion, arm, metric, values.mean(0)))
                if metric == "ece":
                    worst = values.max(axis=0)
                    found.append(self._record(distortion, arm, "ece_worst", worst))
        return found

    def _record(
        self, distortion: str, arm: str, metric: str, values: np.ndarray
    ) -> Record:
        case = {
            "class": self.name,
            "distortion": distortion,
            "graded_drafts": self.num_drafts,
            "draws": len(self.splits),
            "measured_rows": len(self.splits[0].measured.accepted),
        }
        unit = "%" if metric.startswith("regret") else "1"
        samples = [round(float(v), 5) for v in values]
        return Record("calibration", case, arm, metric, unit, samples)


def print_figures(records: list[Record]) -> None:
    """Print one line per class, distortion and measure: its arms one after another."""
    lines: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        key = (record.case["class"], record.case["distortion"], record.metric)
        lines.setdefault(key, []).append(record)
    for (name, distortion, metric), arms in lines.items():
        unit = arms[0].unit.replace("1", "")
        print(f"{name}, {distortion}: {metric}{unit}")
        for record in arms:
            print(f"  {record.arm:8}{' '.join(f'{v:.3f}' for v in record.samples)}")


def draw(comparisons: list[Comparison], out: Path) -> None:
    """Write the reliability of the survivals in one split, all positions together."""
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
            rows, tables = comparison.splits[0].tables(distortion)
            axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
            for arm in PLOTTED_ARMS:
                table = tables[arm]
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
    parser.add_argument(
        "--draws", type=positive_int, default=8, help="random splits of the requests"
    )
    parser.add_argument("--costs", type=Path, help="records of a sweep, for the regret")
    parser.add_argument(
        "-o", "--out", type=output_file, help="append records here (JSON lines)"
    )
    parser.add_argument("--plot", type=image_file, help="write the diagram here (PNG)")
    args = parser.parse_args(argv)
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
    comparisons = [
        Comparison(name, requests, args.drafts, args.draws)
        for name, requests in record.items()
    ]
    try:
        records = [r for c in comparisons for r in c.records(costs)]
    except ValueError as e:
        parser.error(f"--drafts={args.drafts}: {e}")
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
