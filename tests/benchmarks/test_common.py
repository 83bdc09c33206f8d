# SPDX-License-Identifier: Apache-2.0
"""The benchmark record keeps every sample and says how to run it again."""

import json

import pytest

from benchmarks.common import (
    Record,
    append_records,
    interleave,
    new_records,
    print_table,
)


def record(arm="ours", samples=(3.0, 1.0, 2.0, 10.0), **changes):
    fields = {"bench": "b", "case": {"R": 8}, "metric": "device", "unit": "us"}
    return Record(arm=arm, samples=list(samples), **fields | changes)


def test_record_line_has_every_field_and_all_samples(tmp_path):
    path = tmp_path / "new" / "out.jsonl"
    append_records(path, [record(seed=5)])
    append_records(path, [record("upstream")])
    first, second = map(json.loads, path.read_text().splitlines())
    assert first.keys() == set(
        "schema bench case arm metric unit samples median iqr seed env repro".split()
    )
    assert first["samples"] == [3.0, 1.0, 2.0, 10.0]
    assert (first["seed"], second["arm"]) == (5, "upstream")
    assert {"gpu", "driver", "torch", "triton", "vllm", "commit", "dirty"} <= set(
        first["env"]
    )
    assert first["repro"].startswith("python ")


def test_median_and_iqr_resist_an_outlier():
    assert record(samples=[1, 2, 3, 4, 1000]).median == 3
    assert record(samples=[1, 2, 3, 4, 1000]).iqr == 2
    assert record(samples=[7]).iqr == 0


def test_arms_alternate():
    order = []

    def measure(arm):
        order.append(arm)
        return float(len(order))

    samples = interleave(["a", "b"], 3, measure)
    assert order == ["a", "b"] * 3
    assert samples == {"a": [1, 3, 5], "b": [2, 4, 6]}


@pytest.mark.parametrize("baseline", [None, "upstream"])
def test_table_shows_median_and_speed_up(capsys, baseline):
    records = [record(samples=[2.0]), record("upstream", samples=[7.0])]
    print_table(records, title="T", baseline=baseline)
    printed = capsys.readouterr().out
    assert "2.00 (0.00)" in printed and "7.00 (0.00)" in printed
    assert ("3.50x" in printed) == (baseline is not None)
    assert "R=8" in printed and "device [us]" in printed


def test_new_records_replace_the_old_ones_only_at_the_end(tmp_path):
    path = tmp_path / "sweep.jsonl"
    path.write_text("old\n")
    with pytest.raises(RuntimeError), new_records(path) as part:
        part.write_text("half\n")
        raise RuntimeError
    assert path.read_text() == "old\n", "a run that failed takes nothing away"
    assert part.read_text() == "half\n", "and keeps what it measured"
    with new_records(path) as part:
        assert not part.exists(), "nor does the next run begin with it"
        part.write_text("new\n")
    assert path.read_text() == "new\n"
    assert not part.exists()


def test_nothing_measured_leaves_the_old_records(tmp_path):
    path = tmp_path / "sweep.jsonl"
    path.write_text("old\n")
    with new_records(path):
        pass
    assert path.read_text() == "old\n"
