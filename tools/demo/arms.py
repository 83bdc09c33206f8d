# SPDX-License-Identifier: Apache-2.0
"""The two servers of the demo: their command lines and environments.

Both arms share every setting but the speculation, so that they can be compared.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "tests" / "fixtures" / "tiny-dspark"
MODEL_NAME = "tiny-dspark"
NUM_SPECULATIVE_TOKENS = 7

# Steps per second by target tokens, made up: what a real accelerator's curve looks
# like, scaled down. 8 tokens (one request, K = 7) cost nearly the same as one, 64
# (eight requests) four times as much, so that trimming pays at C=8 and not at C=1.
# The interpreter's own costs follow the number of kernels, not of tokens: a curve
# measured there would never ask for less work.
EXAMPLE_CURVE = [
    [1, 21.0],
    [8, 20.0],
    [16, 18.0],
    [24, 15.0],
    [32, 11.5],
    [48, 7.5],
    [64, 5.0],
]

# The rehearsal sets what else it needs; these must be there before Python starts.
_CPU_ENV = {
    "VLLM_DSPARK_CPU_REHEARSAL": "1",
    "TRITON_INTERPRET": "1",
    # Threads gain nothing on a model this small, and waiting ones take the client's
    # and the front end's time on a small machine.
    "OMP_NUM_THREADS": "1",
}
# FlashInfer's sampler is compiled on first use, which needs nvcc.
_GPU_ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
_COMMON_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Settings:
    """What the demo was asked for, resolved for this machine."""

    device: str
    """"cpu" or "gpu"."""
    concurrency: tuple[int, ...]
    num_prompts: int
    max_tokens: int
    sps_curve: Any
    """"auto", a path or a list of [tokens, steps/s] pairs."""
    activation_batch_size: int
    """Running requests from which capacity is active; 0 = automatic."""
    json_path: Path
    """Result file; plot and logs are its neighbours."""
    server_args: tuple[str, ...] = ()
    """Further arguments for both servers."""
    ready_timeout_s: float = 300.0
    request_timeout_s: float = 120.0


def server_env(settings: Settings) -> dict[str, str]:
    """Return the variables to set for both servers."""
    return {
        **(_CPU_ENV if settings.device == "cpu" else _GPU_ENV),
        **_COMMON_ENV,
        "VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": str(
            settings.activation_batch_size
        ),
    }


def compilation_config(settings: Settings) -> dict[str, Any]:
    """Return the value of --compilation-config: FULL graphs, nothing compiled."""
    config: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if settings.device == "cpu":
        # An imitated capture runs the interpreter: half a second for each size.
        max_tokens = max(settings.concurrency) * (NUM_SPECULATIVE_TOKENS + 1)
        sizes = [1 << i for i in range(max_tokens.bit_length())]
        config["cudagraph_capture_sizes"] = sorted({*sizes, max_tokens})
    return config


def speculative_config(settings: Settings) -> dict[str, Any]:
    """Return the value of --speculative-config of the arm with capacity."""
    return {
        "method": "dspark",
        "model": str(CHECKPOINT / "draft"),
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
        "dspark_sps_curve": settings.sps_curve,
    }


def server_command(settings: Settings, *, port: int, capacity: bool) -> list[str]:
    """Return the command line of one arm.

    The module is what `vllm serve` runs; the `vllm` console command itself looks up
    a distribution called `vllm`, which the CPU build is not.
    """
    top = max(settings.concurrency)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    options = {
        "model": CHECKPOINT / "target",
        "served-model-name": MODEL_NAME,
        "host": "127.0.0.1",
        "port": port,
        # Batches of other shapes round differently; these keep that far from the gaps
        # between logits (FlashAttention has no float32).
        "dtype": "float32" if settings.device == "cpu" else "float16",
        "max-model-len": 256,
        "block-size": 32,
        "max-num-seqs": top,
        "max-num-batched-tokens": max(512, 2 * top * (NUM_SPECULATIVE_TOKENS + 1)),
        "generation-config": "vllm",
        "compilation-config": json.dumps(compilation_config(settings)),
    }
    if settings.device == "gpu":
        options["gpu-memory-utilization"] = 0.3
    if capacity:
        options["speculative-config"] = json.dumps(speculative_config(settings))
    for key, value in options.items():
        command += [f"--{key}", str(value)]
    # The same prompts come at every level: a cached prefix would change its load.
    command += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    return [*command, *settings.server_args]
