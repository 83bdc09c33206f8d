# SPDX-License-Identifier: Apache-2.0
"""The standalone profiler: arguments, what its file means to an engine, its plot."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vllm.config.dspark_calibration import CALIBRATION_KEY
from vllm.config.dspark_capacity import DSparkCapacityConfig
from vllm.config.dspark_values import CURVE_KEYS, read_sps_curve
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import TABLE_KEYS, StepCosts

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import profile_dspark_sps_curve as profiler  # noqa: E402

MAX_REQS, DEPTHS = 64, (1, 3, 7)
MODEL = ["target", "--speculative-config", '{"method": "dspark", "model": "d"}']


def make_costs():
    reqs = np.arange(MAX_REQS + 1)
    return StepCosts(
        {d: 1.0 + 0.01 * d * reqs for d in DEPTHS},
        {d: 6.0 + 0.02 * reqs * (d + 1) for d in DEPTHS},
        6.0 + 0.02 * np.arange(MAX_REQS * 8 + 1),
        overhead_ms=0.25,
        verify_context_ms={d: 1e-4 * reqs for d in DEPTHS},
    )


@pytest.fixture
def curve_file(tmp_path):
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(make_costs().to_json()))
    return path


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--iters", "0"),
        ("--iters", "-3"),
        ("--iters", "1.5"),
        ("--warmup", "-1"),
        ("--warmup", "x"),
        ("--overhead-ms", "-0.1"),
        ("--overhead-ms", "nan"),
        ("--overhead-ms", "inf"),
        ("--sizes", "0"),
        ("--sizes", "1,-8"),
        ("--sizes", ""),
        ("--sizes", "1,,2"),
    ],
)
def test_bad_values_are_refused_before_any_model(flag, value, capsys, monkeypatch):
    monkeypatch.setattr(profiler, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as stop:
        profiler.main([*MODEL, "-o", "curve.json", f"{flag}={value}"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert flag in error and ">=" in error


def test_edges_are_accepted_and_what_is_not_ours_is_left_to_vllm():
    args, rest = profiler.parse_args(
        [*MODEL, "-o", "c.json", "--iters", "1", "--warmup", "0", "--overhead-ms", "0"]
        + ["--sizes", "8, 1,8", "--max-num-seqs", "64"]
    )
    assert (args.iters, args.warmup, args.overhead_ms) == (1, 0, 0.0)
    assert args.sizes == [1, 8]
    assert rest == [*MODEL, "--max-num-seqs", "64"]


@pytest.mark.parametrize(
    "argv",
    [
        MODEL,
        ["--from-json", __file__, "-o", "d.json"],
        ["--from-json", __file__, "target"],
    ],
)
def test_a_file_is_either_written_or_read(argv):
    with pytest.raises(SystemExit) as stop:
        profiler.parse_args(argv)
    assert stop.value.code == 2


def test_a_written_file_gives_an_engine_the_same_costs(curve_file):
    config = DSparkCapacityConfig.from_keys({"dspark_sps_curve": str(curve_file)})
    curve = config.dspark_sps_curve
    assert len(curve.points) > 2
    costs = StepCosts.from_json(curve.document).fitted(DEPTHS, MAX_REQS, MAX_REQS * 8)
    expected = make_costs()
    for depth in DEPTHS:
        for reqs in (1, 17, MAX_REQS):
            assert costs.uniform_step_ms(depth, reqs, 300.0) == (
                expected.uniform_step_ms(depth, reqs, 300.0)
            )


def test_from_json_prints_and_plots_without_an_engine(curve_file, tmp_path):
    plot = tmp_path / "new" / "curve.png"
    command = [sys.executable, BENCHMARKS / "profile_dspark_sps_curve.py"]
    command += ["--from-json", curve_file, "--plot", plot]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    knee = profiler.knee_of(make_costs())
    assert 1 < knee <= MAX_REQS, "premise"
    assert f"from {knee} requests on" in done.stdout
    assert all(f"depth {d}" in done.stdout for d in DEPTHS)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_written_file_holds_only_keys_that_are_read(monkeypatch, tmp_path):
    entry = {"key": {}, "sections": {"costs": make_costs().to_json()}}

    class Engine:
        @staticmethod
        def from_engine_args(made):
            (made / "entry.json").write_text(json.dumps(entry))
            return SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))

    monkeypatch.setattr(profiler, "engine_args", lambda rest, cache: Path(cache))
    monkeypatch.setattr("vllm.v1.engine.llm_engine.LLMEngine", Engine)
    args, rest = profiler.parse_args([*MODEL, "-o", str(tmp_path / "c.json")])
    document = profiler.measure(args, rest)
    assert set(document) <= set(CURVE_KEYS)
    assert set(TABLE_KEYS) | {CALIBRATION_KEY} <= set(CURVE_KEYS)
    assert read_sps_curve(document).document == document


def test_from_json_reads_a_file_as_the_engine_does(curve_file, capsys):
    text = curve_file.read_text()
    curve_file.write_text(text, encoding="utf-8-sig")
    assert profiler.main(["--from-json", str(curve_file)]) == 0
    curve_file.write_text(text.replace("{", '{"overhead_ms": 0.0, ', 1))
    with pytest.raises(SystemExit, match="more than once"):
        profiler.main(["--from-json", str(curve_file)])


def test_tables_that_cover_no_request_are_refused(curve_file):
    document = json.loads(curve_file.read_text())
    for name, tables in document.items():
        if isinstance(tables, dict):
            document[name] = {depth: table[:1] for depth, table in tables.items()}
    curve_file.write_text(json.dumps(document))
    with pytest.raises(SystemExit, match=r"curve\.json: its tables cover no request"):
        profiler.main(["--from-json", str(curve_file)])


def test_an_image_format_that_cannot_be_drawn_is_refused_first(monkeypatch, capsys):
    monkeypatch.setattr(profiler, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as stop:
        profiler.main([*MODEL, "-o", "curve.json", "--plot", "curve.xyz"])
    assert stop.value.code == 2
    assert "'curve.xyz'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["{", "{}", '{"sps_curve": [[1, 2.0]]}', "[" * 100_000]
)
def test_a_file_without_tables_is_refused_by_name(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(SystemExit, match=r"bad\.json"):
        profiler.main(["--from-json", str(path)])


def test_rows_hold_the_best_plan_of_all_depths():
    costs = make_costs()
    small, large = profiler.make_rows(costs, [1, MAX_REQS])
    assert small.best_depth == 7 and small.gain == pytest.approx(0.0, abs=0.2)
    assert large.best_depth < 7 and large.gain > 0.05, "premise: load changes the plan"
    assert large.step_ms[3] == costs.uniform_step_ms(3, MAX_REQS, 128)
    assert 0 <= large.best_budget <= large.best_depth * MAX_REQS
