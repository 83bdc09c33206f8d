# SPDX-License-Identifier: Apache-2.0
"""The comparison itself: it fails when one answer differs, and for nothing less."""

import sys
from dataclasses import replace
from decimal import Decimal

import pytest

from tests.evals.gsm8k import compare
from tests.evals.gsm8k.compare import Arm, config_problems, find_problems, run_arm
from tests.evals.gsm8k.eval_config import FOLDER, EvalConfig, load_config
from tests.evals.gsm8k.evaluation import EvalResult, Outcome
from tests.evals.gsm8k.problems import EvalError, Problem
from tests.tools import fake_openai_server
from tools.demo.client import Completion
from tools.demo.errors import DemoError

TRIMMED = {"drafted": 70.0, "verified": 50.0, "active_steps": 9.0, "fixed_steps": 1.0}
CONFIG = EvalConfig(
    name="c", model_name="m", accuracy_threshold=0.75, server_args=("-sc", "{}")
)


def arm(*texts: str | None, counters=None) -> Arm:
    """Question n has the answer n; None is a request that failed."""
    outcomes = []
    for n, text in enumerate(texts):
        problem = Problem(n + 1, f"q{n}", f"#### {n}", Decimal(n))
        completion = text and Completion(text, None, "stop", 3)
        outcomes.append(Outcome(problem, completion, None if text else "Boom"))
    return Arm(EvalResult("m", tuple(outcomes), 1.0), counters)


RIGHT = ("#### 0", "#### 1", "#### 2", "#### 3")


def with_text(index: int, text: str | None) -> Arm:
    texts = list(RIGHT)
    texts[index] = text
    return arm(*texts, counters=TRIMMED)


def test_equal_answers_above_the_threshold_pass():
    assert find_problems(CONFIG, arm(*RIGHT), arm(*RIGHT, counters=TRIMMED)) == []


@pytest.mark.parametrize(
    ("text", "number"), [("#### 9", "9"), ("so #### 2", "2"), ("two", "None")]
)
def test_one_answer_that_differs_fails_and_is_named(text, number):
    (problem,) = find_problems(CONFIG, arm(*RIGHT), with_text(2, text))
    assert problem.startswith(f"line 3: 2 without speculation, {number} with capacity")
    assert repr(text) in problem


def test_equal_but_wrong_answers_are_equal():
    plain = arm("#### 8", *RIGHT[1:])
    assert find_problems(CONFIG, plain, with_text(0, "#### 8")) == []


def test_request_that_failed_is_a_problem_in_either_arm():
    config = replace(CONFIG, accuracy_threshold=0.0)
    failed = find_problems(config, arm(*RIGHT), with_text(1, None))
    assert failed == [
        "capacity: 1 requests failed: Boom",
        "line 2: one server did not answer",
    ]
    plain = arm(None, *RIGHT[1:])
    assert len(find_problems(config, plain, with_text(0, "#### 0"))) == 2


def test_accuracy_counts_in_both_arms_and_the_tolerance_is_used():
    low = ("#### 9", "#### 9", *RIGHT[2:])
    both = find_problems(CONFIG, arm(*low), arm(*low, counters=TRIMMED))
    assert both == [
        "no speculation: accuracy 0.5000 < 0.7500",
        "capacity: accuracy 0.5000 < 0.7500",
    ]
    config = replace(CONFIG, tolerance=0.25)
    assert find_problems(config, arm(*low), arm(*low, counters=TRIMMED)) == []


def test_low_precision_configs_compare_accuracy_only():
    config = replace(CONFIG, equal_answers=False)
    assert find_problems(config, arm(*RIGHT), with_text(2, "so #### 2")) == []
    wrong = arm("#### 9", "#### 9", *RIGHT[2:], counters=TRIMMED)
    (problem,) = find_problems(config, arm(*RIGHT), wrong)
    assert problem.startswith("capacity: accuracy")


@pytest.mark.parametrize(
    "change", [{"active_steps": 0.0}, {"verified": 70.0}], ids=["never", "untrimmed"]
)
def test_capacity_that_trimmed_nothing_fails(change):
    idle = arm(*RIGHT, counters=TRIMMED | change)
    (problem,) = find_problems(CONFIG, arm(*RIGHT), idle)
    assert problem.startswith("capacity trimmed nothing") and "concurrency" in problem


# --- with servers -------------------------------------------------------------------


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """Run both arms of the tiny config on fake servers, one with a fault."""
    tiny = load_config(FOLDER / "configs" / "tiny-dspark.yaml")
    # The fake repeats the question: no answer is right, but all are there.
    config = replace(tiny, accuracy_threshold=0.0, startup_max_wait_seconds=30.0)
    problems = config_problems(config, None, None)

    def run(fault: str):
        def command(config, *, port, speculation):
            arguments = ["--capacity", "--fault", fault] if speculation else []
            fake = fake_openai_server.__file__
            return [sys.executable, fake, "--port", str(port), *arguments]

        monkeypatch.setattr(compare, "server_command", command)
        arms = [
            run_arm(config, problems, speculation=on, log_path=tmp_path / f"{on}.log")
            for on in (False, True)
        ]
        return find_problems(config, *arms)

    return run


def test_servers_that_answer_alike_pass(compared):
    assert compared("none") == []


def test_server_with_one_answer_of_its_own_fails(compared):
    (problem,) = compared("differ-once")
    assert problem.startswith("line ") and "with capacity; ends" in problem


def test_server_that_never_activates_capacity_fails(compared):
    (problem,) = compared("never-active")
    assert problem.startswith("capacity trimmed nothing")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("exit", "server 'tiny-dspark, capacity': exited with status 1"),
        ("die-later", "server 'tiny-dspark, capacity'"),
        ("no-counters", "/metrics lacks"),
    ],
)
def test_server_that_fails_is_named_with_its_log(compared, fault, message):
    with pytest.raises(DemoError, match=message):
        compared(fault)


def test_way_out_of_a_slow_start_is_the_configs_key(tmp_path, monkeypatch):
    tiny = load_config(FOLDER / "configs" / "tiny-dspark.yaml")
    config = replace(tiny, startup_max_wait_seconds=1.0)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(compare, "server_command", lambda *_, **__: sleep)
    problems = config_problems(config, None, None)
    with pytest.raises(DemoError, match="not ready .*startup_max_wait_seconds"):
        run_arm(config, problems, speculation=False, log_path=tmp_path / "log")


def test_questions_of_a_config_come_before_the_callers(tmp_path):
    tiny = load_config(FOLDER / "configs" / "tiny-dspark.yaml")
    own = config_problems(tiny, tmp_path / "none.jsonl", tmp_path / "none.jsonl")
    assert len(own.asked) == tiny.num_questions >= 12
    with pytest.raises(EvalError, match="c: no questions; .*--questions-file"):
        config_problems(CONFIG, None, None)
    with pytest.raises(EvalError, match="mine.jsonl: cannot be read"):
        config_problems(CONFIG, tmp_path / "mine.jsonl", None)
