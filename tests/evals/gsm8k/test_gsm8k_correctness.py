# SPDX-License-Identifier: Apache-2.0
"""Capacity changes no answer: one config, served with its speculation and without.

On its own configs (see docs/evals.md):

    pytest tests/evals/gsm8k/test_gsm8k_correctness.py -s \\
        --config-list-file=configs/models-h200.txt --questions-file=test.jsonl
"""

import pytest

from tests.evals.gsm8k.compare import config_problems, find_problems, run_arm
from tests.evals.gsm8k.eval_config import EvalConfig
from tests.evals.gsm8k.gsm8k_eval import print_result, write_result


def test_accuracy_and_answers_are_those_without_speculation(
    config: EvalConfig, tmp_path, pytestconfig: pytest.Config
):
    problems = config_problems(
        config,
        pytestconfig.getoption("questions_file", None),
        pytestconfig.getoption("fewshot_file", None),
    )
    arms = []
    for name, speculation in (("none", False), ("capacity", True)):
        arm = run_arm(
            config, problems, speculation=speculation, log_path=tmp_path / f"{name}.log"
        )
        print_result(arm.result)
        write_result(tmp_path / f"{name}.json", arm.result, counters=arm.counters)
        arms.append(arm)
    print(f"results and server logs: {tmp_path}")
    assert find_problems(config, *arms) == []
