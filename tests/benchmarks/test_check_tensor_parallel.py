# SPDX-License-Identifier: Apache-2.0
"""Which outcomes of the rank check are findings."""

import pytest

from benchmarks.check_tensor_parallel import judge, parse_args

ARGS = parse_args([])
MISMATCH = "RuntimeError: tensor-parallel ranks disagree in step 14"


def churn(active, drifted):
    ranks = [{"num_active": active, "num_drifted": 0}]
    return {
        "churn": {"by_rank": ranks + [{"num_active": active, "num_drifted": drifted}]}
    }


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("drift", churn(9, 9)),
        ("lost-broadcast", {"start": {}, "error": MISMATCH}),
        ("orders", {"start": {}}),
    ],
)
def test_what_should_happen_is_no_finding(name, phases):
    assert judge(name, phases, ARGS) is None


@pytest.mark.parametrize(
    ("name", "phases", "finding"),
    [
        ("drift", churn(0, 0), "no step was active"),
        ("drift", churn(9, 8), "did not drift"),
        ("drift", {"error": MISMATCH}, "it failed"),
        ("lost-broadcast", churn(9, 9), "did not notice"),
        ("lost-broadcast", {"error": "out of memory"}, "not by the check"),
        ("orders", {"error": "x"}, "it failed"),
        ("orders", {"hang": True}, "no answer"),
        ("lost-broadcast", {"hang": True}, "no answer"),
    ],
)
def test_everything_else_is_a_finding(name, phases, finding):
    assert finding in judge(name, phases, ARGS)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--scenarios", "drift,odd"], "'odd'"),
        (["--tensor-parallel-size", "1"], "'1'"),
        (["--max-num-seqs", "8"], "'8'"),
        (["--phase-limit-s", "0"], "'0'"),
    ],
)
def test_bad_options_are_named(options, named, capsys):
    with pytest.raises(SystemExit):
        parse_args(options)
    assert named in capsys.readouterr().err
