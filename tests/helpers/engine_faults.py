# SPDX-License-Identifier: Apache-2.0
"""Spies and faults that ``EngineSpec.worker_setup`` puts into a V2 worker.

The faults are negative controls: a losslessness test that they do not turn red
proves nothing.
"""

from collections.abc import Callable
from typing import Any

# (tokens, ms): steep enough that upstream's argmax trims drafts on these models.
STEEP_DRAFT_CURVE = [(1, 0.5), (4, 0.6)]
STEEP_VERIFY_CURVE = [(1, 1.0), (8, 2.0), (16, 4.0), (32, 10.0), (64, 40.0)]


def _after_prepare_inputs(worker: Any, change: Callable[[Any], None]) -> None:
    runner = worker.model_runner
    original = runner.prepare_inputs

    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        if batch.num_reqs > 1:
            change(batch)
        return batch

    runner.prepare_inputs = prepare_inputs


def shift_query_start_loc(worker: Any) -> None:
    """Give the last token of the first request to the second one."""

    def change(batch: Any) -> None:
        batch.query_start_loc[1] -= 1

    _after_prepare_inputs(worker, change)


def shift_logits_indices(worker: Any) -> None:
    """Take every logit from the row before, the first one from the last row."""

    def change(batch: Any) -> None:
        batch.logits_indices.copy_(batch.logits_indices.roll(1))

    _after_prepare_inputs(worker, change)


def set_steep_costs(worker: Any) -> None:
    """Make upstream's adaptive verification trim, and log every step's budget.

    The log, ``runner.budget_log``, holds [scheduled drafts, draft budget].
    """
    runner = worker.model_runner
    manager = runner.adaptive_verification
    manager.set_cost_curves(STEEP_DRAFT_CURVE, STEEP_VERIFY_CURVE)
    runner.budget_log = []
    original = manager.reallocate_drafts

    def reallocate_drafts(*args: Any, **kwargs: Any) -> Any:
        num_drafts, _, budget = manager._batch_budget
        runner.budget_log.append([sum(num_drafts.values()), budget])
        return original(*args, **kwargs)

    manager.reallocate_drafts = reallocate_drafts


def budget_log(worker: Any) -> list[list[int]]:
    """Return what :func:`set_steep_costs` logged."""
    return worker.model_runner.budget_log
