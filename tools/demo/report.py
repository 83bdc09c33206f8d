# SPDX-License-Identifier: Apache-2.0
"""Judge the two sweeps and show them: table, JSON and plot from the same records.

Invariants (pinned by tests)
- Any completion that differs from the one without speculation is a problem, and so is
  capacity that is active at one request or not active at the top level.
- The table, the JSON and the plot show one list of `LevelFigures`.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from tools.demo.client import Completion, LevelRun
from tools.demo.errors import DemoError

SCHEMA = "vllm-dspark-demo"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class LevelFigures:
    """The figures of one concurrency; "per step" = per engine step, whole batch."""

    concurrency: int
    tokens_per_s_none: float
    """Generated tokens per second without speculation."""
    tokens_per_s: float
    """Generated tokens per second with capacity."""
    num_steps: int
    """Engine steps that verified or drafted, counted by the scheduler."""
    active_fraction: float
    """Share of those steps with capacity active, 0 to 1."""
    mean_draft_depth: float
    """Tokens that the drafter made per request and step."""
    drafted_per_step: float
    verified_per_step: float
    accepted_per_step: float
    acceptance_length: float
    """Tokens per request and verification, the target's own included."""

    @property
    def active(self) -> bool:
        """Whether capacity was active in any step of the level."""
        return self.active_fraction > 0


@dataclass(frozen=True)
class Mismatch:
    """One completion that is not the one without speculation."""

    concurrency: int
    prompt_index: int
    first_difference: int
    """Position of the first differing token (character without token ids)."""
    expected: str
    found: str


@dataclass(frozen=True)
class DemoResult:
    """Everything that the two sweeps say."""

    levels: list[LevelFigures]
    mismatches: list[Mismatch]
    """With capacity against without speculation, at the same concurrency."""
    baseline_mismatches: list[Mismatch]
    """Without speculation against itself at the first level: tells rounding that
    follows the batch shape from a fault of the speculation."""
    problems: list[str]
    """One sentence per reason to fail; empty when the demo passed."""
    num_compared: int


def level_figures(none: LevelRun, capacity: LevelRun) -> LevelFigures:
    """Return the figures of one concurrency from its two runs.

    Raises:
        DemoError: the server counted no step or no draft over the level.
    """
    counts = capacity.counters or {}
    num_steps = counts["fixed_steps"] + counts["active_steps"]
    num_drafts = counts["num_drafts"]
    if num_steps <= 0 or num_drafts <= 0:
        raise DemoError(
            f"C={capacity.concurrency}: the server counted {num_steps:.0f} steps and "
            f"{num_drafts:.0f} drafts; it did not speculate"
        )
    return LevelFigures(
        concurrency=capacity.concurrency,
        tokens_per_s_none=none.tokens_per_s,
        tokens_per_s=capacity.tokens_per_s,
        num_steps=int(num_steps),
        active_fraction=counts["active_steps"] / num_steps,
        mean_draft_depth=counts["draft_depth_sum"] / num_steps,
        drafted_per_step=counts["drafted"] / num_steps,
        verified_per_step=counts["verified"] / num_steps,
        accepted_per_step=counts["accepted"] / num_steps,
        acceptance_length=1 + counts["accepted"] / num_drafts,
    )


def _first_difference(expected: Completion, found: Completion) -> int:
    if expected.token_ids is None or found.token_ids is None:
        left, right = expected.text, found.text
    else:
        left, right = expected.token_ids, found.token_ids
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def find_mismatches(reference: LevelRun, run: LevelRun) -> list[Mismatch]:
    """Return the completions of `run` that differ from those of `reference`."""
    pairs = zip(reference.completions, run.completions, strict=True)
    return [
        Mismatch(
            concurrency=run.concurrency,
            prompt_index=index,
            first_difference=_first_difference(expected, found),
            expected=expected.text,
            found=found.text,
        )
        for index, (expected, found) in enumerate(pairs)
        if not expected.same_output(found)
    ]


