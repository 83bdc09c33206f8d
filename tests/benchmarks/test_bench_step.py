# SPDX-License-Identifier: Apache-2.0
"""The benchmark of an active step: its parts run, and counts tell work apart."""

import pytest

from benchmarks.bench_step import (
    PARTS,
    PERIOD,
    CudaCalls,
    Step,
    count_step,
    parse_args,
    time_parts,
)


@pytest.fixture
def cuda():
    calls = CudaCalls()
    with calls.patches():
        yield calls


def settled(case, cuda, num_reqs=8, k=5):
    step = Step(case, num_reqs, k, seed=0)
    cuda.step_ms = step.tabled_ms
    for _ in range(2 * PERIOD):
        step.run()
    return step


@pytest.mark.parametrize("case", ["all", "trims"])
def test_every_part_of_a_case_runs_and_is_timed(case, cuda):
    between = []
    took = time_parts(settled(case, cuda), lambda: between.append(1))
    assert tuple(took) == PARTS and len(between) == len(PARTS)
    assert min(took.values()) > 0.0


def test_a_case_that_plans_otherwise_is_an_error(cuda):
    step = settled("all", cuda)
    step._case = "trims"
    with pytest.raises(RuntimeError, match="'trims' planned"):
        step.check()


@pytest.mark.parametrize("kind", ["calls", "torch operators"])
def test_trimming_is_more_work(kind, cuda):
    most = []
    for case in ("all", "trims"):
        step = settled(case, cuda)
        most.append(max(count_step(step, cuda, kind) for _ in range(PERIOD)))
    few, many = most
    assert 0 < few < many


def test_defaults():
    args = parse_args([])
    assert args.depth == 7 and args.num_reqs == [32, 256]
