# SPDX-License-Identifier: Apache-2.0
"""Bad options of the benchmarks are usage errors that name the value."""

import json

import pytest

from benchmarks import (
    bench_planner,
    bench_step,
    check_lossless,
    plot,
    plot_calibration,
    simulate_capacity,
    sweep_concurrency,
)
from benchmarks.calibration import read_record
from benchmarks.kernels import bench_admission
from benchmarks.simulator import recorded
from tests.helpers.paths import RESULTS

SWEEP, PLANNER = sweep_concurrency.parse_args, bench_planner.parse_args
ADMISSION, LOSSLESS = bench_admission.parse_args, check_lossless.parse_args


@pytest.mark.parametrize(
    ("parse", "options", "named"),
    [
        (SWEEP, ["--concurrency", "a,b"], "'a'"),
        (SWEEP, ["--concurrency", "8,"], "''"),
        (SWEEP, ["--concurrency", "0"], "'0'"),
        (SWEEP, ["--arms", "fixed"], "'fixed'"),
        (SWEEP, ["--rates", "0.5,x"], "'x'"),
        (SWEEP, ["--rates", "0.5,0.6,0.4,0.3,0.2,0.1,0.05"], "rise"),
        (SWEEP, ["--rates", "0.5", "--acceptance", "coupled"], "1 entries"),
        (SWEEP, ["--spread-request", "9"], "'9'"),
        (SWEEP, ["--kv-cache-gib", "-1"], "'-1'"),
        (SWEEP, ["--gpu-memory-utilization", "2"], "'2'"),
        (SWEEP, ["--acceptance", "real"], "--target"),
        (SWEEP, ["--out", "/dev/null/x.jsonl"], "cannot be written"),
        (SWEEP, ["--out", "."], "is a directory"),
        (LOSSLESS, ["--waves", "a"], "'a'"),
        (LOSSLESS, ["--output-len", "0"], "'0'"),
        (SWEEP, ["--seed", "99999999999999999999"], "<= 2147483647"),
        (PLANNER, ["--seed", "-1"], "'-1'"),
        (ADMISSION, ["--seed", "2147483648"], "'2147483648'"),
        (plot.main, ["x.jsonl", "--out", "picture.xyz"], ".png"),
        (simulate_capacity.parse_args, ["--plot", "picture"], "'picture'"),
        (plot_calibration.main, ["x.jsonl", "--plot", "picture.json"], ".svg"),
        (PLANNER, ["--num-reqs", "0"], "'0'"),
        (PLANNER, ["--depths", "-1"], "'-1'"),
        (PLANNER, ["--repeats", "none"], "'none'"),
        (bench_step.parse_args, ["--periods", "0"], "'0'"),
        (ADMISSION, ["--arms", "ours,theirs"], "'theirs'"),
        (ADMISSION, ["--families", "odd"], "'odd'"),
        (ADMISSION, ["--num-reqs", "a"], "'a'"),
        (ADMISSION, ["--budget-frac", "0"], "'0'"),
        (plot.main, ["no/such.jsonl"], "no/such.jsonl"),
        (plot.main, [__file__], "test_usage_errors.py:1"),
    ],
)
def test_bad_options_are_named(parse, options, named, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(options)
    assert exit_.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("parse", [SWEEP, PLANNER, ADMISSION, LOSSLESS])
def test_defaults_are_accepted(parse):
    assert parse([])


def test_plot_reads_sweeps_and_simulations_and_refuses_other_json(tmp_path, capsys):
    sweep = next(RESULTS.glob("*sweep-b.jsonl"))
    simulated = tmp_path / "simulated.jsonl"
    record = {
        "bench": "simulate_capacity",
        "case": {"concurrency": 4},
        "arm": "oracle7",
        "metric": "throughput",
        "median": 1.0,
    }
    simulated.write_text(json.dumps(record) + "\n")
    curves = plot.read_throughput([sweep, simulated])
    assert curves["oracle7"] == {4: 1.0} and 256 in curves["capacity7"]
    other = tmp_path / "other.json"
    other.write_text("[1, 2]\n")
    with pytest.raises(SystemExit):
        plot.main([str(other)])
    assert f"{other}:1" in capsys.readouterr().err


READERS = [
    plot.read_records,
    plot_calibration.read_costs,
    read_record,
    recorded.load_costs,
    recorded.load_throughput,
    recorded.load_served_steps,
    recorded.load_start_ms,
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe[]", b"{", b"\x00"])
def test_files_that_are_no_json_are_named(read, content, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="bad.jsonl"):
        read(path)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    sweep = next(RESULTS.glob("*sweep-b.jsonl"))
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + sweep.read_bytes())
    assert plot.read_throughput([marked]) == plot.read_throughput([sweep])
    assert recorded.load_throughput(marked) == recorded.load_throughput(sweep)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "What?"}\n' * 2)
    loads = LOSSLESS(["--prompts", str(prompts), "--waves", "2"]).loads
    assert [load.prompts for load in loads] == [("What?", "What?")]


@pytest.mark.parametrize("content", [b"[" * 100_000, b"[1]", b'{"text": "?"}', b"\xff"])
def test_prompts_that_are_none_are_a_usage_error(content, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(content)
    with pytest.raises(SystemExit) as exit_:
        LOSSLESS(["--prompts", str(prompts)])
    assert exit_.value.code == 2
    assert "prompts.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("depth", [1, 3, 5, 16])
def test_planner_bench_plans_at_every_depth(depth):
    """Enabled depths beyond K would be no configuration."""
    costs = bench_planner.make_costs(4, depth)
    assert costs.depths[-1] == depth
    arms = bench_planner.make_arms(4, depth, seed=0)
    assert {"plan_budget", "plan_step", "serve_step"} <= set(arms)
    for name in ("plan_budget", "plan_step", "serve_step"):
        arms[name]()