def find_problems(
    levels: Sequence[LevelFigures], mismatches: Sequence[Mismatch]
) -> list[str]:
    """Return one sentence per reason to fail the demo; empty when it passed."""
    problems = [
        f"C={m.concurrency}, prompt {m.prompt_index}: differs from no speculation at "
        f"position {m.first_difference}: expected {m.expected[-60:]!r}, "
        f"found {m.found[-60:]!r}"
        for m in mismatches
    ]
    problems += [
        f"C=1: capacity was active in {level.active_fraction:.0%} of the steps; one "
        "request must stay on the fixed path"
        for level in levels
        if level.concurrency == 1 and level.active
    ]
    top = max(levels, key=lambda level: level.concurrency)
    if top.concurrency > 1 and not top.active:
        problems.append(
            f"C={top.concurrency}: capacity was never active at the top level; the "
            "knee was not reached (see --activation-batch-size and --sps-curve)"
        )
    return problems


def judge(none: Sequence[LevelRun], capacity: Sequence[LevelRun]) -> DemoResult:
    """Compare the sweeps level by level.

    Args:
        none: the levels without speculation.
        capacity: the same levels with capacity and counters.

    Raises:
        DemoError: the server with capacity counted no step over a level.
    """
    pairs = list(zip(none, capacity, strict=True))
    levels = [level_figures(*pair) for pair in pairs]
    mismatches = [m for pair in pairs for m in find_mismatches(*pair)]
    return DemoResult(
        levels=levels,
        mismatches=mismatches,
        baseline_mismatches=[m for run in none for m in find_mismatches(none[0], run)],
        problems=find_problems(levels, mismatches),
        num_compared=sum(len(run.completions) for run in capacity),
    )


def build_table(levels: Sequence[LevelFigures]) -> Table:
    """Return the table that the demo prints."""
    # Narrow on purpose: it must fit the 80 columns of a log.
    table = Table(
        caption="per step = per engine step, whole batch",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    for column in (
        "C",
        "tok/s\nno spec",
        "tok/s\ncapacity",
        "draft\ndepth",
        "drafted\nper step",
        "verified\nper step",
        "accepted\nper step",
        "accept.\nlength",
        "capacity\nactive",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for level in levels:
        table.add_row(
            str(level.concurrency),
            f"{level.tokens_per_s_none:.1f}",
            f"{level.tokens_per_s:.1f}",
            f"{level.mean_draft_depth:.2f}",
            f"{level.drafted_per_step:.1f}",
            f"{level.verified_per_step:.1f}",
            f"{level.accepted_per_step:.1f}",
            f"{level.acceptance_length:.2f}",
            f"{'yes' if level.active else 'no'} ({level.active_fraction:.0%})",
        )
    return table


def write_json(path: Path, result: DemoResult, **context: Any) -> None:
    """Write the whole result; `context` adds keys such as environment and settings."""
    record = dataclasses.asdict(result)
    for level, figures in zip(record["levels"], result.levels, strict=True):
        level["active"] = figures.active
    record = {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "passed": not result.problems,
        **record,
        **context,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2, default=str) + "\n")


def write_plot(path: Path, levels: Sequence[LevelFigures], note: str) -> None:
    """Draw throughput and the active share of steps against concurrency as a PNG."""
    # pyplot would pick a backend of the desktop; a bare Figure draws to files only.
    from matplotlib.figure import Figure

    concurrency = [level.concurrency for level in levels]
    figure = Figure(figsize=(7, 6), layout="constrained")
    speed, active = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    arms = {"no speculation": "tokens_per_s_none", "capacity": "tokens_per_s"}
    for label, field in arms.items():
        values = [getattr(level, field) for level in levels]
        speed.plot(concurrency, values, marker="o", label=label)
    speed.set(ylabel="tokens per second", title=note, ylim=(0, None))
    speed.title.set_fontsize("small")
    speed.legend()
    percent = [100 * level.active_fraction for level in levels]
    active.plot(concurrency, percent, marker="o", color="tab:green")
    active.set_xscale("log", base=2)
    active.set_xticks(concurrency, labels=[str(c) for c in concurrency])
    active.set(xlabel="concurrent requests", ylabel="capacity active,\n% of steps")
    active.set_ylim(-5, 105)
    for axes in (speed, active):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
