# SPDX-License-Identifier: Apache-2.0
"""Capacity figures: their way to the frontend, the counters and the log line."""

import functools
import json
import subprocess
import sys
from types import SimpleNamespace

import prometheus_client
import pytest

from vllm.v1.spec_decode import dspark_capacity_metrics as metrics
from vllm.v1.spec_decode.dspark_capacity_metrics import (
    CapacitySpecDecodingLogging,
    CapacitySpecDecodingProm,
    CapacitySpecDecodingStats,
)
from vllm.v1.spec_decode.metrics import SpecDecodingStats

K = 3
LABELS = {"model_name": "m", "engine": "0"}
FIGURES = {
    "num_fixed_steps": 0,
    "num_active_steps": 1,
    "num_drafted_tokens": 6,
    "draft_depth_sum": 3,
}
# msgspec caches what a class declares, so a change of it needs a fresh process.
ROUND_TRIP = """
import dataclasses, json, sys
from vllm.v1.spec_decode.dspark_capacity_metrics import CapacitySpecDecodingStats
if sys.argv[1] == "installed":
    from vllm.plugins.dspark_capacity.seam import Scope
    from vllm.plugins.dspark_capacity.seams import install
    install(Scope.FRONTEND)
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

decoder = MsgpackDecoder(EngineCoreOutputs)
for sent in (CapacitySpecDecodingStats(**json.loads(sys.argv[2])), None):
    stats = SchedulerStats(spec_decoding_stats=sent)
    frames = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    got = decoder.decode(frames).scheduler_stats.spec_decoding_stats
    print("RESULT", json.dumps([type(got).__name__, got and dataclasses.asdict(got)]))
"""


def make_stats(*, drafts=2, verified=4, accepted=3, **figures):
    """Return one step of two requests at depth 3; 4 of 6 drafts were verified."""
    return CapacitySpecDecodingStats(
        num_spec_tokens=K,
        num_drafts=drafts,
        num_draft_tokens=verified,
        num_accepted_tokens=accepted,
        num_accepted_tokens_per_pos=[2, 1, 0],
        num_draft_tokens_per_pos=[2, 1, 1],
        **(FIGURES | figures),
    )


