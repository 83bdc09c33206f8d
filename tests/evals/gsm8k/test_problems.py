# SPDX-License-Identifier: Apache-2.0
"""Problems: reading them, the prompts, the numbers in answers."""

import json
from decimal import Decimal
from pathlib import Path

import pytest

from tests.evals.gsm8k.problems import (
    DEFAULT_TEMPLATE,
    EvalError,
    ProblemSet,
    build_prompts,
    check_template,
    choose_problems,
    extract_number,
    load_problems,
    stop_text,
)
from tests.helpers.paths import REPOSITORY

HELDOUT = REPOSITORY / "tests" / "fixtures" / "tiny-dspark" / "heldout.jsonl"


def row(number: object, **more: str) -> str:
    return json.dumps(
        {"question": f"What is {number}?", "answer": f"It is.\n#### {number}", **more}
    )


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", 42),
        ("so 6 * 7 = 42\n#### 42\n", 42),
        ("####42", 42),
        ("#### 42.", 42),
        ("#### 42.0", 42),
        ("#### 1,234,567", 1234567),
        ("#### 1,234.50.", Decimal("1234.5")),
        ("#### $18", 18),
        ("#### $ 1,000 a year", 1000),
        ("#### -7", -7),
        ("#### - 7", -7),
        ("#### \N{MINUS SIGN}7", -7),
        ("#### -$7.25", Decimal("-7.25")),
        ("#### $-7.25", Decimal("-7.25")),
        ("#### .5", Decimal("0.5")),
        ("#### 0", 0),
        ("#### 42, as 7 * 6 is 42", 42),
        ("#### 1\n\nQuestion: next?\nAnswer: #### 2", 1),
        ("the answer is 42", None),
        ("### 42", None),
        ("#### none, 42", None),
        ("", None),
    ],
)
def test_number_is_what_stands_behind_the_first_hashes(text, number):
    assert extract_number(text) == number


def test_numbers_are_equal_by_value_not_by_spelling():
    assert extract_number("#### 1,200") == extract_number("#### $1200.00")
    assert extract_number("#### 12") != extract_number("#### 120")


def test_problems_keep_their_lines_and_empty_lines_do_not_count(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(f"\ufeff{row(1)}\r\n\r\n{row(2)}\r\n".encode())
    assert [(p.line, p.number) for p in load_problems(path)] == [(1, 1), (3, 2)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"p\.jsonl: holds no problem"),
        (["", "  "], r"p\.jsonl: holds no problem"),
        ([row(1), "", '{"question": '], r"p\.jsonl:3: not JSON .*one object a line"),
        (["[", row(1), "]"], r"p\.jsonl:1: not JSON"),
        ([row(1), "[1, 2]"], r"p\.jsonl:2: '\[1, 2\]' is not an object"),
        (['{"answer": "#### 1"}'], r"p\.jsonl:1: 'question' is None"),
        (['{"question": "q", "answer": 5}'], r"p\.jsonl:1: 'answer' is 5"),
        (['{"question": " ", "answer": "#### 1"}'], r":1: 'question' is ' '"),
        ([row(1), row("many")], r"p\.jsonl:2: the answer .*#### many.*--where"),
    ],
)
def test_line_that_is_no_problem_is_named(tmp_path, lines, message):
    with pytest.raises(EvalError, match=message):
        load_problems(write(tmp_path / "p.jsonl", *lines))


def test_unreadable_file_is_named(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b"\xff\xfe\x00")
    for name in ("p.jsonl", "none.jsonl", "."):
        with pytest.raises(EvalError, match="cannot be read"):
            load_problems(tmp_path / name)


def test_conditions_choose_lines_and_the_others_need_no_number(tmp_path):
    path = write(tmp_path / "p.jsonl", row("x", kind="a"), row(2, kind="b"), row(3))
    assert [p.line for p in load_problems(path, {"kind": ["b", "c"]})] == [2]
    with pytest.raises(EvalError, match="holds no problem where .*'z'"):
        load_problems(path, {"kind": ["z"]})


def test_examples_are_the_first_problems_and_are_not_asked(tmp_path):
    path = write(tmp_path / "p.jsonl", *map(row, range(8)))
    chosen = choose_problems(path, num_fewshot=5)
    assert [p.number for p in chosen.shots] == [0, 1, 2, 3, 4]
    assert [p.number for p in chosen.asked] == [5, 6, 7]
    assert choose_problems(path, num_fewshot=5, fewshot_path=path) == chosen
    two = choose_problems(path, num_fewshot=0, num_questions=2)
    assert ([p.number for p in two.asked], two.shots) == ([0, 1], ())


def test_examples_of_another_file_leave_all_questions(tmp_path):
    path = write(tmp_path / "p.jsonl", row(1), row(2))
    shots = write(tmp_path / "s.jsonl", *map(row, range(10, 20)))
    chosen = choose_problems(path, num_fewshot=5, fewshot_path=shots)
    assert [p.number for p in chosen.shots] == [10, 11, 12, 13, 14]
    assert [p.number for p in chosen.asked] == [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_fewshot": 3}, r"p\.jsonl: holds 3 problems, and 3 .*--fewshot-file"),
        ({"num_fewshot": 5}, r"p\.jsonl: holds 3 problems, and 5"),
        ({"num_fewshot": 1, "num_questions": 3}, r"3 questions .* only 2 problems"),
        ({"num_fewshot": 4, "fewshot_path": "p2"}, r"p2: holds 3 problems, fewer.* 4"),
    ],
)
def test_too_few_problems_are_an_error_with_the_way_out(tmp_path, options, message):
    path = write(tmp_path / "p.jsonl", row(1), row(2), row(3))
    if "fewshot_path" in options:
        other = write(tmp_path / "p2", row(4), row(5), row(6))
        options = options | {"fewshot_path": other}
    with pytest.raises(EvalError, match=message):
        choose_problems(path, **options)


def test_prompt_is_the_examples_with_answers_and_the_question(tmp_path):
    path = write(tmp_path / "p.jsonl", row(1), row(2), row(3))
    prompts = build_prompts(choose_problems(path, num_fewshot=2))
    assert prompts == [
        "Question: What is 1?\nAnswer: It is.\n#### 1\n\n"
        "Question: What is 2?\nAnswer: It is.\n#### 2\n\n"
        "Question: What is 3?\nAnswer:"
    ]


def test_braces_in_questions_and_templates_are_text(tmp_path):
    line = json.dumps({"question": "{question} {x}?", "answer": "#### 1"})
    problems = tuple(load_problems(write(tmp_path / "p.jsonl", line)))
    (prompt,) = build_prompts(ProblemSet((), problems), "{y} Q: {question} A:")
    assert prompt == "{y} Q: {question} {x}? A:"


def test_default_template_is_the_bundled_models_own_form():
    kinds = {"kind": ["arithmetic", "word_problem", "puzzle"]}
    chosen = choose_problems(HELDOUT, num_fewshot=0, where=kinds)
    rows = [json.loads(line) for line in HELDOUT.read_text().splitlines()]
    own = [r["prompt"] for r in rows if r["kind"] in kinds["kind"]]
    assert len(own) == 252 and build_prompts(chosen) == own


def test_template_needs_its_slot_once_and_its_head_ends_a_completion():
    assert check_template(DEFAULT_TEMPLATE) == DEFAULT_TEMPLATE
    for bad in ("Q: {q}", "", "{question} {question}"):
        with pytest.raises(EvalError, match="exactly once"):
            check_template(bad)
    assert stop_text(DEFAULT_TEMPLATE) == "Question:"
    assert stop_text("{question}\n") is None
