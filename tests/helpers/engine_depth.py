# SPDX-License-Identifier: Apache-2.0
"""Pin, shuffle or schedule the draft depth of an engine, and log what it did.

For ``EngineSpec.worker_setup`` and ``worker_probe``. The depth is imposed where the
controller and the depth table would report it, so everything behind them (scheduler,
placeholders, graphs, speculator) is the real thing.

Each served step leaves one record in ``runner.depth_log``:
  * ``reported``: depth reported to the scheduler.
  * ``told``: depth that the scheduler asked for.
  * ``skips``: whether nobody can use this step's drafts (all requests end), so that
    vLLM 0.33 makes none; 0.32 always makes them.
  * ``depth``: depth that was drafted.
  * ``prefilling``: whether some request of the batch was still prefilling.
  * ``scheduled``: scheduled drafts per request, in batch order.
  * ``budget``: drafts verified of those, None for all.
  * ``publishes``: whether what the step did is published.
  * ``graphs``: replayed graphs, ``[manager, num_reqs, uniform_token_count]``.
  * ``draft_rows``: input rows of every call of the draft model, padding included.
  * ``drafts``: ``[request id, tokens so far, draft ids]`` per request.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.helpers.engine_faults import shift_logits_indices

# Prompts a pin lasts for, and steps that drafts of the former depth live on.
PIN_LENGTH = 2
# Steps at depth 0 before ``dip_to_zero`` goes back to K.
DIP_STEPS = 8
NO_DRAFTS = np.zeros(0, dtype=np.int32)


def _impose(worker: Any, choose: Callable[[int, int], int]) -> None:
    """Report ``choose(served step, requests so far)`` as the depth of every load."""
    runner = worker.model_runner
    capacity, log = runner.capacity, []
    num_requests = [0]
    capacity.planner._controller.update = lambda wish, num_reqs: log[-1]["reported"]
    original_add = capacity.add_request

    def add_request(slot: int) -> None:
        num_requests[0] += 1
        original_add(slot)

    def impose() -> dict[str, Any]:
        reported = choose(len(log), num_requests[0])
        capacity.depth_of_load = (reported,) * (runner.max_num_reqs + 1)
        return {"reported": reported}

    capacity.add_request = add_request
    _log_plans(runner, log, impose)


def log_depths(worker: Any) -> None:
    """Log the steps of an engine that chooses its depths itself."""
    _log_plans(worker.model_runner, [], dict)


def _log_plans(runner: Any, log: list, before: Callable[[], dict[str, Any]]) -> None:
    """Log every step, starting its record with what ``before`` returns."""
    runner.depth_log = log
    original_plan = runner.capacity.plan_step

    def plan_step(batch: Any) -> Any:
        drafts = batch.num_draft_tokens_np
        log.append(
            before()
            | {
                "prefilling": bool(batch.is_prefilling_np.any()),
                "scheduled": (NO_DRAFTS if drafts is None else drafts).tolist(),
            }
        )
        plan = original_plan(batch)
        log[-1]["budget"] = plan.draft_budget
        log[-1]["publishes"] = plan.active and plan.publishes
        return plan

    runner.capacity.plan_step = plan_step
    _log_what_ran(runner)


def _log_what_ran(runner: Any) -> None:
    from vllm.platforms.dspark_rehearsal.graphs import replay_log

    execute_model, sample_tokens = runner.execute_model, runner.sample_tokens
    seen = [0]
    asked: dict[str, Any] = {}
    rows: list[int] = []
    runner.speculator.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])),
        with_kwargs=True,
    )

    def logged_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        seen[0] = len(replay_log)
        rows.clear()
        asked["told"] = scheduler_output.num_spec_tokens_to_schedule
        asked["skips"] = getattr(scheduler_output, "skip_drafts", False)
        return execute_model(scheduler_output, *args, **kwargs)

    def logged_sample(grammar_output: Any) -> Any:
        state = runner.execute_model_state
        output = sample_tokens(grammar_output)
        if state is None:
            return output
        batch, depth = state.input_batch, state.num_spec_tokens_to_schedule
        states = runner.req_states
        drafts = states.draft_tokens[batch.idx_mapping, :depth].tolist()
        lengths = states.total_len.gpu[batch.idx_mapping].tolist()
        runner.depth_log[-1] |= asked | {
            "depth": depth,
            "draft_rows": list(rows),
            "graphs": [
                [key.manager, key.num_reqs, key.uniform_token_count]
                for key in list(replay_log)[seen[0] :]
            ],
            "drafts": [
                list(row) for row in zip(batch.req_ids, lengths, drafts, strict=True)
            ],
        }
        return output

    runner.execute_model, runner.sample_tokens = logged_execute, logged_sample


def pin_each_depth(worker: Any) -> None:
    """Pin depth 0 for the first PIN_LENGTH prompts, 1 for the next ones, ..., K."""
    num_steps = worker.model_runner.num_speculative_steps

    def choose(step: int, num_requests: int) -> int:
        return min(max(num_requests - 1, 0) // PIN_LENGTH, num_steps)

    _impose(worker, choose)


def shuffle_depth(worker: Any) -> None:
    """Report a random enabled depth every step."""
    depths, rng = worker.model_runner.capacity.planner.depths, random.Random(0)
    _impose(worker, lambda step, num_requests: rng.choice(depths))


def stay_at_full(worker: Any) -> None:
    """Report K every step."""
    num_steps = worker.model_runner.num_speculative_steps
    _impose(worker, lambda step, num_requests: num_steps)


def dip_to_zero(worker: Any) -> None:
    """Report 0 for DIP_STEPS steps after the first few, then K for ever."""
    num_steps = worker.model_runner.num_speculative_steps

    def choose(step: int, num_requests: int) -> int:
        return 0 if 2 <= step < 2 + DIP_STEPS else num_steps

    _impose(worker, choose)


def dip_without_context(worker: Any) -> None:
    """Fault: as ``dip_to_zero``, but a step at depth 0 stores no context K/V."""
    dip_to_zero(worker)
    speculator = worker.model_runner.speculator
    propose = speculator.propose

    @functools.wraps(propose)
    def skip_at_zero(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("num_speculative_tokens") == 0:
            return speculator.draft_tokens[: input_batch.num_reqs]
        return propose(input_batch, *args, **kwargs)

    speculator.propose = skip_at_zero


def shuffle_depth_and_shift_logits(worker: Any) -> None:
    """Fault: as ``shuffle_depth``, with every logit from the row before."""
    shuffle_depth(worker)
    shift_logits_indices(worker)


def depth_log(worker: Any) -> list[dict[str, Any]]:
    """Return the records of the served steps."""
    return worker.model_runner.depth_log


def shuffle_depth_and_sharpen(worker: Any) -> None:
    """Fault: as ``shuffle_depth``, but drafts are judged at a tenth of the temperature.

    The patch dies with the process of the engines.
    """
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    shuffle_depth(worker)
    judge = rejection_sampler.rejection_sample

    @functools.wraps(judge)
    def judge_sharply(target_logits: Any, *args: Any, **kwargs: Any) -> Any:
        return judge(10.0 * target_logits, *args, **kwargs)

    rejection_sampler.rejection_sample = judge_sharply
