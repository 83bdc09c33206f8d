# SPDX-License-Identifier: Apache-2.0
"""Problems in GSM8K's form: read them, ask them, read the answers.

A problem is a line of JSON with the strings `question` and `answer`; an answer ends
with its number behind four hashes, as in "... so 6 * 7 = 42.\n#### 42".

Invariants (pinned by tests)
- A line that is no problem is an error that names file and line, never left out.
- A problem that is shown as an example is not asked.
- Only the number behind the hashes counts, whatever else the text says.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from tools.demo.errors import DemoError

DEFAULT_TEMPLATE = "Question: {question}\nAnswer:"
_SLOT = "{question}"
# A sign may stand on either side of the currency.
_NUMBER = re.compile(
    r"####\s*(?P<before>[-−$\s]*)(?P<digits>\d[\d,]*(?:\.\d+)?|\.\d+)",
)


class EvalError(DemoError):
    """An evaluation that cannot give figures; its text is shown as it is."""


@dataclass(frozen=True)
class Problem:
    """One question with its reference answer."""

    line: int
    """Line in its file, from 1."""
    question: str
    answer: str
    """Worked out, with the number behind the hashes."""
    number: Decimal


@dataclass(frozen=True)
class ProblemSet:
    """The examples to show and the problems to ask."""

    shots: tuple[Problem, ...]
    asked: tuple[Problem, ...]


def extract_number(text: str) -> Decimal | None:
    """Return the number behind the first `####`, or None.

    Thousands separators, a dollar sign and what follows the number, such as a final
    period, do not count: "#### -$1,234.50." is -1234.5.
    """
    match = _NUMBER.search(text)
    if match is None:
        return None
    number = Decimal(match["digits"].replace(",", ""))
    return -number if re.search("[-−]", match["before"]) else number


def load_problems(
    path: Path, where: Mapping[str, Sequence[str]] | None = None
) -> list[Problem]:
    """Return the problems of a file of JSON lines; empty lines do not count.

    Args:
        path: the file, UTF-8.
        where: keep only lines whose value of each key is one of those listed, such
            as {"kind": ["puzzle"]}; the others need not be problems.

    Raises:
        EvalError: the file cannot be read, holds no problem, or has a line that is
            not one.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"{path}: cannot be read: {error}") from error
    problems = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _read_row(f"{path}:{number}", line)
        if all(str(row.get(key)) in kept for key, kept in (where or {}).items()):
            problems.append(_read_problem(f"{path}:{number}", number, row))
    if not problems:
        chosen = f" where {dict(where)}" if where else ""
        raise EvalError(
            f"{path}: holds no problem{chosen}; give JSON lines such as "
            '{"question": "...", "answer": "... #### 42"}'
        )
    return problems


def _read_row(place: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise EvalError(
            f"{place}: not JSON ({error}); the file must hold one object a line"
        ) from error
    if not isinstance(row, dict):
        raise EvalError(f"{place}: {line[:60]!r} is not an object with question/answer")
    return row


def _read_problem(place: str, line: int, row: Mapping[str, Any]) -> Problem:
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise EvalError(
                f"{place}: {key!r} is {row.get(key)!r}, but must be a text; "
                f"the line has {sorted(row)}"
            )
    number = extract_number(row["answer"])
    if number is None:
        raise EvalError(
            f"{place}: the answer {row['answer'][-60:]!r} has no '#### number'; "
            "correct it, or choose other lines (--where KEY=VALUE,...)"
        )
    return Problem(line, row["question"].strip(), row["answer"].strip(), number)


def choose_problems(
    path: Path,
    *,
    num_fewshot: int,
    num_questions: int | None = None,
    fewshot_path: Path | None = None,
    where: Mapping[str, Sequence[str]] | None = None,
) -> ProblemSet:
    """Return the examples and the problems of an evaluation, in file order.

    Args:
        path: the problems.
        num_fewshot: examples before each question.
        num_questions: problems to ask; None is all.
        fewshot_path: where the examples come from; None takes the first problems of
            `path`, which are then not asked.
        where: see `load_problems`; holds for both files.

    Raises:
        EvalError: a file is bad or holds too few problems.
    """
    asked = load_problems(path, where)
    if fewshot_path is None or fewshot_path.resolve() == path.resolve():
        if num_fewshot >= len(asked):
            raise EvalError(
                f"{path}: holds {len(asked)} problems, and {num_fewshot} of them would "
                "be examples; give more problems, another file of examples "
                "(--fewshot-file) or a smaller --num-fewshot"
            )
        shots, asked = asked[:num_fewshot], asked[num_fewshot:]
    else:
        shots = load_problems(fewshot_path, where)[:num_fewshot]
        if len(shots) < num_fewshot:
            raise EvalError(
                f"{fewshot_path}: holds {len(shots)} problems, fewer than the "
                f"{num_fewshot} examples wanted; lower --num-fewshot"
            )
    if num_questions is not None and num_questions > len(asked):
        raise EvalError(
            f"{path}: {num_questions} questions wanted, but only {len(asked)} problems "
            "can be asked; lower --num-questions"
        )
    return ProblemSet(tuple(shots), tuple(asked[:num_questions]))


def check_template(template: str) -> str:
    """Return a prompt template that has its slot.

    Raises:
        EvalError: it holds the slot for the question not exactly once.
    """
    if template.count(_SLOT) != 1:
        raise EvalError(
            f"prompt template {template!r}: must hold {_SLOT} exactly once, such as "
            f"{DEFAULT_TEMPLATE!r}"
        )
    return template


def build_prompts(problems: ProblemSet, template: str = DEFAULT_TEMPLATE) -> list[str]:
    """Return one prompt a problem: the examples with their answers, the question."""
    shots = "".join(
        f"{template.replace(_SLOT, shot.question)} {shot.answer}\n\n"
        for shot in problems.shots
    )
    return [shots + template.replace(_SLOT, p.question) for p in problems.asked]


def stop_text(template: str) -> str | None:
    """Return what begins a next question, at which a completion may end."""
    return template.partition(_SLOT)[0].strip() or None
