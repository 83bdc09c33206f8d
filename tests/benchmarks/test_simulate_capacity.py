# SPDX-License-Identifier: Apache-2.0
"""The simulator against the measured sweeps, and its command line."""

import json

import pytest

from benchmarks import simulate_capacity
from benchmarks.simulator.recorded import load_costs, load_throughput
from tests.helpers.paths import RESULTS

RUN_A = RESULTS / "2026-11-29-h200-sweep-a.jsonl"
RUN_B = RESULTS / "2026-11-29-h200-sweep-b.jsonl"
# Another machine, a day later.
RUN_C = RESULTS / "2026-11-30-h200-sweep-rates.jsonl"


# Held depths and fixed ones, between the two.
DEPTHS = RESULTS / "2026-11-29-h200-depth.jsonl"


def errors(costs, compared, *, least, correct_by=(RUN_B, DEPTHS), repetitions=10):
    measured = load_throughput(compared)
    levels = sorted({c for c, _ in measured if c >= least})
    arms = sorted({a for _, a in measured})
    args = simulate_capacity.parse_args(
        [
            *("--costs", str(costs), "--compare", str(compared)),
            *(("--correct-by", ",".join(map(str, correct_by))) if correct_by else ()),
            *("--concurrency", ",".join(map(str, levels)), "--arms", ",".join(arms)),
            *("--repetitions", str(repetitions), "--output-len", "160"),
        ]
    )
    records = simulate_capacity.compare(args, simulate_capacity.simulate(args))
    found = {(r.case["concurrency"], r.arm): r.median for r in records}
    assert found.keys() == {k for k in measured if k[0] >= least}
    return found


def test_a_sweep_that_it_has_not_seen_is_met_within_ten_per_cent_at_every_load():
    """Run C gives its start profile alone; steps and starts took what B's did."""
    for correct_by in ((RUN_B, DEPTHS), (RUN_B,)):
        found = errors(RUN_C, RUN_C, least=1, correct_by=correct_by)
        assert {c for c, _ in found} == {1, 4, 8, 16, 32, 64, 128, 256}
        assert max(map(abs, found.values())) < 10.0, found


def test_so_are_the_earlier_sweeps_but_for_one_cell():
    found = errors(RUN_A, RUN_A, least=8)
    assert len(found) == 20
    far = {cell for cell, error in found.items() if abs(error) >= 10.0}
    assert far <= {(8, "upstream7")} and abs(found[8, "upstream7"]) < 12.0
    assert max(map(abs, errors(RUN_B, RUN_B, least=8).values())) < 10.0


def test_without_correction_a_start_profile_is_too_fast_at_high_load():
    found = errors(RUN_B, RUN_B, least=128, correct_by=None, repetitions=2)
    assert min(found.values()) > 5.0 and max(found.values()) < 20.0, found


def test_records_table_and_plot(tmp_path, capsys):
    out, plot = tmp_path / "new" / "s.jsonl", tmp_path / "s.png"
    simulate_capacity.main(
        [
            *("--costs", str(RUN_B), "--concurrency", "1,4", "--repetitions", "2"),
            *("--output-len", "20", "--steady-waves", "1", "--out", str(out)),
            *("--plot", str(plot), "--arms", "none,fixed3,capacity7,oracle7"),
        ]
    )
    records = [json.loads(line) for line in out.read_text().splitlines()]
    throughput = [r for r in records if r["bench"] == "simulate_capacity"]
    assert {(r["case"]["concurrency"], r["arm"]) for r in throughput} == {
        (c, a) for c in (1, 4) for a in ("none", "fixed3", "capacity7", "oracle7")
    }
    assert all(len(r["samples"]) == 2 and r["repro"] for r in throughput)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "simulated tok/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--costs", "no/such/file"], "no/such/file"),
        (["--concurrency", "a,b"], "'a'"),
        (["--concurrency", "0"], "'0'"),
        (["--concurrency", "257"], "257"),
        (["--arms", "fixed4"], "fixed4"),
        (["--arms", "unheard"], "oracleK"),
        (["--arms", "pinned3"], "fixed3"),
        (["--repetitions", "0"], "'0'"),
        (["--spread-request", "nan"], "nan"),
        (["--confidence-scale", "0"], "'0'"),
        (["--profile", "0.5,0.6"], "rise"),
        (["--profile", "0.5"], "1 entries"),
        (["--profile", "1.5"], "1.5"),
        (["--confidence-temperature", "-1"], "-1"),
        (["--max-num-batched-tokens", "9000"], "9000"),
        (["--compare", str(RUN_B.with_name("2026-11-29-h200-start-c.jsonl"))], "thr"),
        (["--correct-by", str(RUN_B.with_suffix(".md"))], "file"),
        (["--draft-depths", "1,4"], "lack draft depths [4]"),
        (["--draft-depths", "3,x"], "'x'"),
        (["--draft-depths", "3,7", "--arms", "fixed5"], "fixed5"),
    ],
)
def test_bad_options_are_usage_errors_that_name_them(options, named, capsys):
    with pytest.raises(SystemExit) as exit_:
        simulate_capacity.parse_args(["--costs", str(RUN_B), *options])
    assert exit_.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [("", "no cost tables"), ("{", "neither JSON"), ("[1]", "JSON objects")],
)
def test_unusable_cost_files_are_named(tmp_path, text, named):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=named):
        load_costs(path)


def test_cost_file_and_sweep_records_are_both_read(tmp_path):
    from_sweep = load_costs(RUN_B)
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(from_sweep.to_json()))
    assert load_costs(path).to_json() == from_sweep.to_json()
