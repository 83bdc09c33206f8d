# SPDX-License-Identifier: Apache-2.0
"""What a run left behind: cost tables and measured throughput, from files."""

import statistics
from pathlib import Path
from typing import Any

from benchmarks.json_files import decode, read_lines, read_text
from benchmarks.simulator.correction import ServedStep
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts

# Loads up to this many requests show what a load takes besides its decode steps.
SMALL_LOAD = 16
SETUP_BENCH, SWEEP_BENCH = "sweep_concurrency.setup", "sweep_concurrency"


def _records(path: Path) -> list[dict[str, Any]]:
    text = read_text(path)
    try:
        whole = decode(text)
        return whole if isinstance(whole, list) else [whole]
    except ValueError:
        pass
    try:
        return [value for _, value in read_lines(path)]
    except ValueError as e:
        raise ValueError(f"{path} holds neither JSON nor JSON lines: {e}") from e


def load_costs(path: Path) -> StepCosts:
    """Read cost tables: a cost file, or a sweep's records with a capacity arm.

    Of several capacity arms the last counts.

    Raises:
        ValueError: The file is unreadable or holds no cost tables.
    """
    found = None
    for record in _records(path):
        if not isinstance(record, dict):
            raise ValueError(f"{path}: expected JSON objects, found {record!r}")
        if "draft_ms" in record:
            found = record
        elif record.get("bench") == SETUP_BENCH and record["arm"].startswith("capa"):
            found = record["case"].get("costs", found)
    if found is None:
        raise ValueError(
            f"{path} holds no cost tables: give a cost file with draft_ms, or the "
            "records of a sweep with a capacity arm"
        )
    return StepCosts.from_json(found)


def load_throughput(path: Path) -> dict[tuple[int, str], float]:
    """Read measured tok/s by (concurrency, arm): the median of later repetitions.

    Raises:
        ValueError: The file is unreadable or holds no throughput.
    """
    found = {
        (r["case"]["concurrency"], r["arm"]): float(r["median"])
        for r in _records(path)
        if r.get("bench") == SWEEP_BENCH
        and r["metric"] == "throughput"
        and "concurrency" in r["case"]
        and "part" not in r["case"]
    }
    if not found:
        raise ValueError(f"{path} holds no throughput records of sweep_concurrency")
    return found


def load_served_steps(path: Path) -> list[ServedStep]:
    """Read the step times of full decode batches.

    Raises:
        ValueError: The file is unreadable or holds none.
    """
    found = [
        ServedStep(r["case"]["concurrency"], round(float(width)), float(ms))
        for r in _records(path)
        if r.get("bench") == f"{SWEEP_BENCH}.steps"
        and "concurrency" in r["case"]
        and "part" not in r["case"]
        for width, ms in (r["case"].get("step_ms") or {}).items()
        if float(width).is_integer()
    ]
    if not found:
        raise ValueError(f"{path} holds no step times (sweep_concurrency.steps)")
    return found


def load_start_ms(path: Path) -> float:
    """Read what a closed load takes besides its decode steps: median, milliseconds.

    That is submission and the eager launches of the prompts' step. Small loads of one
    step width show it: their time less that of their steps.

    Returns:
        0 where no load of the file shows it.

    Raises:
        ValueError: The file is unreadable.
    """
    records, last_rate, found = _records(path), {}, []
    for record in records:
        case = record.get("case", {})
        is_rate = (
            record.get("bench") == SWEEP_BENCH and record["metric"] == "throughput"
        )
        if is_rate and "part" not in case and "traffic" not in case:
            # The steps' record is that of the last repetition.
            last_rate[case["concurrency"], record["arm"]] = record["samples"][-1]
    for record in records:
        case = record.get("case", {})
        step_ms = list((case.get("step_ms") or {}).values())
        rate = last_rate.get((case.get("concurrency", SMALL_LOAD + 1), record["arm"]))
        if rate is None or "part" in case:
            continue
        if len(step_ms) != 1 or "num_tokens" not in case:
            continue
        if case["concurrency"] <= SMALL_LOAD:
            seconds = case["num_tokens"] / rate
            found.append(1000.0 * seconds - case["num_steps"] * step_ms[0])
    return max(statistics.median(found), 0.0) if found else 0.0
