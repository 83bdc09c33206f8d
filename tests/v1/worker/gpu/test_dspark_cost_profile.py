# SPDX-License-Identifier: Apache-2.0
"""The standalone profiler measures an engine, and another engine uses its file.

Two engines of the CPU rehearsal: the profiler's, and one that serves with the file.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.engine import (
    REHEARSAL_ENVIRONMENT,
    REPOSITORY,
    EngineSpec,
    dspark,
    run_engines,
)

TIMEOUT_S = 900
pytestmark = [pytest.mark.engine, pytest.mark.timeout(2 * TIMEOUT_S)]
K, DEPTHS = 7, [2, 7]
PROBES = "tests.helpers.cost_probes:"
# Room for a context twice as long as the short one.
MAX_MODEL_LEN = 512
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 32}
CAPTURE = {"cudagraph_capture_sizes": [8, 16, 32]}


@pytest.fixture(scope="module")
def profiled(tiny_target, tiny_draft, tmp_path_factory):
    """The profiler's file, and what it printed."""
    out = tmp_path_factory.mktemp("profile") / "curve.json"
    speculative = dspark(tiny_draft, K, dspark_draft_depths=DEPTHS)
    engine = {
        **SIZES,
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "num_gpu_blocks_override": 96,
        "speculative_config": json.dumps(speculative),
        "compilation_config": json.dumps(CAPTURE),
    }
    command = [sys.executable, "benchmarks/profile_dspark_sps_curve.py", tiny_target]
    for name, value in engine.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    command += ["--iters", "1", "--warmup", "0", "--overhead-ms", "0.5"]
    command += ["-o", str(out), "--plot", str(out.with_suffix(".png"))]
    environment = {**os.environ, **REHEARSAL_ENVIRONMENT}
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return out, done


def test_profiler_writes_prints_and_plots(profiled):
    out, done = profiled
    document = json.loads(out.read_text())
    assert sorted(map(int, document["draft_ms"])) == DEPTHS
    assert len(document["draft_ms"]["7"]) == SIZES["max_num_seqs"] + 1
    assert len(document["verify_varlen_ms"]) == SIZES["max_num_batched_tokens"] + 1
    assert document["overhead_ms"] == 0.5
    assert document["measured"]["attention_backends"] == ["CPU_ATTN"]
    assert document["measured"]["profile"] == [1, 0]
    assert "depth 7" in done.stdout and "Capacity acts" in done.stdout
    assert "Profiling step costs" in done.stderr, "its progress bar"
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_an_engine_uses_the_file_and_learns_from_its_steps(
    profiled, tiny_target, tiny_draft, heldout_prompts
):
    out, _ = profiled
    keys = {"dspark_draft_depths": DEPTHS, "dspark_sps_curve": str(out)}
    spec = EngineSpec(
        model=tiny_target,
        prompts=heldout_prompts[:4],
        sampling={"max_tokens": 40, "ignore_eos": True},
        speculative_config=dspark(tiny_draft, K, **keys),
        engine=SIZES | {"max_model_len": MAX_MODEL_LEN, "compilation_config": CAPTURE},
        worker_setup=PROBES + "act_always",
        worker_probe=PROBES + "costs",
    )
    [run] = run_engines(
        [spec],
        env={"VLLM_DSPARK_CAPACITY_LOG_INTERVAL": "0.01"},
        timeout_s=TIMEOUT_S,
    )
    [probe] = run.probes
    assert probe["measured"] and probe["profile_s"] == 0.0, "nothing was timed again"
    document = json.loads(out.read_text())
    assert probe["draft_ms"] == document["draft_ms"]["7"]
    assert len(probe["observed"]) > 3, "premise: steps were compared"
    assert all(ms > 0 for _, _, ms in probe["observed"])
    assert {depth for depth, _, _ in probe["observed"]} <= set(DEPTHS)
    assert probe["common_ratio"] != 1.0
    assert probe["shares"]["fixed K"] > 0 and probe["shares"]["depth 2"] > 0
    assert probe["shares"]["varlen"] > 0
    assert not [w for w in run.warnings if "no effect" in w or "Ignoring" in w]
