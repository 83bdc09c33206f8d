# SPDX-License-Identifier: Apache-2.0
"""Traffic is a pure function of the seed and has the asked shape."""

import argparse
from itertools import pairwise

import numpy as np
import pytest

from benchmarks import sweep_concurrency
from benchmarks.sweep.options import length_range, loads_of
from benchmarks.sweep.traffic import (
    CHURN_ABORTED,
    LengthRange,
    Traffic,
    make_request,
)

PROMPT, OUTPUT = LengthRange(8, 39), LengthRange(1, 4)


def test_a_request_depends_on_seed_and_number_alone():
    steady = Traffic("steady", 10, (4,))
    assert steady.request(9, PROMPT, OUTPUT, 3) == make_request(9, PROMPT, OUTPUT, 3)
    made = [make_request(n, PROMPT, OUTPUT, 3) for n in range(50)]
    assert made == [make_request(n, PROMPT, OUTPUT, 3) for n in range(50)]
    assert len({r.seed for r in made}) == 50
    assert make_request(0, PROMPT, OUTPUT, 4).seed not in {r.seed for r in made}


def test_lengths_cover_their_range():
    made = [make_request(n, PROMPT, OUTPUT, 0) for n in range(2000)]
    assert {r.prompt_len for r in made} == set(range(8, 40))
    assert {r.output_len for r in made} == {1, 2, 3, 4}
    assert LengthRange(5, 5).draw(0.999) == 5


def test_first_requests_of_a_steady_load_end_staggered():
    load = Traffic("steady", 10, (4,))
    lengths = [
        load.request(n, PROMPT, LengthRange(100, 100), 0).output_len for n in range(6)
    ]
    assert lengths == [25, 50, 75, 100, 100, 100]


def test_arrivals_are_poisson_at_the_rate():
    load = Traffic("open", 2000, arrival_rate=5.0)
    times = load.arrivals_s(seed=1)
    gaps = np.diff(times)
    assert times[-1] < 2000 and (gaps > 0).all()
    assert len(times) == pytest.approx(10_000, rel=0.04)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential
    np.testing.assert_array_equal(times, load.arrivals_s(seed=1))
    assert len(Traffic("open", 2000, (), 5.0, 7).arrivals_s(1)) == 7


def test_levels_of_a_step_change():
    load = Traffic("change", 10, (4, 256, 4))
    assert [load.in_flight(t, 0) for t in (0, 9.9, 10, 19.9, 20, 31)] == [
        *(4, 4, 256, 256, 4, 4)
    ]
    assert load.end_s == 30


def test_churn_bursts_and_repeats_every_minute():
    load = Traffic("churn", 600, (64,))
    levels = [load.in_flight(t, 2) for t in np.arange(0, 600, 1.5)]
    assert min(levels) < 8 and max(levels) > 40 and max(levels) <= 64
    assert levels[:40] == levels[40:80] == levels[-40:]  # 60 s each
    assert Traffic("churn", 30, (64,)).window_s == 10
    made = [load.request(n, PROMPT, LengthRange(10, 90), 2) for n in range(3000)]
    aborted = [r for r in made if r.abort_after]
    assert len(aborted) / 3000 == pytest.approx(CHURN_ABORTED, abs=0.02)
    assert all(1 <= r.abort_after <= r.output_len for r in aborted)


def test_length_option():
    assert length_range("64") == LengthRange(64, 64)
    assert length_range("8-39") == PROMPT
    for bad in ("9-8", "0", "a", "8-", "-8"):
        with pytest.raises(argparse.ArgumentTypeError):
            length_range(bad)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ([], [None, None]),
        (["--steady", "--concurrency", "2,4"], ["steady", "steady"]),
        (["--arrival-rate", "1.5"], ["open"]),
        (["--step-change", "4,32,4"], ["change"]),
        (["--churn", "16"], ["churn"]),
        (
            "--steady --concurrency 2 --churn 4 --step-change 4,8 --arrival-rate 1,2",
            ["steady", "open", "open", "change", "churn"],
        ),
        (["--concurrency", "2", "--churn", "4"], [None, "churn"]),
    ],
)
def test_options_choose_the_traffic(options, kinds):
    if isinstance(options, str):
        options = options.split()
    args = sweep_concurrency.parse_args(options)
    assert [t.kind if t else None for _, _, t in loads_of(args)] == kinds
    labels = [str(label) for label, *_ in args.levels]
    assert all(a != b for a, b in pairwise(labels))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--steady", "--churn", "4"], "needs --concurrency"),
        (["--step-change", "4"], "at least two"),
        (["--step-change", "4,8", "--seconds", "3"], "at least 4"),
        (["--churn", "999"], "999"),
        (["--arrival-rate", "0"], "'0'"),
        (["--prompt-len", "40-30"], "40-30"),
        (["--output-len", "5000"], "--max-model-len"),
        (["--seconds", "inf"], "inf"),
    ],
)
def test_bad_traffic_is_a_usage_error(options, named, capsys):
    with pytest.raises(SystemExit) as exit_:
        sweep_concurrency.parse_args(options)
    assert exit_.value.code == 2
    assert named in capsys.readouterr().err
