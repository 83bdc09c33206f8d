# SPDX-License-Identifier: Apache-2.0
"""Serve one config with its speculation and without, and compare what they answer.

Invariants (pinned by tests)
- A single answer that differs is a problem, and so is one that did not come.
- Capacity that trimmed nothing is a problem: equal answers would say nothing.
"""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from tests.evals.gsm8k.eval_config import ROOT, EvalConfig, server_command
from tests.evals.gsm8k.evaluation import EvalResult, EvalSettings, evaluate
from tests.evals.gsm8k.problems import EvalError, ProblemSet, choose_problems
from tools.demo.client import read_counters, watched
from tools.demo.server import Server, free_port


@dataclass(frozen=True)
class Arm:
    """One server's answers."""

    result: EvalResult
    counters: dict[str, float] | None
    """The capacity counters of its /metrics; None without speculation."""


def config_problems(
    config: EvalConfig, questions_file: Path | None, fewshot_file: Path | None
) -> ProblemSet:
    """Return what a config asks.

    Args:
        config: the config; its own files come first.
        questions_file: the problems of a config that names none.
        fewshot_file: likewise for the examples.

    Raises:
        EvalError: there are no questions, or too few.
    """
    path = config.questions_file or questions_file
    if path is None:
        raise EvalError(
            f"{config.name}: no questions; give GSM8K's test problems as JSON lines "
            "with --questions-file FILE, or the config's questions_file"
        )
    own = config.questions_file is not None
    return choose_problems(
        path,
        num_fewshot=config.num_fewshot,
        num_questions=config.num_questions,
        fewshot_path=config.fewshot_file or (None if own else fewshot_file),
        where=config.where,
    )


def run_arm(
    config: EvalConfig, problems: ProblemSet, *, speculation: bool, log_path: Path
) -> Arm:
    """Start a server, ask it everything, stop it.

    Args:
        config: how it is served and asked.
        problems: what it is asked.
        speculation: as the config says, or none.
        log_path: takes the server's log.

    Raises:
        DemoError: the server failed, or has no capacity counters.
        EvalError: no figures could be had.
    """
    port = free_port()
    name = f"{config.name}, {'capacity' if speculation else 'no speculation'}"
    server = Server(
        name,
        server_command(config, port=port, speculation=speculation),
        port=port,
        log_path=log_path,
        env=config.env,
        cwd=ROOT,
        ready_timeout_s=config.startup_max_wait_seconds,
        ready_timeout_option="startup_max_wait_seconds in the config",
    )
    settings = EvalSettings(
        base_url=f"{server.base_url}/v1",
        template=config.prompt_template,
        concurrency=config.concurrency,
        max_tokens=config.max_tokens,
    )

    async def ask() -> Arm:
        with tqdm(total=len(problems.asked), desc=name, file=sys.stderr) as bar:
            result = await evaluate(problems, settings, lambda _: bar.update())
        counters = await read_counters(server.base_url) if speculation else None
        return Arm(result, counters)

    with server:
        server.wait_ready()
        return asyncio.run(watched(ask(), server))


def find_problems(config: EvalConfig, plain: Arm, capacity: Arm) -> list[str]:
    """Return one sentence per reason to fail the comparison; empty when it passed."""
    found = []
    least = config.accuracy_threshold - config.tolerance
    for name, arm in (("no speculation", plain), ("capacity", capacity)):
        for error, count in arm.result.errors.items():
            found.append(f"{name}: {count} requests failed: {error}")
        if arm.result.accuracy < least:
            found.append(f"{name}: accuracy {arm.result.accuracy:.4f} < {least:.4f}")
    if config.equal_answers:
        found += find_differences(plain.result, capacity.result)
    counters = capacity.counters or {}
    # Below the knee everything drafted is verified.
    if not counters.get("active_steps") or counters["verified"] >= counters["drafted"]:
        found.append(
            f"capacity trimmed nothing ({counters}): raise the config's concurrency "
            "or set VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE in its env"
        )
    return found


def find_differences(plain: EvalResult, capacity: EvalResult) -> list[str]:
    """Return one sentence per question whose completions differ, or are not there."""
    found = []
    for expected, other in zip(plain.outcomes, capacity.outcomes, strict=True):
        if not (expected.completion and other.completion):
            found.append(f"line {expected.problem.line}: one server did not answer")
        elif not expected.completion.same_output(other.completion):
            texts = (outcome.completion.text[-60:] for outcome in (expected, other))
            found.append(
                f"line {expected.problem.line}: {expected.found} without speculation, "
                f"{other.found} with capacity; ends {' and '.join(map(repr, texts))}"
            )
    return found
