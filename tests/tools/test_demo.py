# SPDX-License-Identifier: Apache-2.0
"""The demo against a small fake server: figures, verdicts, exit codes, clean-up."""

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import openai
import psutil
import pytest
from aiohttp import web
from rich.console import Console

from tools.demo import arms, cli, client, options, report
from tools.demo.client import Completion, LevelRun
from tools.demo.errors import DemoError
from tools.demo.server import Server, free_port

FAKE = Path(__file__).with_name("fake_openai_server.py")
# The fake is imported by path: directories of tests are no packages.
sys.path.insert(0, str(FAKE.parent))
from fake_openai_server import ACCEPTED, ACTIVE_FROM, DEPTH, FakeEngine  # noqa: E402

SETTINGS = arms.Settings(
    device="cpu",
    concurrency=(1, 8),
    num_prompts=8,
    max_tokens=16,
    sps_curve=arms.EXAMPLE_CURVE,
    activation_batch_size=4,
    json_path=Path("unused.json"),
)
PROMPTS = [f"prompt number {i}" for i in range(8)]


def fake_command(port: int, *, capacity: bool = False, fault: str = "none"):
    command = [sys.executable, str(FAKE), "--port", str(port), "--fault", fault]
    return command + (["--capacity"] if capacity else [])


def fake_server(tmp_path: Path, fault: str = "none", **kwargs) -> Server:
    port = free_port()
    kwargs = {"ready_timeout_s": 20.0, "stop_grace_s": 3.0} | kwargs
    return Server(
        "fake",
        fake_command(port, fault=fault),
        port=port,
        log_path=tmp_path / "fake.log",
        **kwargs,
    )


@asynccontextmanager
async def in_process(engine: FakeEngine):
    """Serve `engine` on this loop; yields its address."""
    runner = web.AppRunner(engine.app())
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def run_level_on(engine: FakeEngine, concurrency: int, **kwargs):
    async def run():
        async with (
            in_process(engine) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as api,
        ):
            level = {"concurrency": concurrency, "max_tokens": 16} | kwargs
            return await client.run_level(api, PROMPTS, **level)

    return asyncio.run(run())


def completion(text: str, token_ids=None, finish_reason: str = "stop") -> Completion:
    return Completion(text, token_ids, finish_reason, len(text))


def figures(concurrency: int, active_fraction: float) -> report.LevelFigures:
    return report.LevelFigures(
        concurrency, 10.0, 20.0, 5, active_fraction, 7.0, 7.0, 5.0, 3.0, 4.0
    )


# --- client -------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_level_reaches_its_concurrency_and_never_passes_it(concurrency):
    engine = FakeEngine(capacity=False, delay_s=0.05)
    completions, wall_s = run_level_on(engine, concurrency)
    assert engine.max_in_flight == concurrency
    assert len(completions) == len(PROMPTS)
    assert wall_s > 0


def test_requests_are_greedy_and_ask_for_token_ids():
    engine = FakeEngine(capacity=False)
    completions, _ = run_level_on(engine, 2)
    assert {r["temperature"] for r in engine.requests} == {0.0}
    assert {r["max_tokens"] for r in engine.requests} == {16}
    assert completions[3].token_ids == tuple(map(ord, PROMPTS[3]))[-16:]


def test_completions_keep_the_order_of_the_prompts():
    completions, _ = run_level_on(FakeEngine(capacity=False), 8)
    ids = [c.token_ids for c in completions]
    assert ids == [tuple(map(ord, p))[-16:] for p in PROMPTS]


def test_failed_request_ends_the_level():
    engine = FakeEngine(capacity=False, fault="refuse")
    with pytest.raises(DemoError, match=r"request 0 at C=2 failed.*engine is dead"):
        run_level_on(engine, 2)


def test_counters_are_summed_over_engines_and_split_by_state():
    text = FakeEngine(capacity=True)
    text.steps = {"fixed": 3, "active": 5}
    text.num_drafts = 10
    page = text.metrics_text()
    second = page.replace('engine="0"', 'engine="1"')
    samples = "\n".join(x for x in second.splitlines() if "_total{" in x)
    counts = client.parse_counters(page)
    assert counts["fixed_steps"] == 3 and counts["active_steps"] == 5
    assert counts["accepted"] == 10 * ACCEPTED
    assert client.parse_counters(page + samples + "\n") == {
        key: 2 * value for key, value in counts.items()
    }


