# SPDX-License-Identifier: Apache-2.0
"""Evaluation configs: those in the folder, and what a bad one is told."""

import json
from pathlib import Path

import pytest

from tests.evals.gsm8k.eval_config import (
    FOLDER,
    ROOT,
    load_config,
    read_config_list,
    server_command,
    without_speculation,
)
from tests.evals.gsm8k.problems import EvalError
from vllm.config.dspark_capacity import DSPARK_KEYS, DSparkCapacityConfig

CONFIGS = sorted((FOLDER / "configs").glob("*.yaml"))
LISTS = sorted((FOLDER / "configs").glob("*.txt"))
SMALL = "model_name: m\naccuracy_threshold: 0.5\nserver_args: -sc '{}'\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return path


def speculation(config) -> dict:
    args = config.server_args
    return json.loads(args[args.index("--speculative-config") + 1])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_in_the_folder_switches_capacity_on(path):
    config = load_config(path)
    keys = speculation(config)
    ours = {key: value for key, value in keys.items() if key in DSPARK_KEYS}
    capacity = DSparkCapacityConfig.from_keys(ours)
    assert capacity.enabled and keys["method"] == "dspark"
    assert keys.keys() - ours.keys() <= {"method", "model", "num_speculative_tokens"}
    mode = "mask" if "mask" in path.stem else "varlen"
    assert capacity.dspark_capacity_verification_mode == mode


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_vllm_knows_the_server_arguments(path):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    config = load_config(path)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(["--model", config.model_name, *config.server_args])
    assert parsed.speculative_config == speculation(config)


def test_every_config_is_on_a_list_and_ci_runs_the_tiny_one():
    listed = {path for names in LISTS for path in read_config_list(names)}
    assert listed == set(CONFIGS) and len(CONFIGS) == 4
    (tiny,) = read_config_list(Path("configs/models-cpu.txt"))
    config = load_config(tiny)
    assert config.rehearsal and config.equal_answers
    assert (ROOT / config.model_name).is_dir() and config.questions_file.is_file()
    assert not any(load_config(p).rehearsal for p in listed - {tiny})


def test_small_config_has_vllms_defaults(tmp_path):
    config = load_config(write(tmp_path, SMALL + "num_questions: null\n"))
    assert (config.name, config.model_name) == ("small", "m")
    assert (config.num_fewshot, config.num_questions) == (5, None)
    assert (config.tolerance, config.startup_max_wait_seconds) == (0.0, 600.0)
    assert config.server_args == ("-sc", "{}") and config.env == {}
    assert config.equal_answers and not config.rehearsal


def test_values_are_read_as_a_server_takes_them(tmp_path):
    more = "env: {A: 1, B: x}\nwhere: {level: [1, 2]}\nquestions_file: tests/q.jsonl\n"
    config = load_config(write(tmp_path, SMALL + more))
    assert config.env == {"A": "1", "B": "x"}
    assert config.where == {"level": ["1", "2"]}
    assert config.questions_file == ROOT / "tests" / "q.jsonl"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold keys and values, not None"),
        ("- a", "must hold keys and values"),
        ("a: [", "cannot be read"),
        (SMALL + "threshold: 1\n", "unknown keys threshold; known are model_name"),
        ("model_name: m\nserver_args: -sc x", "lacks the key accuracy_threshold"),
        (SMALL + "tolerance: 2", "tolerance: 2 must be a number from 0 to 1"),
        (SMALL + "tolerance: true", "tolerance: True must be a number"),
        (SMALL + "num_questions: 0", "num_questions: 0 must be an integer >= 1"),
        (SMALL + "num_fewshot: -1", "num_fewshot: -1 must be an integer >= 0"),
        (SMALL + "num_fewshot: 5.0", "num_fewshot: 5.0 must be an integer"),
        (SMALL + "concurrency: '8'", "concurrency: '8' must be an integer >= 1"),
        (SMALL + "max_tokens: 0", "max_tokens: 0 must be an integer >= 1"),
        (SMALL + "startup_max_wait_seconds: 0", "must be a number > 0"),
        (SMALL + "env: [A]", "env: .* must be a mapping of names to values"),
        (SMALL + "where: {kind: a}", "where: .* must be a mapping of keys to lists"),
        (SMALL + "equal_answers: 1", "equal_answers: 1 must be true or false"),
        (SMALL + "questions_file: 7", "questions_file: 7 must be a path"),
        (SMALL + "prompt_template: Q", "prompt_template: 'Q': .*exactly once"),
        (SMALL.replace("'{}'", "'{"), "server_args: .*No closing quotation"),
    ],
)
def test_bad_config_is_named_with_file_key_and_what_is_allowed(tmp_path, text, message):
    with pytest.raises(EvalError, match=rf"small\.yaml: .*{message}"):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize(
    "flags",
    [
        ("--speculative-config", '{"a": 1}'),
        ('--speculative-config={"a": 1}',),
        ("--speculative_config", '{"a": 1}'),
        ("-sc", '{"a": 1}'),
    ],
)
def test_speculation_is_taken_out_in_every_spelling(flags):
    assert without_speculation(("--x", "1", *flags, "--y")) == ("--x", "1", "--y")


def test_config_without_speculation_has_nothing_to_compare():
    with pytest.raises(EvalError, match="has no --speculative-config"):
        without_speculation(("--x", "1"))


def test_servers_differ_in_the_speculation_only():
    config = load_config(FOLDER / "configs" / "Qwen3-8B-DSpark.yaml")
    plain = server_command(config, port=7, speculation=False)
    capacity = server_command(config, port=7, speculation=True)
    index = capacity.index("--speculative-config")
    assert capacity[:index] + capacity[index + 2 :] == plain
    assert plain[plain.index("--port") + 1] == "7"
    assert "vllm.entrypoints.openai.api_server" in plain


def test_only_the_rehearsal_gets_the_fast_interpreter():
    tiny = load_config(FOLDER / "configs" / "tiny-dspark.yaml")
    for on in (False, True):
        command = server_command(tiny, port=7, speculation=on)
        assert "tests.helpers.fast_server" in command


def test_list_is_found_here_or_beside_the_module(tmp_path):
    (tmp_path / "a.yaml").write_text(SMALL)
    names = tmp_path / "models.txt"
    names.write_text("# mine\n\na.yaml  # small\n")
    assert read_config_list(names) == [tmp_path / "a.yaml"]
    for text, message in (("# none\n", "lists no config"), ("b.yaml", "b.yaml is not")):
        names.write_text(text)
        with pytest.raises(EvalError, match=message):
            read_config_list(names)
    with pytest.raises(EvalError, match="no such file, here or in"):
        read_config_list(tmp_path / "none.txt")
