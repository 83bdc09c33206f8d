# SPDX-License-Identifier: Apache-2.0
"""The calibration benchmark reads its record, replays it, and knows a bad argument."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import calibration, plot_calibration
from tests.helpers.sts_cases import draw_rows
from vllm.v1.worker.gpu.spec_decode.dspark import online_sts
from vllm.v1.worker.gpu.spec_decode.dspark.sts_fit import survival_probs

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RECORD = RESULTS / "2026-11-29-h200-calibration-record.jsonl.gz"
SWEEP = RESULTS / "2026-11-29-h200-sweep-b.jsonl"
K = 7


def write_record(path, *, scale=1.0, num_requests=120):
    """Record requests of a head whose true logits are ``scale * logit``."""
    lines = []
    for name in ("greedy", "sampled"):
        for seed in range(num_requests):
            rows = draw_rows(12, K, scale=scale, seed=seed)
            counts = np.stack([rows.accepted, rows.verified], axis=1)
            table = np.concatenate([counts, rows.logits], axis=1)
            lines.append(json.dumps({"class": name, "rows": table.tolist()}))
    data = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def request(number, length):
    return np.array([[0, 1, 10 * number + step] for step in range(length)])


@pytest.mark.parametrize(
    ("stride", "expected"), [(1, [0, 10, 1, 20, 2, 21]), (2, [0, 20, 2])]
)
def test_rows_come_in_turns_of_a_batch_that_is_refilled(stride, expected):
    requests = [request(0, 3), request(1, 1), request(2, 2)]
    rows = calibration.in_turns(requests, batch=2, stride=stride)
    assert rows.logits[:, 0].tolist() == expected


def test_an_engine_grades_and_fits_as_the_replay_does():
    assert calibration.ROW_STRIDE == calibration.BATCH // online_sts.MAX_ROWS_PER_STEP
    rows_a_fit = online_sts.MAX_ROWS_PER_STEP * online_sts.FIT_INTERVAL
    assert rows_a_fit == calibration.FIT_ROWS


def test_no_request_is_both_seen_and_measured():
    requests = [request(number, 1 + number % 3) for number in range(90)]
    first, again, other = (calibration.split(requests, seed) for seed in (0, 0, 1))

    def numbers(part):
        return [int(rows[0, 2]) // 10 for rows in part]

    seen, measured = map(numbers, first)
    assert sorted(seen + measured) == list(range(90))
    assert len(seen) == 90 // calibration.SEEN_SHARE
    assert (seen, measured) == tuple(map(numbers, again))
    assert seen != numbers(other[0])


def test_true_survivals_measure_what_chance_leaves():
    few, many = (draw_rows(n, K, trim=0.3) for n in (500, 50_000))
    found = []
    for rows in (few, many):
        survival = survival_probs(rows.logits, calibration.identity(K))
        drawn = calibration.draw_outcomes(rows, survival, np.random.default_rng(0))
        assert (drawn.accepted <= rows.verified).all()
        found.append(calibration.cumulative_ece(drawn, survival))
    assert (found[0] > 0.015).all() and (found[1] < 0.008).all()


def test_graded_drafts_include_the_rejected_one():
    rows = draw_rows(200, K, trim=0.5)
    expected = sum(
        min(int(a) + 1, int(v))
        for a, v in zip(rows.accepted, rows.verified, strict=True)
    )
    assert calibration.num_graded(rows)[-1] == expected


@pytest.mark.parametrize("name", ["record.jsonl", "record.jsonl.gz"])
def test_a_distorted_head_measures_better_afterwards(tmp_path, name):
    requests = calibration.read_record(write_record(tmp_path / name))["sampled"]
    seen, measured = map(calibration.in_turns, calibration.split(requests, 0))
    shift = calibration.DISTORTIONS["+ 1.5"]
    fitted = calibration.fit_online(calibration.distort(seen, *shift), 1500)
    rows = calibration.distort(measured, *shift)
    before = calibration.measure(rows, calibration.identity(K))
    after = calibration.measure(rows, fitted)
    assert before.ece.max() > 0.1, "premise"
    assert after.ece.max() < before.ece.max() / 2
    # Within a position the order is kept, so its own AUROC is too.
    np.testing.assert_allclose(after.auroc, before.auroc, atol=1e-6)
    assert (after.brier < before.brier).all()


def test_true_survivals_regret_nothing_and_wrong_ones_do():
    costs = plot_calibration.read_costs(SWEEP)
    rows = draw_rows(512, K)
    truth = survival_probs(rows.logits, calibration.identity(K))
    lost = calibration.regret(truth, truth, costs, 64)
    assert len(lost) == 8 and not lost.any()
    too_sure = calibration.regret(np.ones_like(truth), truth, costs, 64)
    assert too_sure.min() >= 0.0 and too_sure.mean() > 0.005


def test_the_committed_record_has_both_classes_and_enough_rows():
    record = calibration.read_record(RECORD)
    assert set(record) == {"greedy", "sampled"}
    for requests in record.values():
        assert sum(map(len, requests)) > 15_000


def test_plot_and_records_come_from_the_record_alone(tmp_path, capsys):
    record = write_record(tmp_path / "record.jsonl", num_requests=60)
    plot, out = tmp_path / "new" / "plot.png", tmp_path / "out.jsonl"
    options = ["--drafts", "100", "--draws", "2", "--plot", plot, "--out", out]
    assert plot_calibration.main([str(a) for a in (record, *options)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    cases = {(x["case"]["class"], x["case"]["distortion"], x["arm"]) for x in lines}
    arms = {"before", "after", "limit", "truth", "ideal"}
    assert len(cases) == 2 * len(calibration.DISTORTIONS) * len(arms)
    assert {case[2] for case in cases} == arms
    assert "x 2.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--drafts", "0"], "argument --drafts: '0' must be an integer >= 1"),
        (["--drafts", "9000"], "--drafts=9000: the fit would see"),
        (["--costs", "missing.jsonl"], "missing.jsonl"),
        (["--costs", __file__], "is no record of costs"),
    ],
)
def test_bad_arguments_are_named(tmp_path, capsys, change, named):
    record = write_record(tmp_path / "record.jsonl", num_requests=2)
    with pytest.raises(SystemExit):
        plot_calibration.main([str(record), *change])
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ['{"class": "greedy"}', "nothing", '{"class": "greedy", "rows": [[1]]}']
)
def test_a_line_that_is_no_record_is_named(tmp_path, text):
    path = tmp_path / "record.jsonl"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=r"record.jsonl(:1 is not JSON|, line 1 is no record)"
    ):
        calibration.read_record(path)
