# SPDX-License-Identifier: Apache-2.0
"""Spies and faults for engines with capacity; see ``EngineSpec.worker_setup``.

A probe (``record``) returns what every spy wrote, as JSON-able rows.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

# [tokens, steps/s]: 1 ms to 40 ms, so steep that few drafts pay with six requests.
STEEP_CURVE = [[1, 1000.0], [8, 500.0], [16, 250.0], [32, 100.0], [64, 25.0]]
# Rows of logits that one chunk of the rejection sampler holds under ``small_chunks``.
SMALL_CHUNK_ROWS = 20
KNEE = 4


def watch(worker: Any) -> None:
    """Record every dispatch, plan, verification and capacity call of a worker."""
    runner = worker.model_runner
    runner.spy = {"dispatch": [], "steps": [], "counts": Counter()}
    manager = runner.cudagraph_manager
    _after(manager, "dispatch", lambda desc: _note_dispatch(runner.spy, "target", desc))
    drafter = getattr(runner.speculator, "query_cudagraph_manager", None)
    if drafter is not None:
        _after(
            drafter, "dispatch", lambda desc: _note_dispatch(runner.spy, "draft", desc)
        )
    if getattr(runner, "capacity", None) is not None:
        _watch_capacity(runner)
    _watch_sampling(runner)


def _after(target: Any, name: str, note: Callable[[Any], None]) -> None:
    original = getattr(target, name)

    def call_and_note(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        note(result)
        return result

    setattr(target, name, call_and_note)


def _note_dispatch(spy: dict[str, Any], which: str, desc: Any) -> None:
    spy["dispatch"].append(
        [
            which,
            str(desc.cg_mode),
            desc.num_tokens,
            desc.num_reqs,
            desc.uniform_token_count,
            desc.max_query_len,
        ]
    )


def _watch_capacity(runner: Any) -> None:
    counts, capacity = runner.spy["counts"], runner.capacity
    for target, name in (
        (capacity, "admit"),
        (capacity.mirror, "land"),
        (capacity.mirror, "publish"),
        (capacity.mirror, "restart"),
        (capacity.planner, "_plan_budget"),
        (capacity.planner, "_plan_depth"),
        (runner, "_start_report_copy"),
    ):
        counts[name] = 0
        _after(target, name, lambda _, name=name: counts.update([name]))
    runner.spy["capacities"] = None

    def note(capacities: Any) -> None:
        runner.spy["capacities"] = capacities.tolist()

    _after(capacity, "admit", note)


def _watch_sampling(runner: Any) -> None:
    original = runner.sample

    def sample(hidden_states: Any, batch: Any, *args: Any) -> Any:
        sampler = runner.rejection_sampler
        chunks_forbidden = sampler is not None and sampler.enable_adaptive_verification
        result = original(hidden_states, batch, *args)
        plan = getattr(runner, "_step_plan", None)
        drafts = batch.num_draft_tokens_per_req
        drafts = [0] * batch.num_reqs if drafts is None else drafts.tolist()
        trims = plan is not None and plan.trims
        runner.spy["steps"].append(
            {
                "reqs": [req_id.rpartition("-")[0] for req_id in batch.req_ids],
                "drafts": drafts,
                "capacities": runner.spy["capacities"] if trims else drafts,
                "budget": plan.draft_budget if trims else None,
                "active": plan is not None and plan.active,
                "decodes": int((~batch.is_prefilling_np).sum()),
                "chunks_forbidden": chunks_forbidden,
                "target_tokens": batch.num_tokens,
                "sampled": result[1].tolist(),
            }
        )
        return result

    runner.sample = sample


def record(worker: Any) -> dict[str, Any]:
    """Return what ``watch`` recorded, and which classes served."""
    runner = worker.model_runner
    adaptive = runner.speculative_config
    return {
        **runner.spy,
        "counts": dict(runner.spy["counts"]),
        "runner": type(runner).__name__,
        "manager": type(getattr(runner, "capacity", None)).__name__,
        "upstream_flag": bool(getattr(adaptive, "enable_adaptive_verification", False)),
    }


def watch_above_knee(worker: Any) -> None:
    """Watch, with the knee at ``KNEE`` requests."""
    worker.model_runner.capacity.costs.activation_num_reqs = KNEE
    watch(worker)


def watch_always(worker: Any) -> None:
    """Watch, with capacity active from one request on."""
    worker.model_runner.capacity.costs.activation_num_reqs = 1
    watch(worker)


def watch_never(worker: Any) -> None:
    """Watch, with the knee above every batch."""
    worker.model_runner.capacity.costs.activation_num_reqs = 1000
    watch(worker)


# ---- faults ------------------------------------------------------------------


def shift_capacities(worker: Any) -> None:
    """Give the last draft of the first request to the second, in trimmed steps.

    Only attention sees it: a shift that everything agrees on is another admission,
    and as lossless as the right one.
    """
    watch(worker)
    runner = worker.model_runner

    def shift(batch: Any) -> None:
        trims = runner._step_plan.trims and batch.num_reqs > 1
        if trims and runner.capacity.capacities[0] > 0:
            batch.query_start_loc[1] -= 1

    _after(runner, "prepare_inputs", shift)


def corrupt_first_request(worker: Any) -> None:
    """Let the confidence head return NaN for the request that came first."""
    watch_always(worker)
    runner = worker.model_runner
    original = runner.capacity.finish_step

    def finish_step(probs: Any, batch: Any, depth: int) -> None:
        for row, req_id in enumerate(batch.req_ids):
            if req_id.startswith("0-"):
                probs[row] = float("nan")
        original(probs, batch, depth)

    runner.capacity.finish_step = finish_step


# ---- process set-ups ---------------------------------------------------------


@contextlib.contextmanager
def small_chunks() -> Iterator[None]:
    """Let one chunk of the rejection sampler hold ``SMALL_CHUNK_ROWS`` rows."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    original = rejection_sampler.get_max_chunk_logits
    size = rejection_sampler.MAX_CHUNK_BYTES
    vocab_size = 748
    rejection_sampler.MAX_CHUNK_BYTES = SMALL_CHUNK_ROWS * vocab_size * 4
    try:
        assert original(vocab_size) == SMALL_CHUNK_ROWS
        yield
    finally:
        rejection_sampler.MAX_CHUNK_BYTES = size


@contextlib.contextmanager
def attention_without_varlen_graphs() -> Iterator[None]:
    """Let the attention builder replay uniform decode graphs only."""
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    original = CPUAttentionMetadataBuilder.__dict__.get("get_cudagraph_support")
    CPUAttentionMetadataBuilder.get_cudagraph_support = classmethod(
        lambda cls, *_: AttentionCGSupport.UNIFORM_BATCH
    )
    try:
        yield
    finally:
        if original is None:
            del CPUAttentionMetadataBuilder.get_cudagraph_support
        else:
            CPUAttentionMetadataBuilder.get_cudagraph_support = original