def test_absent_counter_is_an_error_that_names_it():
    page = FakeEngine(capacity=True).metrics_text()
    page = re.sub(r".*num_verified_tokens.*\n", "", page)
    with pytest.raises(DemoError, match="num_verified_tokens_total.*link_overlay") as e:
        client.parse_counters(page)
    assert "drafted" not in str(e.value)


def test_counters_are_read_again_until_they_stand_still(monkeypatch):
    monkeypatch.setattr(client, "_SETTLE_S", 0.0)
    engine = FakeEngine(capacity=True)
    reads = []

    def late_counters():
        engine.num_drafts = min(len(reads), 3)
        reads.append(engine.num_drafts)
        return FakeEngine.metrics_text(engine)

    engine.metrics_text = late_counters

    async def run():
        async with in_process(engine) as url:
            return await client.read_counters(url)

    assert asyncio.run(run())["num_drafts"] == 3
    assert reads == [0, 1, 2, 3, 3]


def test_counters_that_never_settle_are_an_error(monkeypatch):
    monkeypatch.setattr(client, "_SETTLE_S", 0.0)
    engine = FakeEngine(capacity=True)

    def moving():
        engine.num_drafts += 1
        return FakeEngine.metrics_text(engine)

    engine.metrics_text = moving

    async def run():
        async with in_process(engine) as url:
            await client.read_counters(url)

    with pytest.raises(DemoError, match="still move"):
        asyncio.run(run())


def test_prompts_take_the_kinds_in_turn(tmp_path):
    rows = [("a", 1), ("a", 2), ("a", 3), ("b", 1)]
    path = tmp_path / "heldout.jsonl"
    path.write_text(
        "".join(json.dumps({"kind": k, "prompt": f"{k}{n}"}) + "\n" for k, n in rows)
    )
    assert client.load_prompts(path, 3) == ["a1", "b1", "a2"]
    with pytest.raises(DemoError, match="--num-prompts 5.*holds 4"):
        client.load_prompts(path, 5)
    with pytest.raises(DemoError, match=r"none\.jsonl is missing"):
        client.load_prompts(tmp_path / "none.jsonl", 1)


# --- report -------------------------------------------------------------------------


def test_figures_are_per_engine_step_and_acceptance_is_per_request():
    counts = {
        "fixed_steps": 2.0,
        "active_steps": 6.0,
        "drafted": 400.0,
        "verified": 200.0,
        "accepted": 120.0,
        "draft_depth_sum": 40.0,
        "num_drafts": 60.0,
    }
    none = LevelRun(8, 4.0, (completion("x" * 40),) * 2, None)
    level = report.level_figures(none, LevelRun(8, 2.0, none.completions, counts))
    assert level == report.LevelFigures(
        concurrency=8,
        tokens_per_s_none=20.0,
        tokens_per_s=40.0,
        num_steps=8,
        active_fraction=0.75,
        mean_draft_depth=5.0,
        drafted_per_step=50.0,
        verified_per_step=25.0,
        accepted_per_step=15.0,
        acceptance_length=3.0,
    )


@pytest.mark.parametrize("zero", ["steps", "num_drafts"])
def test_level_without_speculation_is_an_error(zero):
    counts = dict.fromkeys(
        ["drafted", "verified", "accepted", "draft_depth_sum", "active_steps"], 1.0
    )
    counts |= {"fixed_steps": 0.0, "num_drafts": 1.0}
    counts["active_steps" if zero == "steps" else zero] = 0.0
    run = LevelRun(2, 1.0, (completion("a"),), counts)
    with pytest.raises(DemoError, match="C=2.*did not speculate"):
        report.level_figures(run, run)


def test_token_ids_decide_where_both_have_them_and_text_otherwise():
    one, two = completion("same", (1, 2, 3)), completion("same", (1, 9, 3))
    assert not one.same_output(two)
    assert one.same_output(completion("other text", (1, 2, 3)))
    assert one.same_output(completion("same"))
    assert not one.same_output(completion("sane"))
    assert not one.same_output(completion("same", (1, 2, 3), "length"))


def test_mismatch_says_where_the_outputs_part():
    reference = LevelRun(
        4, 1.0, (completion("a", (1, 2)), completion("b", (1, 2, 3))), None
    )
    run = LevelRun(4, 1.0, (completion("a", (1, 2)), completion("c", (1, 2))), None)
    (mismatch,) = report.find_mismatches(reference, run)
    assert mismatch == report.Mismatch(4, 1, 2, "b", "c")


