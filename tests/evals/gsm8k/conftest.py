# SPDX-License-Identifier: Apache-2.0
"""Options of the evaluations; they need this folder on the command line."""

from pathlib import Path

import pytest

from tests.evals.gsm8k.eval_config import FOLDER, load_config, read_config_list
from tests.evals.gsm8k.problems import EvalError

DEFAULT_CONFIG = FOLDER / "configs" / "tiny-dspark.yaml"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gsm8k")
    group.addoption(
        "--config-list-file",
        type=Path,
        help="configs to evaluate, one a line (default: tiny-dspark.yaml)",
    )
    group.addoption(
        "--questions-file",
        type=Path,
        help="JSON lines of question and answer, for configs that name none",
    )
    group.addoption(
        "--fewshot-file",
        type=Path,
        help="examples for those configs (default: the first questions)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a config; where it can run is a matter of its servers."""
    if "config" not in metafunc.fixturenames:
        return
    listed = metafunc.config.getoption("config_list_file", None)
    try:
        paths = read_config_list(listed) if listed else [DEFAULT_CONFIG]
        configs = [load_config(path) for path in paths]
    except EvalError as error:
        raise pytest.UsageError(str(error)) from error
    metafunc.parametrize(
        "config",
        [
            pytest.param(
                config,
                id=config.name,
                marks=pytest.mark.engine if config.rehearsal else pytest.mark.gpu,
            )
            for config in configs
        ],
    )
