# SPDX-License-Identifier: Apache-2.0
"""Evaluation configs: YAML files in the form of vLLM's own, checked strictly.

vLLM's keys mean what they mean there; `tolerance` is 0 unless given. Keys that vLLM
does not have say which problems are asked and how two servers are compared. Relative
paths in a config belong to the repository's root, where the servers run.
"""

import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.evals.gsm8k.problems import DEFAULT_TEMPLATE, EvalError, check_template

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(__file__).resolve().parent
_SPECULATION = ("--speculative-config", "--speculative_config", "-sc")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """One model, how it is served, what it is asked and how good it must be."""

    name: str
    """The file's name without its ending."""
    model_name: str
    """What is served: a name on the Hugging Face hub, or a directory."""
    accuracy_threshold: float
    """Least accuracy, 0 to 1, of every server."""
    tolerance: float = 0.0
    """How far below the threshold is still good."""
    num_questions: int | None = None
    """Problems asked; null is all."""
    num_fewshot: int = 5
    server_args: tuple[str, ...]
    """Arguments of `vllm serve`, the speculation among them."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of the servers."""
    startup_max_wait_seconds: float = 600.0
    questions_file: Path | None = None
    """JSON lines; null: the caller's."""
    fewshot_file: Path | None = None
    """Where the examples come from; null: the caller's, else the first questions."""
    where: dict[str, list[str]] = field(default_factory=dict)
    """Lines to keep, by key."""
    prompt_template: str = DEFAULT_TEMPLATE
    max_tokens: int = 512
    concurrency: int = 32
    equal_answers: bool = True
    """Whether each answer must be the one without speculation. Exact where batches of
    every shape round alike, as in float32; low precision breaks ties differently."""

    @property
    def rehearsal(self) -> bool:
        """Whether the servers run on a CPU, under Triton's interpreter."""
        return self.env.get("VLLM_DSPARK_CPU_REHEARSAL") == "1"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_int(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_scalar_map(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(key, str) and isinstance(item, (str, int, float))
        for key, item in value.items()
    )


def _is_list_map(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(items, list) and items for items in value.values()
    )


# Key -> what it must be, in a test and in words.
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model_name": (_is_text, "a text"),
    "accuracy_threshold": (_is_share, "a number from 0 to 1"),
    "tolerance": (_is_share, "a number from 0 to 1"),
    "num_questions": (_is_int(1), "an integer >= 1"),
    "num_fewshot": (_is_int(0), "an integer >= 0"),
    "server_args": (_is_text, "a text, as on the command line of vllm serve"),
    "env": (_is_scalar_map, "a mapping of names to values"),
    "startup_max_wait_seconds": (
        lambda value: _is_number(value) and 0 < value < math.inf,
        "a number > 0",
    ),
    "questions_file": (_is_text, "a path"),
    "fewshot_file": (_is_text, "a path"),
    "where": (_is_list_map, "a mapping of keys to lists of values"),
    "prompt_template": (_is_text, "a text"),
    "max_tokens": (_is_int(1), "an integer >= 1"),
    "concurrency": (_is_int(1), "an integer >= 1"),
    "equal_answers": (lambda value: isinstance(value, bool), "true or false"),
}
_NEEDED = ("model_name", "accuracy_threshold", "server_args")
_READERS: dict[str, Callable[[Any], Any]] = {
    "questions_file": lambda text: ROOT / text,
    "fewshot_file": lambda text: ROOT / text,
    "env": lambda env: {name: str(value) for name, value in env.items()},
    "where": lambda where: {k: [str(v) for v in vs] for k, vs in where.items()},
    "prompt_template": check_template,
    "server_args": lambda text: tuple(shlex.split(text)),
}


def load_config(path: Path) -> EvalConfig:
    """Read one config.

    Raises:
        EvalError: the file, a key or a value is wrong; the message names it.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EvalError(f"{path}: cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise EvalError(f"{path}: must hold keys and values, not {raw!r}")
    unknown = sorted(str(key) for key in raw.keys() - _CHECKS.keys())
    if unknown:
        raise EvalError(
            f"{path}: unknown keys {', '.join(unknown)}; known are {', '.join(_CHECKS)}"
        )
    # A null leaves a key at its default.
    given = {key: value for key, value in raw.items() if value is not None}
    for key in _NEEDED:
        if key not in given:
            raise EvalError(f"{path}: lacks the key {key}, {_CHECKS[key][1]}")
    try:
        values = {key: _read(key, value) for key, value in given.items()}
    except ValueError as error:
        raise EvalError(f"{path}: {error}") from error
    return EvalConfig(name=path.stem, **values)


def _read(key: str, value: Any) -> Any:
    fits, words = _CHECKS[key]
    if not fits(value):
        raise ValueError(f"{key}: {value!r} must be {words}")
    try:
        return _READERS.get(key, lambda value: value)(value)
    except (ValueError, EvalError) as error:
        raise ValueError(f"{key}: {value!r}: {error}") from error


def read_config_list(path: Path) -> list[Path]:
    """Return the configs that a file lists: one name a line, # begins a comment.

    Args:
        path: the list; where it is not there, it is looked for beside this module.
            The names are relative to the list.

    Raises:
        EvalError: the list or a config is not there, or it lists none.
    """
    found = next((p for p in (path, FOLDER / path) if p.is_file()), None)
    if found is None:
        raise EvalError(f"--config-list-file {path}: no such file, here or in {FOLDER}")
    lines = (line.partition("#")[0] for line in found.read_text().splitlines())
    configs = [found.parent / line.strip() for line in lines if line.strip()]
    if not configs:
        raise EvalError(f"--config-list-file {found}: lists no config")
    for config in configs:
        if not config.is_file():
            raise EvalError(f"--config-list-file {found}: {config} is not a file")
    return configs


def without_speculation(server_args: tuple[str, ...]) -> tuple[str, ...]:
    """Return server arguments without --speculative-config and its value.

    Raises:
        EvalError: there is none, so nothing to compare.
    """
    kept, skip = [], False
    for arg in server_args:
        if not skip and arg.partition("=")[0] not in _SPECULATION:
            kept.append(arg)
        skip = not skip and arg in _SPECULATION
    if len(kept) == len(server_args):
        raise EvalError(
            f"server_args: {shlex.join(server_args)!r} has no --speculative-config "
            "JSON, so there is no speculation to compare"
        )
    return tuple(kept)


def server_command(config: EvalConfig, *, port: int, speculation: bool) -> list[str]:
    """Return the command line that serves a config, with or without speculation.

    Raises:
        EvalError: the config has no speculation.
    """
    plain = without_speculation(config.server_args)
    module = "vllm.entrypoints.openai.api_server"
    if config.rehearsal:  # the interpreter is slow; what it computes does not change
        module = "tests.helpers.fast_server"
    return [
        *(sys.executable, "-m", module),
        *("--model", config.model_name, "--host", "127.0.0.1", "--port", str(port)),
        "--disable-uvicorn-access-log",
        *(config.server_args if speculation else plain),
    ]
