# SPDX-License-Identifier: Apache-2.0
"""Ask a served model every question once and score what it answers.

Invariants (pinned by tests)
- A request that failed is counted and named; it is neither right nor wrong.
- At most `concurrency` requests are in flight.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import openai
from scipy.stats import binomtest

from tests.evals.gsm8k.problems import (
    DEFAULT_TEMPLATE,
    EvalError,
    Problem,
    ProblemSet,
    build_prompts,
    extract_number,
    stop_text,
)
from tools.demo.client import Completion, complete

CONFIDENCE_LEVEL = 0.95


@dataclass(frozen=True)
class EvalSettings:
    """How the questions are sent."""

    base_url: str
    """Of the API, ending in /v1 as a rule."""
    model: str | None = None
    """None takes the only model that the server lists."""
    template: str = DEFAULT_TEMPLATE
    concurrency: int = 32
    max_tokens: int = 512
    request_timeout_s: float = 600.0
    max_errors: int = 20
    """Failed requests at which the evaluation is given up."""


@dataclass(frozen=True)
class Outcome:
    """What became of one question: a completion or an error."""

    problem: Problem
    completion: Completion | None = None
    error: str | None = None

    @property
    def found(self) -> Decimal | None:
        """The number that the completion gives, if any."""
        return extract_number(self.completion.text) if self.completion else None

    @property
    def correct(self) -> bool:
        """Whether it is the reference's."""
        return self.found == self.problem.number


@dataclass(frozen=True)
class EvalResult:
    """All outcomes, in the order of the questions; at least one has an answer."""

    model: str
    outcomes: tuple[Outcome, ...]
    wall_s: float

    @property
    def answered(self) -> list[Outcome]:
        """The outcomes with a completion: what accuracy is about."""
        return [outcome for outcome in self.outcomes if outcome.completion]

    @property
    def num_correct(self) -> int:
        """Number of right answers."""
        return sum(outcome.correct for outcome in self.answered)

    @property
    def accuracy(self) -> float:
        """Right answers over answered questions, 0 to 1."""
        return self.num_correct / len(self.answered)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson score interval of the accuracy at `CONFIDENCE_LEVEL`."""
        test = binomtest(self.num_correct, len(self.answered))
        bounds = test.proportion_ci(CONFIDENCE_LEVEL, method="wilson")
        return float(bounds.low), float(bounds.high)

    @property
    def errors(self) -> dict[str, int]:
        """Failed requests by what went wrong, the most frequent first."""
        texts = (outcome.error for outcome in self.outcomes if outcome.error)
        return dict(Counter(texts).most_common())

    def as_json(self) -> dict[str, Any]:
        """Return the figures and every question's outcome."""
        low, high = self.interval
        return {
            "model": self.model,
            "accuracy": self.accuracy,
            "confidence_interval": {
                "method": "wilson",
                "level": CONFIDENCE_LEVEL,
                "low": low,
                "high": high,
            },
            "num_questions": len(self.outcomes),
            "num_answered": len(self.answered),
            "num_correct": self.num_correct,
            "num_without_number": sum(o.found is None for o in self.answered),
            "num_cut_off": sum(
                o.completion.finish_reason == "length" for o in self.answered
            ),
            "num_errors": sum(self.errors.values()),
            "errors": self.errors,
            "wall_s": self.wall_s,
            "questions": [_outcome_json(outcome) for outcome in self.outcomes],
        }


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    completion = outcome.completion
    return {
        "line": outcome.problem.line,
        "expected": str(outcome.problem.number),
        "found": None if outcome.found is None else str(outcome.found),
        "correct": outcome.correct if completion else None,
        "text": completion.text if completion else None,
        "finish_reason": completion.finish_reason if completion else None,
        "error": outcome.error,
    }


def describe(error: Exception) -> str:
    """Return an error's class and text on one line, with what a connection met."""
    text = " ".join(str(error).split())[:200]
    cause = f" ({error.__cause__})" if str(error.__cause__ or "") else ""
    return f"{type(error).__name__}: {text}{cause}"


async def find_model(client: openai.AsyncOpenAI, wanted: str | None) -> str:
    """Return the name of the model to ask.

    Args:
        client: the client.
        wanted: a name, or None for the only one that is served.

    Raises:
        EvalError: the server does not answer, or serves no such model.
    """
    try:
        served = [model.id for model in (await client.models.list()).data]
    except (openai.OpenAIError, AttributeError, TypeError, ValueError) as error:
        # Whatever else answers at this address need not speak JSON.
        raise EvalError(
            f"{client.base_url}models: {describe(error)}. Is the server up, does "
            "--base-url end with its /v1, and is OPENAI_API_KEY set if it wants a key?"
        ) from error
    if wanted in served or (wanted is None and len(served) == 1):
        return wanted or served[0]
    raise EvalError(
        f"--model {wanted or '(not given)'}: {client.base_url} serves "
        f"{', '.join(served[:20]) or 'no model'}; choose one of those"
    )


async def evaluate(
    problems: ProblemSet,
    settings: EvalSettings,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> EvalResult:
    """Ask every question once, greedily.

    Args:
        problems: the examples and the questions.
        settings: server and load.
        on_done: called with each outcome as it comes.

    Raises:
        EvalError: the server cannot be reached or does not serve the model, or
            `max_errors` or all requests failed.
    """
    stop = stop_text(settings.template)
    options = {"stop": [stop]} if stop else {}
    gate = asyncio.Semaphore(settings.concurrency)
    errors: list[str] = []

    async def ask(problem: Problem, prompt: str) -> Outcome:
        try:
            async with gate:
                completion = await complete(
                    client,
                    prompt,
                    model=model,
                    max_tokens=settings.max_tokens,
                    **options,
                )
            outcome = Outcome(problem, completion)
        except openai.OpenAIError as error:
            outcome = Outcome(problem, error=describe(error))
            errors.append(outcome.error)
        if len(errors) >= settings.max_errors:
            raise EvalError(f"given up after {_count_errors(errors)} (--max-errors)")
        on_done(outcome)
        return outcome

    # No retries: they would hide what a server does under load.
    async with openai.AsyncOpenAI(
        base_url=settings.base_url,
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        timeout=settings.request_timeout_s,
        max_retries=0,
    ) as client:
        model = await find_model(client, settings.model)
        prompts = build_prompts(problems, settings.template)
        start = time.perf_counter()
        tasks = [
            asyncio.create_task(ask(problem, prompt))
            for problem, prompt in zip(problems.asked, prompts, strict=True)
        ]
        try:
            outcomes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    if len(errors) == len(outcomes):
        raise EvalError(f"no question was answered: {_count_errors(errors)}")
    return EvalResult(model, tuple(outcomes), time.perf_counter() - start)


def _count_errors(errors: list[str]) -> str:
    kinds = "; ".join(f"{n} x {text}" for text, n in Counter(errors).most_common(3))
    return f"{len(errors)} failed requests: {kinds}"
