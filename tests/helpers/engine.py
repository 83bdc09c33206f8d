# SPDX-License-Identifier: Apache-2.0
"""Run engines of the CPU rehearsal in a fresh subprocess and return what they did.

From a test (one subprocess, two engines one after the other)::

    from tests.helpers.engine import EngineSpec, dspark, run_engines

    plain, fixed = run_engines(
        [
            EngineSpec(model=target, prompts=prompts),
            EngineSpec(model=target, prompts=prompts, speculative_config=dspark(draft)),
        ]
    )
    assert fixed.tokens == plain.tokens

By hand, from the repository with the variables of REHEARSAL_ENVIRONMENT set:
``python -m tests.helpers.engine_child --spec spec.json --out result.json``, where
spec.json is a list of objects with the fields of :class:`EngineSpec`.

The engine runs in the subprocess itself (workers too unless tensor parallel), so a
``worker_setup`` may put spies or faults into the worker. Importing this module is
cheap: vLLM is imported only by the subprocess.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
# Set before Python starts: Triton and vLLM read them at import.
REHEARSAL_ENVIRONMENT = {
    "VLLM_DSPARK_CPU_REHEARSAL": "1",
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # worker_setup is a function
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Few graph shapes, so that an engine starts in seconds.
ENGINE_DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 96,
    "seed": 0,
    "disable_log_stats": False,
    "enable_prefix_caching": False,
    "compilation_config": {"cudagraph_capture_sizes": [8, 16, 32, 56, 64]},
}
DEFAULT_TIMEOUT_S = 300


class EngineRunError(RuntimeError):
    """The subprocess failed; the message ends with the tail of its log."""


@dataclass(frozen=True)
class EngineSpec:
    """One engine and the work it gets.

    Attributes:
        model: Directory of the target checkpoint.
        prompts: Texts, or lists of token ids.
        sampling: Keyword arguments of SamplingParams for all prompts, or a list
            with one mapping a prompt. Default: greedy, 60 tokens.
        speculative_config: As on the command line; None is no speculation.
        engine: Further keyword arguments of ``LLM``, over ENGINE_DEFAULTS.
        worker_setup: ``module:function``, called in every worker as
            ``function(worker)`` before the prompts, e.g.
            ``tests.helpers.engine_faults:shift_query_start_loc``.
        worker_probe: Likewise after the prompts; its JSON-able results, one a
            worker, are in ``EngineResult.probes``.
        process_setup: ``module:function`` returning a context manager that is
            entered around the engine, in its process: for what must be in place
            while it is built.
        waves: Sizes of the groups in which prompts are submitted; None is all
            at once.
        arrivals: Engine step before which each prompt is submitted; the engine is
            then stepped by hand, and ``waves`` is not read. Ascending.
        aborts: Prompt index (as str) to the number of its tokens after which it is
            aborted; needs ``arrivals``.
    """

    model: str
    prompts: Sequence[Any]
    sampling: Any = field(default_factory=dict)
    speculative_config: dict[str, Any] | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    worker_setup: str | None = None
    worker_probe: str | None = None
    process_setup: str | None = None
    waves: Sequence[int] | None = None
    arrivals: Sequence[int] | None = None
    aborts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineResult:
    """What one engine did.

    Attributes:
        tokens: ``tokens[prompt][sample]`` is a list of token ids.
        texts: The same as text.
        logprobs: ``logprobs[prompt][sample]``: per token a mapping of token id
            (as str) to log-probability; None unless asked for.
        prompt_logprobs: Per prompt and position likewise; None unless asked for.
        metrics: Prometheus counters and gauges by name; vectors as lists.
            Labelled counters are summed under the name and listed under
            ``name{key="value"}`` for labels other than model_name and engine.
        graphs: ``RehearsalWorker.rehearsal_report()`` of the first worker.
        probes: Results of ``worker_probe``, one a worker.
        warnings: vLLM's warnings and errors of this engine, in order; what it
            logs once a process, an earlier engine may have logged.
        start_s: Seconds to build the engine.
        run_s: Seconds for all prompts.
    """

    tokens: list[list[list[int]]]
    texts: list[list[str]]
    logprobs: list[list[Any]]
    prompt_logprobs: list[Any]
    metrics: dict[str, Any]
    graphs: dict[str, Any]
    probes: list[Any]
    warnings: list[str]
    start_s: float
    run_s: float

    @property
    def num_replays(self) -> int:
        """Number of imitated graphs that were replayed."""
        return sum(count for _, count in self.graphs["replays"])

    def replayed(self, manager: str) -> list[list[Any]]:
        """Return ``[key, count]`` rows of one graph manager class.

        Args:
            manager: E.g. ``ModelCudaGraphManager`` or ``DFlashCudaGraphManager``.
        """
        return [row for row in self.graphs["replays"] if row[0][0] == manager]


def dspark(draft: str, num_speculative_tokens: int = 7, **keys: Any) -> dict[str, Any]:
    """Return a ``speculative_config`` for a DSpark draft.

    Args:
        draft: Directory of the draft checkpoint.
        num_speculative_tokens: Logical depth K.
        **keys: Further keys, e.g. ``dspark_sps_curve=[[8, 100.0], [64, 20.0]]``.
    """
    return {
        "method": "dspark",
        "model": draft,
        "num_speculative_tokens": num_speculative_tokens,
        **keys,
    }


def run_engines(
    specs: Sequence[EngineSpec],
    env: Mapping[str, str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[EngineResult]:
    """Run engines one after the other in one fresh Python process.

    Args:
        specs: Engines to run, in order. Each engine is closed before the next.
        env: Environment on top of REHEARSAL_ENVIRONMENT, for all of them.
        timeout_s: Limit for the whole process, which is killed then.

    Returns:
        One result a spec.

    Raises:
        EngineRunError: The process failed or ran out of time.
    """
    with tempfile.TemporaryDirectory(prefix="dspark-engine-") as folder:
        spec_file, out_file, log_file = (
            Path(folder) / name for name in ("spec.json", "out.json", "log.txt")
        )
        spec_file.write_text(json.dumps([asdict(spec) for spec in specs]))
        module = "tests.helpers.engine_child"
        command = [sys.executable, "-m", module]
        command += ["--spec", spec_file, "--out", out_file]
        with log_file.open("wb") as log:
            code = _run_group(command, _child_environment(env), log, timeout_s)
        if code != 0 or not out_file.exists():
            why = "ran out of time" if code is None else f"exit code {code}"
            tail = log_file.read_text(errors="replace")[-6000:]
            raise EngineRunError(f"engine subprocess: {why}; its log ends with\n{tail}")
        return [EngineResult(**result) for result in json.loads(out_file.read_text())]


def _child_environment(env: Mapping[str, str] | None) -> dict[str, str]:
    path = [str(REPOSITORY), os.environ.get("PYTHONPATH")]
    return {
        **os.environ,
        **REHEARSAL_ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(p for p in path if p),
        **(env or {}),
    }


def _run_group(command: list, env: dict, log: Any, timeout_s: float) -> int | None:
    """Run a command in a process group; None means that it was killed for time."""
    process = subprocess.Popen(
        command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:  # its workers are in the same group
            os.killpg(process.pid, 9)
            process.wait()
