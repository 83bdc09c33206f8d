# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a served model on GSM8K, through any OpenAI-compatible server.

    python tests/evals/gsm8k/gsm8k_eval.py test.jsonl --out result.json

Greedy completions, exact match of the number behind "####", Wilson interval. Exit
status: 0 every question was answered; 1 a request failed, or no figure could be had;
2 wrong usage, or a file that holds no problems; 130 interrupted.

Invariants (pinned by tests)
- A result file is whole, or is not there.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from tqdm import tqdm  # noqa: E402

from benchmarks.arguments import (  # noqa: E402
    natural,
    number,
    output_file,
    positive_int,
    readable_file,
)
from benchmarks.common import new_records, repro_command  # noqa: E402
from tests.evals.gsm8k.evaluation import (  # noqa: E402
    CONFIDENCE_LEVEL,
    EvalResult,
    EvalSettings,
    Outcome,
    evaluate,
)
from tests.evals.gsm8k.problems import (  # noqa: E402
    EvalError,
    ProblemSet,
    check_template,
    choose_problems,
)

SCHEMA = "vllm-dspark-gsm8k"
SCHEMA_VERSION = 1


def write_result(path: Path, result: EvalResult, **context: Any) -> None:
    """Write the whole result as JSON; `context` adds keys such as the settings."""
    record = {"schema": SCHEMA, "version": SCHEMA_VERSION, **context}
    text = json.dumps(record | result.as_json(), indent=2, default=str) + "\n"
    with new_records(path) as part:
        part.write_text(text, encoding="utf-8")


def print_result(result: EvalResult) -> None:
    """Print the accuracy with its interval, and whatever went wrong."""
    record = result.as_json()
    low, high = result.interval
    print(
        f"accuracy {result.accuracy:.4f} ({result.num_correct} of "
        f"{record['num_answered']}), {CONFIDENCE_LEVEL:.0%} interval "
        f"{low:.4f} to {high:.4f}; {result.model}, {result.wall_s:.1f} s"
    )
    for key, meaning in (
        ("num_without_number", "answers without '#### number' (counted as wrong)"),
        ("num_cut_off", "answers cut off at --max-tokens"),
    ):
        if record[key]:
            print(f"note: {record[key]} {meaning}")
    for text, count in result.errors.items():
        print(f"FAILED {count} requests, not scored: {text}")


def _base_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be an address such as http://127.0.0.1:8000/v1"
        )
    return text


def _template(text: str) -> str:
    try:
        return check_template(text.replace("\\n", "\n"))
    except EvalError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _condition(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    if not (key and equals and values):
        raise argparse.ArgumentTypeError(f"{text!r} must be KEY=VALUE,VALUE,...")
    return key, values.split(",")


def merge_conditions(
    conditions: Iterable[tuple[str, list[str]]],
) -> dict[str, list[str]]:
    """Return the values to keep by key; those of a key that comes twice add up."""
    where: dict[str, list[str]] = {}
    for key, values in conditions:
        where.setdefault(key, []).extend(values)
    return where


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    defaults = EvalSettings(base_url="http://127.0.0.1:8000/v1")
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\nInvariants")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("questions", type=readable_file, help="JSON lines of question and answer")
    add(
        "--fewshot-file",
        type=readable_file,
        help="where the examples come from (default: the first of the questions, "
        "which are then not asked)",
    )
    add("--num-fewshot", type=natural, default=5, help="examples (default: 5)")
    add("--num-questions", type=positive_int, help="ask only the first (default: all)")
    add(
        "--where",
        type=_condition,
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="keep only lines with one of these values; may be repeated",
    )
    add(
        "--prompt-template",
        type=_template,
        default=defaults.template,
        help="what stands before an answer; \\n is a new line "
        "(default: 'Question: {question}\\nAnswer:')",
    )
    add("--base-url", type=_base_url, default=defaults.base_url, help="%(default)s")
    add("--model", help="default: the only model that is served")
    add(
        "--concurrency",
        type=positive_int,
        default=defaults.concurrency,
        help="requests in flight (default: %(default)s)",
    )
    add(
        "--max-tokens",
        type=positive_int,
        default=defaults.max_tokens,
        help="limit of an answer (default: %(default)s)",
    )
    add(
        "--request-timeout",
        type=number(0, open_low=True),
        default=defaults.request_timeout_s,
        metavar="SECONDS",
        help="limit for one request (default: %(default)g)",
    )
    add(
        "--max-errors",
        type=positive_int,
        default=defaults.max_errors,
        help="give up at this many failed requests (default: %(default)s)",
    )
    add("--out", type=output_file, metavar="FILE", help="result, JSON")
    return parser


def run(problems: ProblemSet, settings: EvalSettings) -> EvalResult:
    """Evaluate behind a progress bar on stderr.

    Raises:
        EvalError: see `evaluate`.
    """
    right = 0
    with tqdm(total=len(problems.asked), desc="gsm8k", file=sys.stderr) as bar:

        def on_done(outcome: Outcome) -> None:
            nonlocal right
            right += outcome.correct
            bar.set_postfix(right=right, refresh=False)
            bar.update()

        return asyncio.run(evaluate(problems, settings, on_done))


def main(argv: list[str] | None = None) -> int:
    """Run an evaluation; return the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    where = merge_conditions(args.where)
    try:
        problems = choose_problems(
            args.questions,
            num_fewshot=args.num_fewshot,
            num_questions=args.num_questions,
            fewshot_path=args.fewshot_file,
            where=where,
        )
    except EvalError as error:
        parser.error(str(error))
    settings = EvalSettings(
        base_url=args.base_url,
        model=args.model,
        template=args.prompt_template,
        concurrency=args.concurrency,
        max_tokens=args.max_tokens,
        request_timeout_s=args.request_timeout,
        max_errors=args.max_errors,
    )
    try:
        result = run(problems, settings)
    except EvalError as error:
        print(f"FAILED {error}; no result was written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; no result was written", file=sys.stderr)
        return 130
    print_result(result)
    if args.out:
        write_result(
            args.out,
            result,
            settings=asdict(settings),
            questions_file=args.questions,
            fewshot_file=args.fewshot_file,
            num_fewshot=args.num_fewshot,
            where=where,
            repro=repro_command(),
        )
        print(f"wrote {args.out}")
    return 1 if result.errors else 0


if __name__ == "__main__":
    sys.exit(main())
