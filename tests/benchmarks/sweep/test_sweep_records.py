# SPDX-License-Identifier: Apache-2.0
"""From served loads to records: arms alternate, the first repetition is apart."""

import json

import pytest

from benchmarks import plot, sweep_concurrency
from benchmarks.common import append_records
from benchmarks.simulator.recorded import load_served_steps


class FakeArm:
    """Serves at once; its throughput counts the loads that it was given."""

    def __init__(self, name, log):
        self.name, self._log, self._served = name, log, 0

    def serve(self, load):
        self._served += 1
        self._log.append((load.concurrency, load.seed, self.name))
        return {
            "figures": {
                "throughput": (100.0 * self._served, "tok/s"),
                "step p50": (7.0, "ms"),
            },
            "num_steps": 5,
            "step_ms": {"8.00": 7.1},
        }


def run(*options):
    log = []
    args = sweep_concurrency.parse_args(["--arms", "fixed3,capacity7", *options])
    arms = [FakeArm(name, log) for name in args.arms]
    return sweep_concurrency.sweep(args, arms), log


def test_arms_alternate_on_equal_loads_and_the_first_repetition_is_apart():
    records, log = run("--concurrency", "1,8", "--seed", "4")
    assert log == [
        (c, seed, arm)
        for c in (1, 8)
        for seed in (4, 5, 6)
        for arm in ("fixed3", "capacity7")
    ]
    rates = [r for r in records if r.metric == "throughput" and r.arm == "fixed3"]
    first, later, *_ = rates
    assert (first.case["part"], first.samples) == ("first", [100.0])
    assert "part" not in later.case and later.samples == [200.0, 300.0]
    assert {r.unit for r in records if r.metric == "step p50"} == {"ms"}


def test_labels_of_coupled_and_open_loads_and_what_the_plot_takes(tmp_path):
    closed, _ = run("--acceptance", "coupled", "--spread-request", "0.5", "--steady")
    opened, _ = run("--arrival-rate", "2,4")
    assert closed[0].case["spread"] == [0.5, 1.0]
    assert closed[0].case["traffic"] == "steady"
    assert {r.case["arrival_rate"] for r in opened} == {2.0, 4.0}
    path = tmp_path / "sweep.jsonl"
    append_records(path, closed + opened)
    assert json.loads(path.read_text().splitlines()[0])["repro"]
    curves = plot.read_throughput([path])
    assert curves.keys() == {"fixed3", "capacity7"}
    assert curves["fixed3"].keys() == {1, 8}


def test_steps_of_the_first_repetition_are_a_record_of_their_own():
    records, _ = run("--concurrency", "8")
    steps = [r for r in records if r.bench == "sweep_concurrency.steps"]
    assert [(r.arm, r.case.get("part")) for r in steps] == [
        (arm, part) for arm in ("fixed3", "capacity7") for part in ("first", None)
    ]


def test_the_simulator_reads_the_later_repetitions_alone(tmp_path):
    path = tmp_path / "sweep.jsonl"
    records, _ = run("--concurrency", "8")
    for record in records:
        if record.case.get("part") and record.bench.endswith(".steps"):
            record.case["step_ms"] = {"8.00": 1e6}
    append_records(path, records)
    assert {step.ms for step in load_served_steps(path)} == {7.1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-layers", "2"], "the draft of tiny-dims reads 3"),
        (["--num-layers", "9", "--target", "t", "--draft", "d"], "has its own"),
    ],
)
def test_number_of_layers_fits_the_draft(options, message, capsys):
    assert sweep_concurrency.parse_args(["--num-layers", "3"]).num_layers == 3
    with pytest.raises(SystemExit):
        sweep_concurrency.parse_args(options)
    assert message in capsys.readouterr().err