def test_each_reason_to_fail_is_a_problem_of_its_own():
    good = [figures(1, 0.0), figures(8, 0.5)]
    assert report.find_problems(good, []) == []
    (active_at_one,) = report.find_problems([figures(1, 0.1), good[1]], [])
    assert active_at_one.startswith("C=1") and "fixed path" in active_at_one
    (idle_at_top,) = report.find_problems([good[0], figures(8, 0.0)], [])
    assert idle_at_top.startswith("C=8") and "--activation-batch-size" in idle_at_top
    (differs,) = report.find_problems(good, [report.Mismatch(2, 5, 17, "ab", "ac")])
    assert "C=2, prompt 5" in differs and "position 17" in differs


def test_levels_between_the_first_and_the_top_may_be_either():
    levels = [figures(1, 0.0), figures(2, 0.0), figures(4, 1.0), figures(8, 1.0)]
    assert report.find_problems(levels, []) == []


def test_table_has_a_row_per_level_and_fits_80_columns():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report.build_table([figures(1, 0.0), figures(64, 1.0)]))
    text = console.export_text()
    assert "…" not in text
    assert re.search(r"^ +1 +10\.0 +20\.0 +7\.00 .*4\.00 +no \(0%\) *$", text, re.M)
    assert re.search(r"^ +64 .*yes \(100%\) *$", text, re.M)


def test_json_and_plot_hold_the_same_levels(tmp_path):
    levels = [figures(1, 0.0), figures(8, 0.25)]
    mismatch = report.Mismatch(8, 0, 1, "a", "b")
    result = report.DemoResult(levels, [mismatch], [], ["it differs"], 16)
    path = tmp_path / "new" / "demo.json"
    report.write_json(path, result, wall_s=1.5)
    record = json.loads(path.read_text())
    assert (record["schema"], record["version"]) == ("vllm-dspark-demo", 1)
    assert record["passed"] is False and record["problems"] == ["it differs"]
    assert [level["active"] for level in record["levels"]] == [False, True]
    assert record["levels"][1]["tokens_per_s"] == 20.0
    assert record["mismatches"][0]["first_difference"] == 1
    assert record["wall_s"] == 1.5
    plot = tmp_path / "demo.png"
    report.write_plot(plot, levels, "note")
    assert plot.read_bytes().startswith(b"\x89PNG")


# --- server -------------------------------------------------------------------------


def test_server_becomes_ready_and_leaves_nothing_behind(tmp_path):
    with fake_server(tmp_path) as server:
        assert server.wait_ready() < 20
        process = server._process
        tmp_dir = Path(server._tmp_dir)
        assert process.is_running() and tmp_dir.is_dir()
        # A terminal's Ctrl-C must not reach it before the demo stops it in order.
        assert os.getpgid(process.pid) == process.pid
    assert not psutil.pid_exists(process.pid)
    assert not tmp_dir.exists()
    server.stop()  # A second stop is harmless.


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("exit", r"exited with status 1\n.*ValueError: a bad option"),
        ("fatal-log", "its log says 'EngineCore failed to start'"),
        ("zombie", r"its process VLLM::\S+ died"),
    ],
)
def test_dead_server_is_noticed_long_before_the_timeout(tmp_path, fault, message):
    with (
        fake_server(tmp_path, fault, ready_timeout_s=60.0) as server,
        pytest.raises(DemoError, match=re.compile(message, re.DOTALL)),
    ):
        server.wait_ready()


def test_server_that_is_not_ready_in_time_is_an_error_with_the_way_out(tmp_path):
    with (
        fake_server(tmp_path, "never-ready", ready_timeout_s=3.0) as server,
        pytest.raises(DemoError, match="not ready after 3 s.*--ready-timeout") as error,
    ):
        server.wait_ready()
    assert "fake server starts" in str(error.value), "the log's tail is shown"


def test_stubborn_server_its_escaped_child_and_shared_memory_are_removed(tmp_path):
    with fake_server(tmp_path, "stubborn", stop_grace_s=0.5) as server:
        server.wait_ready()
        found = re.search(r"child=(\d+) shm=(\S+)", server.log_path.read_text())
        child, shared = psutil.Process(int(found[1])), Path(found[2])
        group = server._process.pid
        assert shared.exists() and os.getpgid(child.pid) != group
    assert not shared.exists()
    assert not psutil.pid_exists(group)
    assert not child.is_running()


def test_free_port_can_be_bound():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", free_port()))


# --- arms and options ---------------------------------------------------------------


