# SPDX-License-Identifier: Apache-2.0
"""Spies of the correctness list; see ``EngineSpec.worker_setup``.

``by_request`` pins a depth per request, for comparing a prefix-cache hit with a cold
run. ``watch_batches`` shuffles the depth and records what every target batch and
every draft pass read. ``log_draft_passes`` must be in place while the engine is built.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from tests.helpers.engine_depth import _impose, depth_log, shuffle_depth

# Trimmed steps from one with budget 0 to the next.
ZERO_BUDGET_INTERVAL = 4
# Request by request: its role and the depth it runs at. The test module has the
# prompts; a settler runs until the new depth is in force.
WRITER, SETTLER, HIT, COLD = "writer", "settler", "hit", "cold"
REQUESTS = [
    *[(WRITER, 0), (SETTLER, 7), (HIT, 7), (COLD, 7)],
    *[(WRITER, 3), (SETTLER, 3), (HIT, 3), (COLD, 3)],
]


def depth_by_request(worker: Any) -> None:
    """Report the depth of REQUESTS, one at a time, and verify half of the drafts.

    The planner's own budget would also depend on what earlier requests left behind
    in its priors, which is not what a hit is compared for.
    """
    planner = worker.model_runner.capacity.planner
    planner._choose_budget = lambda batch, facts, *_: (facts.num_drafts + 1) // 2

    def choose(step: int, num_requests: int) -> int:
        return REQUESTS[max(num_requests, 1) - 1][1]

    _impose(worker, choose)


def depth_by_request_without_context(worker: Any) -> None:
    """Fault: likewise, but a step at depth 0 stores no context K/V."""
    depth_by_request(worker)
    speculator = worker.model_runner.speculator
    propose, last = speculator.propose, []

    @functools.wraps(propose)
    def skip_at_zero(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("num_speculative_tokens") == 0 and last:
            return last[0]
        last[:] = [propose(*args, **kwargs)]
        return last[0]

    speculator.propose = skip_at_zero


def rounds_by_request(worker: Any) -> list[list[dict[str, Any]]]:
    """Return each request's rounds in order of arrival.

    A round holds ``depth``, ``budget``, ``scheduled`` drafts, ``length`` (tokens so
    far, so differences count accepted drafts) and ``drafts`` made.
    """
    rounds: dict[str, list[dict[str, Any]]] = {}
    for step in depth_log(worker):
        for row, (req_id, length, drafts) in enumerate(step["drafts"]):
            entry = {k: step[k] for k in ("depth", "budget", "prefilling")}
            scheduled = step["scheduled"][row] if step["scheduled"] else 0
            entry |= {"scheduled": scheduled, "length": length, "drafts": drafts}
            rounds.setdefault(req_id, []).append(entry)
    return list(rounds.values())


# ---- every batch and every draft pass ------------------------------------------

_draft_passes: list[dict[str, Any]] = []


@contextlib.contextmanager
def log_draft_passes() -> Iterator[None]:
    """Record the buffers of every draft pass, captured, replayed or eager."""
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    original = DSparkSpeculator._generate_draft

    @functools.wraps(original)
    def generate_draft(
        self: Any, num_reqs: int, num_tokens_padded: int, *args: Any, **kwargs: Any
    ) -> None:
        original(self, num_reqs, num_tokens_padded, *args, **kwargs)
        _note_draft_pass(self, num_reqs, num_tokens_padded)

    _draft_passes.clear()
    DSparkSpeculator._generate_draft = generate_draft
    try:
        yield
    finally:
        DSparkSpeculator._generate_draft = original


def _note_draft_pass(speculator: Any, num_reqs: int, num_tokens: int) -> None:
    from vllm.platforms.dspark_rehearsal.graphs import _state, replay_serial

    depth = speculator.num_speculative_steps
    rows = slice(0, num_reqs * depth)
    buffers = (
        speculator._anchor_idx,
        speculator.sample_col,
        speculator.sample_indices,
        speculator.sample_idx_mapping,
        speculator.draft_token_confidence_probs,
        speculator.input_buffers.input_ids,
    )
    indices = speculator.sample_indices[rows]
    _draft_passes.append(
        {
            "depth": depth,
            "capture": _state.pending is not None,
            "replay": replay_serial() != 0,
            "num_reqs": num_reqs,
            "num_tokens": num_tokens,
            "sample_rows": [int(indices.min()), int(indices.max())],
            "anchor_rows": int(speculator._anchor_idx[:num_reqs].max()),
            "padded": int((speculator.sample_idx_mapping[rows] < 0).sum()),
            "ids": _range(speculator.draft_tokens[:num_reqs, :depth]),
            "addresses": [b.data_ptr() for b in buffers],
            # Held, so that no later buffer can be given the same address.
            "_held": buffers,
        }
    )


def _range(values: Any) -> list[int]:
    return [int(values.min()), int(values.max())] if values.numel() else [0, 0]


def watch_batches(worker: Any) -> None:
    """Shuffle the depth and record every target batch as it is laid out.

    Every ZERO_BUDGET_INTERVAL-th budget is 0, which the costs alone rarely ask for.
    """
    shuffle_depth(worker)
    planner = worker.model_runner.capacity.planner
    choose_budget, num_plans = planner._choose_budget, itertools.count(1)

    def sometimes_zero(*args: Any) -> int:
        if next(num_plans) % ZERO_BUDGET_INTERVAL == 0:
            return 0
        return choose_budget(*args)

    planner._choose_budget = sometimes_zero
    runner = worker.model_runner
    runner.batches = []
    prepare_inputs, sample_tokens = runner.prepare_inputs, runner.sample_tokens

    def watched_prepare(*args: Any, **kwargs: Any) -> Any:
        batch = prepare_inputs(*args, **kwargs)
        runner.batches.append(_describe(runner, batch))
        return batch

    def watched_sample(grammar_output: Any) -> Any:
        output = sample_tokens(grammar_output)
        runner.batches[-1]["draft_ids"] = _range(runner.req_states.draft_tokens)
        return output

    runner.prepare_inputs, runner.sample_tokens = watched_prepare, watched_sample


def _describe(runner: Any, batch: Any) -> dict[str, Any]:
    drafts = batch.num_draft_tokens_per_req
    capacities = runner.capacity.capacities[: batch.num_reqs].tolist()
    trims = runner._step_plan.trims
    return {
        "trims": trims,
        "has_grammar": batch.has_structured_output_reqs,
        "budget": runner._step_plan.draft_budget,
        "capacities": capacities if trims else None,
        "scheduled": [] if drafts is None else drafts.tolist(),
        "num_reqs": batch.num_reqs,
        "num_reqs_padded": batch.num_reqs_after_padding,
        "num_tokens": batch.num_tokens,
        "num_tokens_padded": batch.num_tokens_after_padding,
        "query_start_loc": batch.query_start_loc.tolist(),
        "persistent_starts": runner.input_buffers.query_start_loc.tolist(),
        "seq_lens": batch.seq_lens.tolist(),
        "is_padding": batch.is_padding.tolist(),
        "logits_rows": _range(batch.logits_indices),
        "ids": _range(batch.input_ids[: batch.num_tokens]),
        "held_of_nobody": sorted(_held_slots(runner) - set(_slots(runner))),
        "num_live": len(_slots(runner)),
    }


def _slots(runner: Any) -> list[int]:
    return list(runner.req_states.req_id_to_index.values())


def _held_slots(runner: Any) -> set[int]:
    """Return the slots whose last confidences the host keeps from being seen."""
    return {
        int(slot) for held, _ in runner.capacity.mirror._held for slot in held.slots
    }


def batches(worker: Any) -> dict[str, Any]:
    """Return the batches, draft passes, graphs and the draft's attention."""
    runner = worker.model_runner
    speculator = runner.speculator
    passes = [
        {k: v for k, v in entry.items() if k != "_held"} for entry in _draft_passes
    ]
    backends = {
        group.backend.get_name(): group.backend.supports_non_causal()
        for groups in speculator.attn_groups
        for group in groups
    }
    return {
        "batches": runner.batches,
        "passes": passes,
        "depths": runner.depth_log,
        "max_num_reqs": runner.max_num_reqs,
        "vocab_size": runner.vocab_size,
        "graphs": {
            "target": _graphs(runner.cudagraph_manager),
            "draft": _graphs(speculator.query_cudagraph_manager),
        },
        "draft_needs_non_causal": speculator.requires_non_causal,
        "draft_backends": backends,
    }


def _graphs(manager: Any) -> list[list[Any]]:
    descs = {d for found in manager._candidates.values() for d in found}
    descs |= set(manager.graphs)
    return [
        [d.num_tokens, d.num_reqs, d.uniform_token_count, d.max_query_len]
        for d in descs
    ]


def seeds(worker: Any) -> dict[str, Any]:
    """Return a rank's sampling seeds and what it sampled last, by request slot."""
    runner = worker.model_runner
    states = runner.sampler.sampling_states
    return {
        "rank": worker.rank,
        "seeds": states.seeds.np.tolist(),
        "explicit": states.seeds_set.tolist(),
        "last_sampled": runner.req_states.last_sampled_tokens.flatten().tolist(),
    }