def send_and_receive(mode):
    result = subprocess.run(
        [sys.executable, "-c", ROUND_TRIP, mode, json.dumps(vars(make_stats()))],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    lines = result.stdout.splitlines()
    return [json.loads(x[7:]) for x in lines if x.startswith("RESULT ")]


def test_capacity_figures_survive_the_engine_message():
    (name, received), (nothing, _) = send_and_receive("installed")
    assert name == CapacitySpecDecodingStats.__name__
    assert received == vars(make_stats())
    assert nothing == "NoneType"


def test_premise_without_the_seam_the_message_loses_them():
    # Once this fails, the row frontend.stats-type is needless.
    (name, received), _ = send_and_receive("stock")
    assert name == SpecDecodingStats.__name__
    assert not FIGURES.keys() & received.keys()


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def make_prom(registry):
    """Return a function that builds the counters in a registry of their own."""

    class Prom(CapacitySpecDecodingProm):
        _counter_cls = functools.partial(prometheus_client.Counter, registry=registry)

    def make(*, enabled=True, engines=(0,), **options):
        config = SimpleNamespace(num_speculative_tokens=K, capacity_enabled=enabled)
        values = {engine: ["m", str(engine)] for engine in engines}
        return Prom(config, list(LABELS), values, **options)

    return make


def counters(registry, engine="0"):
    """Return ``{name{extra labels}: value}`` of one engine."""
    found = {}
    for metric in registry.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total") and sample.labels["engine"] == engine:
                extra = {k: v for k, v in sample.labels.items() if k not in LABELS}
                key = "".join(f"{{{k}={v}}}" for k, v in extra.items())
                name = sample.name.removeprefix("vllm:").removesuffix("_total")
                found[name + key] = sample.value
    return found


def test_counters_separate_drafted_verified_and_accepted(registry, make_prom):
    prom = make_prom()
    prom.observe(make_stats())
    prom.observe(
        make_stats(
            verified=6,
            accepted=5,
            num_fixed_steps=1,
            num_active_steps=0,
            draft_depth_sum=2,
        )
    )
    found = counters(registry)
    assert found["dspark_capacity_num_drafted_tokens"] == 12
    assert found["dspark_capacity_num_verified_tokens"] == 10
    assert found["dspark_capacity_draft_depth_sum"] == 5
    assert found["dspark_capacity_num_steps{state=active}"] == 1
    assert found["dspark_capacity_num_steps{state=fixed}"] == 1
    # vLLM's own counters keep their meaning: its draft tokens are the verified ones.
    assert found["spec_decode_num_drafts"] == 4
    assert found["spec_decode_num_draft_tokens"] == 10
    assert found["spec_decode_num_accepted_tokens"] == 8


def test_every_engine_has_counters_of_its_own(registry, make_prom):
    prom = make_prom(engines=(0, 1))
    prom.observe(make_stats(), engine_idx=1)
    found = counters(registry, "1")
    assert found["dspark_capacity_num_drafted_tokens"] == 6
    assert found["dspark_capacity_num_steps{state=active}"] == 1
    assert found["dspark_capacity_num_steps{state=fixed}"] == 0
    assert counters(registry, "0")["dspark_capacity_num_drafted_tokens"] == 0


def test_engine_without_capacity_gets_vllms_counters_only(registry, make_prom):
    make_prom(enabled=False).observe(make_stats())
    found = counters(registry)
    assert found["spec_decode_num_draft_tokens"] == 4
    assert not [name for name in found if "dspark" in name]


def test_no_speculation_gets_no_counters(registry):
    class Prom(CapacitySpecDecodingProm):
        _counter_cls = functools.partial(prometheus_client.Counter, registry=registry)

    Prom(None, list(LABELS), {0: ["m", "0"]}).observe(make_stats())
    assert counters(registry) == {}


def test_plain_figures_are_reported_once_and_counted_as_far_as_they_go(
    registry, make_prom, monkeypatch
):
    warnings = []
    monkeypatch.setattr(
        metrics.logger, "warning_once", lambda text, *_: warnings.append(text)
    )
    plain = SpecDecodingStats.new(K)
    plain.observe_draft(3, 2)
    make_prom().observe(plain)
    assert "before capacity was configured" in warnings[0]
    found = counters(registry)
    assert found["spec_decode_num_draft_tokens"] == 3
    assert found["dspark_capacity_num_verified_tokens"] == 0


class Lines(list):
    def __call__(self, text, *args):
        self.append(text % args)


def test_log_line_reports_capacity():
    logging, lines = CapacitySpecDecodingLogging(), Lines()
    logging.observe(make_stats())
    logging.observe(
        make_stats(
            verified=6,
            accepted=5,
            num_fixed_steps=1,
            num_active_steps=0,
            draft_depth_sum=2,
        )
    )
    logging.log(lines)
    upstream, ours = lines
    assert "Drafted: 10 tokens" in upstream and "Accepted: 8 tokens" in upstream
    assert ours == (
        "DSpark capacity: active in 50% of 2 steps, mean draft depth 2.50, "
        "per step drafted 6.0, verified 5.0, accepted 4.0 tokens"
    )


def test_log_line_covers_one_interval_and_is_quiet_without_steps():
    logging, lines = CapacitySpecDecodingLogging(), Lines()
    logging.log(lines)
    assert lines == []
    logging.observe(make_stats())
    logging.log(lines)
    assert len(lines) == 2
    logging.log(lines)
    assert len(lines) == 2
    logging.observe(make_stats(num_drafted_tokens=60))
    logging.log(lines)
    assert "drafted 60.0" in lines[-1]


def test_log_of_plain_figures_is_vllms_alone():
    logging, lines = CapacitySpecDecodingLogging(), Lines()
    plain = SpecDecodingStats.new(K)
    plain.observe_draft(3, 2)
    logging.observe(plain)
    logging.log(lines)
    assert len(lines) == 1