def option_of(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_arms_differ_in_the_speculation_only():
    none = arms.server_command(SETTINGS, port=1, capacity=False)
    capacity = arms.server_command(SETTINGS, port=1, capacity=True)
    index = capacity.index("--speculative-config")
    assert capacity[:index] + capacity[index + 2 :] == none
    config = json.loads(capacity[index + 1])
    assert config["method"] == "dspark" and config["num_speculative_tokens"] == 7
    assert config["dspark_sps_curve"] == [list(p) for p in arms.EXAMPLE_CURVE]
    assert config["model"].endswith("tests/fixtures/tiny-dspark/draft")


def test_server_is_sized_for_the_top_level():
    big = replace(SETTINGS, concurrency=(1, 64))
    command = arms.server_command(big, port=1, capacity=True)
    assert option_of(command, "--max-num-seqs") == "64"
    assert int(option_of(command, "--max-num-batched-tokens")) >= 64 * 8


def test_rehearsal_is_on_for_a_cpu_only():
    on_cpu = arms.server_env(SETTINGS)
    on_gpu = arms.server_env(replace(SETTINGS, device="gpu"))
    assert on_cpu["VLLM_DSPARK_CPU_REHEARSAL"] == "1"
    assert "VLLM_DSPARK_CPU_REHEARSAL" not in on_gpu
    for env in (on_cpu, on_gpu):
        assert env["VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE"] == "4"


def test_imitated_graphs_are_few_and_cover_the_top_level():
    config = arms.compilation_config(replace(SETTINGS, concurrency=(1, 6)))
    sizes = config["cudagraph_capture_sizes"]
    assert sizes[-1] == 6 * 8 and len(sizes) <= 8
    on_gpu = arms.compilation_config(replace(SETTINGS, device="gpu"))
    assert "cudagraph_capture_sizes" not in on_gpu
    assert config["cudagraph_mode"] == on_gpu["cudagraph_mode"] == "FULL_DECODE_ONLY"


def test_example_curve_slows_down_between_one_and_eight_requests():
    rates = dict(map(tuple, arms.EXAMPLE_CURVE))
    tokens = list(rates)
    assert tokens == sorted(tokens) and min(rates.values()) > 0
    assert rates[8] > 0.9 * rates[1], "one request with K = 7 is nearly free"
    assert rates[64] < 0.3 * rates[8], "eight are not"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("taken", "is a directory"), ("file/demo.json", "cannot be written")],
)
def test_unusable_result_path_is_a_usage_error(tmp_path, capsys, name, reason):
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as caught:
        options.parse_settings(["--device", "cpu", "--json", str(tmp_path / name)])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert f"--json: {str(tmp_path / name)!r}: {reason}" in error
    assert "such as out/" in error


def test_result_path_in_a_new_folder_is_usable(tmp_path):
    path = tmp_path / "new" / "folder" / "demo.json"
    settings = options.parse_settings(["--device", "cpu", "--json", str(path)])
    assert settings.json_path == path
    assert list(path.parent.iterdir()) == [], "nothing is left by the check"


def test_defaults_follow_the_device():
    cpu = options.parse_settings(["--device", "cpu"])
    assert cpu.concurrency == (1, 2, 4, 8) and cpu.num_prompts >= 8
    assert cpu.sps_curve is arms.EXAMPLE_CURVE
    assert cpu.json_path == arms.ROOT / "out" / "demo" / "demo.json"
    gpu = options.parse_settings(["--device", "gpu"])
    assert gpu.concurrency[-1] == 64 and gpu.sps_curve == "auto"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--concurrency", "1,x"], "increasing positive integers"),
        (["--concurrency", "4,2"], "increasing positive integers"),
        (["--concurrency", "0,2"], "increasing positive integers"),
        (["--max-tokens", "0"], "an integer >= 1"),
        (["--activation-batch-size", "-1"], "an integer >= 0"),
        (["--sps-curve", "/no/such/file"], "no such file"),
        (["--concurrency", "1,8", "--num-prompts", "7"], "the top concurrency 8"),
    ],
)
def test_wrong_usage_ends_with_status_2_and_says_what_is_allowed(argv, message, capsys):
    with pytest.raises(SystemExit) as error:
        options.parse_settings(["--device", "cpu", *argv])
    assert error.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


# --- the whole demo -----------------------------------------------------------------


