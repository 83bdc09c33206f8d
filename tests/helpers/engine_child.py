# SPDX-License-Identifier: Apache-2.0
"""The subprocess of :mod:`tests.helpers.engine`: runs engines, writes what they did."""

import argparse
import contextlib
import gc
import importlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.helpers.engine import ENGINE_DEFAULTS, EngineResult, EngineSpec
from tests.helpers.fast_interpreter import fast_interpreter


def _load(name: str) -> Any:
    module, _, attr = name.partition(":")
    return getattr(importlib.import_module(module), attr)


def _call_in_worker(worker: Any, name: str) -> Any:
    import importlib

    module, _, attr = name.partition(":")
    return getattr(importlib.import_module(module), attr)(worker)


def _sampling_params(spec: EngineSpec) -> list[Any]:
    from vllm import SamplingParams

    defaults = {"temperature": 0.0, "max_tokens": 60}
    per_prompt = spec.sampling
    if isinstance(per_prompt, Mapping):
        per_prompt = [per_prompt] * len(spec.prompts)
    return [SamplingParams(**_sampling_kwargs({**defaults, **s})) for s in per_prompt]


def _sampling_kwargs(sampling: dict[str, Any]) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    structured = sampling.get("structured_outputs")
    if isinstance(structured, Mapping):
        structured = StructuredOutputsParams(**structured)
        sampling = {**sampling, "structured_outputs": structured}
    if "logit_bias" in sampling:
        bias = {int(token): b for token, b in sampling["logit_bias"].items()}
        sampling = {**sampling, "logit_bias": bias}
    return sampling


def _prompt(prompt: Any) -> Any:
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}


def _generate(llm: Any, spec: EngineSpec) -> list[Any]:
    params = _sampling_params(spec)
    prompts = [_prompt(p) for p in spec.prompts]
    if spec.arrivals is not None:
        return _step_by_hand(llm.llm_engine, spec, prompts, params)
    outputs, start = [], 0
    for size in spec.waves or [len(prompts)]:
        stop = start + size
        outputs += llm.generate(prompts[start:stop], params[start:stop], use_tqdm=False)
        start = stop
    return outputs


def _step_by_hand(
    engine: Any, spec: EngineSpec, prompts: list[Any], params: list[Any]
) -> list[Any]:
    outputs: dict[str, Any] = {}
    waiting = list(enumerate(zip(spec.arrivals or (), prompts, params, strict=True)))
    num_steps = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1][0] <= num_steps:
            index, (_, prompt, sampling) = waiting.pop(0)
            engine.add_request(str(index), prompt, sampling)
        for output in engine.step():
            outputs[output.request_id] = output
            limit = spec.aborts.get(output.request_id)
            num_tokens = len(output.outputs[0].token_ids)
            if limit is not None and num_tokens >= limit and not output.finished:
                engine.abort_request([output.request_id])
        num_steps += 1
    return [outputs[str(index)] for index in range(len(prompts))]


def _metrics(llm: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", getattr(metric, "values", None))
        if value is None:
            continue
        labels = {
            k: v for k, v in metric.labels.items() if k not in ("model_name", "engine")
        }
        if labels:
            inner = ",".join(f'{k}="{v}"' for k, v in sorted(labels.items()))
            found[f"{metric.name}{{{inner}}}"] = value
        if isinstance(value, list) or metric.name not in found:
            found[metric.name] = value
        else:
            found[metric.name] += value
    return found


def _logprobs(per_token: Any) -> Any:
    if per_token is None:
        return None
    return [
        None if at is None else {str(t): lp.logprob for t, lp in at.items()}
        for at in per_token
    ]


def _close(llm: Any) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


class _Warnings(logging.Handler):
    """Collects vLLM's warnings and errors; a context manager."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("vllm").addHandler(self)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logging.getLogger("vllm").removeHandler(self)


def _run_one(spec: EngineSpec) -> EngineResult:
    setup = _load(spec.process_setup) if spec.process_setup else contextlib.nullcontext
    with fast_interpreter(), setup(), _Warnings() as warnings:
        return _run_engine(spec, warnings)


def _run_engine(spec: EngineSpec, warnings: list[str]) -> EngineResult:
    import time

    from vllm import LLM

    gc.freeze()  # vLLM collects a dozen times; its modules need no second look
    options = {**ENGINE_DEFAULTS, **spec.engine}
    start = time.perf_counter()
    llm = LLM(model=spec.model, speculative_config=spec.speculative_config, **options)
    ready = time.perf_counter()
    try:
        if spec.worker_setup:
            llm.collective_rpc(_call_in_worker, args=(spec.worker_setup,))
        llm.collective_rpc("reset_rehearsal_report")
        outputs = _generate(llm, spec)
        end = time.perf_counter()
        probes = []
        if spec.worker_probe:
            probes = llm.collective_rpc(_call_in_worker, args=(spec.worker_probe,))
        return EngineResult(
            tokens=[[list(s.token_ids) for s in o.outputs] for o in outputs],
            texts=[[s.text for s in o.outputs] for o in outputs],
            logprobs=[[_logprobs(s.logprobs) for s in o.outputs] for o in outputs],
            prompt_logprobs=[_logprobs(o.prompt_logprobs) for o in outputs],
            metrics=_metrics(llm),
            graphs=llm.collective_rpc("rehearsal_report")[0],
            probes=probes,
            warnings=warnings,
            start_s=ready - start,
            run_s=end - ready,
        )
    finally:
        _close(llm)


def main() -> None:
    """Run the engines of a spec file and write their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="list of EngineSpec")
    parser.add_argument("--out", type=Path, required=True, help="results, JSON")
    args = parser.parse_args()
    specs = [EngineSpec(**spec) for spec in json.loads(args.spec.read_text())]
    results = [asdict(_run_one(spec)) for spec in specs]
    args.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
