# SPDX-License-Identifier: Apache-2.0
"""The runner against a small fake server: figures, failures, usage, result files."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from tests.evals.gsm8k import gsm8k_eval
from tests.evals.gsm8k.gsm8k_eval import main
from tests.tools.fake_openai_server import FakeEngine, in_thread
from tools.demo.server import free_port

NUM_SHOTS, NUM_ASKED = 5, 10


class Solver(FakeEngine):
    """Answers problem n with n, but for those that it is told to treat otherwise."""

    def __init__(self, texts=None, failing=(), **options):
        super().__init__(capacity=False, **options)
        self.texts, self.failing = texts or {}, failing
        self.finish_reason = "stop"

    @staticmethod
    def asked(body: dict) -> int:
        return int(re.findall(r"What is (\d+)\?", body["prompt"])[-1])

    def _tokens(self, body: dict) -> list[int]:
        n = self.asked(body)
        return list(map(ord, self.texts.get(n, f" It is {n}.\n#### {n}")))

    async def complete(self, request: web.Request) -> web.Response:
        if self.asked(await request.json()) in self.failing:
            return web.json_response({"error": {"message": "no memory"}}, status=503)
        return await super().complete(request)


@dataclass
class Run:
    status: int
    out: str
    err: str
    path: Path

    @property
    def record(self) -> dict:
        return json.loads(self.path.read_text())


@pytest.fixture
def questions(tmp_path) -> Path:
    path = tmp_path / "test.jsonl"
    rows = (
        {"question": f"What is {n}?", "answer": f"It is.\n#### {n}"}
        for n in range(NUM_SHOTS + NUM_ASKED)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def evaluate(tmp_path, questions, capsys):
    """Run main() against an engine or at an address."""

    def run(engine: FakeEngine | str, *options: str) -> Run:
        path = tmp_path / "out" / "result.json"

        def at(url: str) -> Run:
            argv = [str(questions), "--base-url", f"{url}/v1", "--out", str(path)]
            status = main([*argv, *options])
            return Run(status, *capsys.readouterr(), path)

        if isinstance(engine, str):
            return at(engine)
        with in_thread(engine.app()) as url:
            return at(url)

    return run


# --- figures ------------------------------------------------------------------------


def test_accuracy_is_exact_match_with_a_wilson_interval(evaluate):
    wrong = {6: " #### 7", 9: " It is 9."}
    run = evaluate(Solver(wrong))
    assert run.status == 0
    record = run.record
    assert (record["schema"], record["version"]) == ("vllm-dspark-gsm8k", 1)
    assert (record["num_questions"], record["num_answered"]) == (10, 10)
    assert (record["accuracy"], record["num_correct"]) == (0.8, 8)
    interval = record["confidence_interval"]
    # By hand: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), z = 1.96.
    assert interval["low"] == pytest.approx(0.4902, abs=1e-4)
    assert interval["high"] == pytest.approx(0.9433, abs=1e-4)
    assert record["num_without_number"] == 1
    assert "accuracy 0.8000 (8 of 10), 95% interval 0.4902 to 0.9433" in run.out
    assert "1 answers without '#### number'" in run.out


def test_result_keeps_every_question_in_order(evaluate):
    record = evaluate(Solver({6: " #### 7"}), "--concurrency", "4").record
    asked = record["questions"]
    assert [q["line"] for q in asked] == list(range(6, 16))
    assert [q["expected"] for q in asked] == [str(n) for n in range(5, 15)]
    assert [q["line"] for q in asked if not q["correct"]] == [7]
    assert (asked[1]["found"], asked[1]["text"]) == ("7", " #### 7")
    assert record["settings"]["concurrency"] == 4
    assert record["num_fewshot"] == 5 and record["repro"]


def test_right_spelling_of_a_number_does_not_matter(evaluate):
    assert evaluate(Solver({7: " #### $7.00."})).record["accuracy"] == 1.0


def test_answers_that_were_cut_off_are_counted(evaluate):
    engine = Solver({7: " It is"})
    engine.finish_reason = "length"
    run = evaluate(engine)
    assert run.record["num_cut_off"] == NUM_ASKED
    assert "cut off at --max-tokens" in run.out


def test_requests_are_greedy_and_show_five_examples(evaluate):
    engine = Solver()
    evaluate(engine, "--max-tokens", "99")
    assert len(engine.requests) == NUM_ASKED
    for body in engine.requests:
        assert (body["temperature"], body["max_tokens"]) == (0.0, 99)
        assert body["stop"] == ["Question:"]
        assert body["prompt"].count("####") == NUM_SHOTS
        assert body["prompt"].endswith("\nAnswer:")


def test_template_of_the_user_is_used_with_its_line_breaks(evaluate):
    engine = Solver()
    evaluate(engine, "--num-fewshot", "0", "--prompt-template", "Q {question}\\nA")
    assert len(engine.requests) == NUM_SHOTS + NUM_ASKED
    assert engine.requests[0]["prompt"] == "Q What is 0?\nA"
    assert engine.requests[0]["stop"] == ["Q"]


@pytest.mark.parametrize("concurrency", [1, 3, 10])
def test_concurrency_is_reached_and_never_passed(evaluate, concurrency):
    engine = Solver(delay_s=0.05)
    evaluate(engine, "--concurrency", str(concurrency))
    assert engine.max_in_flight == concurrency


def test_progress_goes_to_stderr(evaluate):
    run = evaluate(Solver())
    assert re.search(r"gsm8k: 100%.*10/10", run.err)
    assert "gsm8k:" not in run.out


# --- failures -----------------------------------------------------------------------


def test_failed_requests_are_named_and_not_scored_as_wrong(evaluate):
    run = evaluate(Solver({6: " #### 0"}, failing=(8, 11)))
    assert run.status == 1
    record = run.record
    assert (record["num_errors"], record["num_answered"]) == (2, 8)
    assert record["accuracy"] == 7 / 8
    ((error, count),) = record["errors"].items()
    assert count == 2 and "InternalServerError" in error and "no memory" in error
    failed = [q for q in record["questions"] if q["error"]]
    assert [q["line"] for q in failed] == [9, 12]
    assert {q["correct"] for q in failed} == {None}
    assert "FAILED 2 requests, not scored: InternalServerError" in run.out


def test_answer_that_is_no_completion_is_a_failed_request(evaluate):
    class Odd(Solver):
        async def complete(self, request: web.Request) -> web.Response:
            if self.asked(await request.json()) == 9:
                return web.Response(text="<html>busy</html>", content_type="text/html")
            return await super().complete(request)

    run = evaluate(Odd())
    assert run.status == 1 and run.record["num_errors"] == 1
    assert "no completion, but '<html>busy" in run.out


@pytest.mark.parametrize(
    ("failing", "options", "message"),
    [
        (range(15), (), "no question was answered: 10 failed requests: 10 x Internal"),
        (range(8), ("--max-errors", "3"), "given up after 3 failed requests: 3 x"),
    ],
)
def test_evaluation_without_figures_leaves_the_old_result(
    evaluate, tmp_path, failing, options, message
):
    old = tmp_path / "out" / "result.json"
    old.parent.mkdir()
    old.write_text("old")
    run = evaluate(Solver(failing=failing), *options)
    assert run.status == 1
    assert message in run.err and "no memory" in run.err
    assert "no result was written" in run.err
    assert [p.read_text() for p in old.parent.iterdir()] == ["old"]


def test_slow_server_ends_in_a_timeout_that_is_named(evaluate):
    engine = Solver(delay_s=30)
    run = evaluate(engine, "--request-timeout", "0.2", "--max-errors", "2")
    assert run.status == 1 and "2 x APITimeoutError" in run.err


def test_unreachable_server_is_named_before_anything_is_asked(evaluate):
    url = f"http://127.0.0.1:{free_port()}"
    run = evaluate(url)
    assert run.status == 1 and not run.path.exists()
    assert f"FAILED {url}/v1/models: APIConnectionError" in run.err
    assert "Is the server up" in run.err


@pytest.mark.parametrize("answer", ["html", "json", "missing"])
def test_another_kind_of_server_is_named(evaluate, answer):
    async def respond(request: web.Request) -> web.Response:
        if answer == "html":
            return web.Response(text="<html>hello</html>", content_type="text/html")
        return web.json_response({"hello": 1})

    app = web.Application()
    if answer != "missing":
        app.router.add_get("/v1/models", respond)
    with in_thread(app) as url:
        run = evaluate(url)
    assert run.status == 1 and not run.path.exists()
    assert f"{url}/v1/models: " in run.err and "end with its /v1" in run.err


def test_model_must_be_one_that_is_served(evaluate):
    engine = Solver()
    engine.model_names = ["one", "two"]
    for options in ((), ("--model", "three")):
        run = evaluate(engine, *options)
        assert run.status == 1 and "serves one, two; choose one of those" in run.err
    assert engine.requests == []
    assert evaluate(engine, "--model", "two").record["model"] == "two"
    assert {body["model"] for body in engine.requests} == {"two"}


def test_interrupted_evaluation_writes_nothing(evaluate, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gsm8k_eval, "run", interrupt)
    run = evaluate("http://127.0.0.1:1")
    assert (run.status, run.path.exists()) == (130, False)
    assert "interrupted; no result was written" in run.err


def test_key_is_sent_but_not_written(evaluate, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    seen = set()

    class Locked(Solver):
        async def complete(self, request: web.Request) -> web.Response:
            seen.add(request.headers["Authorization"])
            return await super().complete(request)

    run = evaluate(Locked())
    assert seen == {"Bearer sesame"}
    assert "sesame" not in run.path.read_text() + run.out + run.err


# --- usage --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--concurrency", "0"], "'0' must be an integer >= 1"),
        (["--concurrency", "-4"], "'-4' must be an integer >= 1"),
        (["--num-fewshot", "-1"], "'-1' must be an integer >= 0"),
        (["--num-questions", "0"], "'0' must be an integer >= 1"),
        (["--max-tokens", "x"], "'x' must be an integer >= 1"),
        (["--request-timeout", "0"], "'0' must be a number > 0"),
        (["--max-errors", "0"], "'0' must be an integer >= 1"),
        (["--out", "."], "is a directory"),
        (["--out", "/dev/null/x.json"], "cannot be written"),
        (["--base-url", "localhost:8000"], "such as http://127.0.0.1:8000/v1"),
        (["--prompt-template", "Q:"], "must hold {question} exactly once"),
        (["--where", "kind"], "'kind' must be KEY=VALUE"),
        (["--where", "kind=list"], "holds no problem where {'kind': ['list']}"),
        (["--fewshot-file", "no/such.jsonl"], "'no/such.jsonl' is not a file"),
        (["--num-questions", "11"], "only 10 problems can be asked"),
        (["--num-fewshot", "15"], "holds 15 problems, and 15 of them"),
    ],
)
def test_wrong_usage_ends_with_status_2_and_is_named(
    questions, options, message, capsys
):
    with pytest.raises(SystemExit) as error:
        main([str(questions), *options])
    assert error.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_bad_question_files_are_wrong_usage(tmp_path, questions, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(questions.read_text() + "{oops\n")
    for path, message in (
        (bad, f"{bad}:16: not JSON"),
        (tmp_path / "none.jsonl", "is not a file"),
        (tmp_path, "is not a file"),
    ):
        with pytest.raises(SystemExit) as error:
            main([str(path)])
        assert error.value.code == 2
        assert message in capsys.readouterr().err


def test_conditions_on_one_key_add_up():
    args = gsm8k_eval.build_parser().parse_args(
        [__file__, "--where", "kind=a,b", "--where", "kind=c", "--where", "level=1"]
    )
    where = gsm8k_eval.merge_conditions(args.where)
    assert where == {"kind": ["a", "b", "c"], "level": ["1"]}


def test_runs_as_a_program_from_anywhere(tmp_path):
    done = subprocess.run(
        [sys.executable, gsm8k_eval.__file__, "none.jsonl"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "'none.jsonl' is not a file" in done.stderr