@pytest.fixture
def demo(tmp_path, monkeypatch, capsys):
    """Run main() on fake servers; returns (status, output, JSON path)."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    rows = [json.dumps({"kind": "k", "prompt": prompt}) for prompt in PROMPTS]
    (checkpoint / "heldout.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr(cli, "CHECKPOINT", checkpoint)
    monkeypatch.setenv("COLUMNS", "120")
    old_handler = signal.getsignal(signal.SIGTERM)
    path = tmp_path / "out" / "demo.json"

    def run(fault: str = "none", argv=("--concurrency", "1,8")):
        monkeypatch.setattr(
            cli,
            "server_command",
            lambda settings, *, port, capacity: fake_command(
                port, capacity=capacity, fault=fault if capacity else "none"
            ),
        )
        status = cli.main(["--device", "cpu", "--json", str(path), *argv])
        return status, capsys.readouterr().out, path

    yield run
    signal.signal(signal.SIGTERM, old_handler)


def test_demo_passes_on_equal_outputs_and_reports_the_load(demo):
    assert 1 < ACTIVE_FROM <= 8
    status, output, path = demo()
    assert status == 0
    assert "16 of 16 completions equal" in output
    assert "made-up" in output and "say nothing about a GPU" in output
    record = json.loads(path.read_text())
    first, top = record["levels"]
    assert record["passed"] and record["mismatches"] == []
    assert (first["active"], first["acceptance_length"]) == (False, 1 + ACCEPTED)
    assert top["active"] and top["mean_draft_depth"] == DEPTH
    # Differences around a level: the first level's steps are not in the top's.
    assert first["num_steps"] == top["num_steps"] == len(PROMPTS)
    assert record["environment"]["versions"]
    assert path.with_suffix(".png").is_file()
    assert path.with_name("server-none.log").is_file()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("differ", "FAILED C=1, prompt 0: differs from no speculation"),
        ("differ-text", "FAILED C=1, prompt 0: differs from no speculation"),
        ("never-active", "FAILED C=8: capacity was never active"),
        ("always-active", "FAILED C=1: capacity was active in 100%"),
    ],
)
def test_demo_fails_but_reports_when_a_check_does(demo, fault, message):
    status, output, path = demo(fault)
    assert status == 1
    assert message in output
    record = json.loads(path.read_text())
    assert not record["passed"] and record["problems"]
    assert bool(record["mismatches"]) == fault.startswith("differ")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no-counters", "/metrics lacks"),
        ("refuse", "request 0 at C=8 failed"),
        ("exit", "server 'capacity': exited with status 1"),
        ("die-later", "server 'capacity'"),
        # Not "failed: APITimeoutError" after the request's two minutes.
        ("hang", "its log says 'EngineCore encountered a fatal error'"),
    ],
)
def test_demo_without_figures_fails_and_leaves_no_stale_result(
    demo, fault, message, tmp_path
):
    stale = tmp_path / "out" / "demo.json"
    stale.parent.mkdir()
    stale.write_text('{"passed": true}')
    status, output, path = demo(fault)
    assert path == stale
    assert status == 1
    assert "FAILED" in output and message in output
    assert "last lines of" in output
    assert not path.exists()


@pytest.mark.parametrize(
    ("sent", "fault", "moment"),
    [
        (signal.SIGINT, "never-ready", "fake server starts"),
        (signal.SIGINT, "slow", "slow request"),
        (signal.SIGTERM, "slow", "slow request"),
    ],
)
def test_interrupted_demo_stops_its_server_quietly(tmp_path, sent, fault, moment):
    code = f"""
import sys
from tools.demo import cli
cli.CHECKPOINT = __import__("pathlib").Path({str(tmp_path)!r})
cli.server_command = lambda settings, *, port, capacity: [
    sys.executable, {str(FAKE)!r}, "--port", str(port), "--fault", {fault!r}]
sys.exit(cli.main(["--device", "cpu", "--concurrency", "4",
                   "--json", {str(tmp_path / "demo.json")!r}]))
"""
    row = '{"kind": "k", "prompt": "p"}\n'
    (tmp_path / "heldout.jsonl").write_text(4 * row)
    demo = psutil.Popen(
        [sys.executable, "-c", code],
        cwd=arms.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A background job ignores SIGINT, and so would its children: then there is
        # no Ctrl-C to test.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        log = tmp_path / "server-none.log"
        deadline = time.monotonic() + 60
        while not (log.is_file() and moment in log.read_text()):
            assert time.monotonic() < deadline and demo.poll() is None
            time.sleep(0.1)
        (server,) = (c for c in demo.children() if str(FAKE) in c.cmdline())
        demo.send_signal(sent)
        output, _ = demo.communicate(timeout=30)
    finally:
        with suppress(psutil.NoSuchProcess):
            demo.kill()
    assert demo.returncode == 130
    assert "interrupted" in output
    assert "Traceback" not in output
    assert not server.is_running()
