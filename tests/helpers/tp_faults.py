# SPDX-License-Identifier: Apache-2.0
"""Spies and faults for capacity on several tensor-parallel ranks.

For ``EngineSpec.worker_setup``; read back with ``EngineSpec.worker_probe``. They go
into every worker and act by its rank.
"""

from types import SimpleNamespace
from typing import Any

from tests.helpers.tp_ranks import Drift

DRIFTING_RANK = 1


def record_decisions(worker: Any) -> None:
    """Log every step's plan and capacities, count the broadcasts, calibrate often.

    ``runner.decisions`` holds [active, draft_budget, num_tokens, next_depth,
    capacities], the last one None where nothing was ranked.
    """
    from vllm.v1.worker.gpu.spec_decode.dspark import online_sts

    runner = worker.model_runner
    online_sts.FIT_INTERVAL = 4
    manager, group = runner.capacity, runner.capacity._tp_group
    runner.decisions, runner.drift = [], Drift("none")
    runner.num_broadcasts = 0
    plan_step, admit = manager.plan_step, manager.admit

    def logged_plan_step(batch: Any) -> Any:
        plan = plan_step(batch)
        values = plan.active, plan.draft_budget, plan.num_tokens, plan.next_depth
        runner.decisions.append([*values, None])
        return plan

    def logged_admit(*args: Any) -> Any:
        capacities = admit(*args)
        runner.decisions[-1][-1] = capacities.tolist()
        return capacities

    def counted_broadcast(*args: Any, **kwargs: Any) -> Any:
        runner.num_broadcasts += 1
        return group.broadcast(*args, **kwargs)

    manager.plan_step, manager.admit = logged_plan_step, logged_admit
    manager._tp_group = SimpleNamespace(
        world_size=group.world_size, broadcast=counted_broadcast
    )


def drift(worker: Any) -> None:
    """Record, and change rank 1's own confidences in every step, each time otherwise.

    By one ulp, beyond recognition, and to NaN in turn.
    """
    record_decisions(worker)
    if worker.rank != DRIFTING_RANK:
        return
    runner = worker.model_runner
    runner.drift = Drift("mixed")
    finish_step = runner.capacity.finish_step

    def drifted_finish_step(probs: Any, *args: Any) -> None:
        runner.drift.apply(probs.numpy())
        finish_step(probs, *args)

    runner.capacity.finish_step = drifted_finish_step


def drift_without_broadcast(worker: Any) -> None:
    """Drift, and lose the broadcast that would undo it."""
    drift(worker)
    worker.model_runner.capacity._tp_group.broadcast = lambda *args, **kwargs: None


def _scales(runner: Any) -> list[float]:
    """Return the greedy scales that this rank's draft graph applies."""
    calibration = runner.speculator.calibration
    return [] if calibration is None else calibration[0, 0].tolist()


def decisions(worker: Any) -> dict[str, Any]:
    """Return what :func:`record_decisions` saw."""
    runner = worker.model_runner
    return {
        "rank": worker.rank,
        "steps": runner.decisions,
        "num_broadcasts": runner.num_broadcasts,
        "num_drifted": runner.drift.num_applied,
        "num_nan_rows": runner.capacity.mirror.num_nan_rows,
        "checks": runner.capacity._tp_check is not None,
        "calibrates": runner.online_sts is not None,
        "scales": _scales(runner),
    }
