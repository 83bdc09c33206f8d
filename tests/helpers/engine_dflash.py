# SPDX-License-Identifier: Apache-2.0
"""Set-up and probe for DFlash engines that choose the depth themselves."""

from typing import Any

import numpy as np

from tests.helpers import engine_depth


def price_by_hand(worker: Any) -> None:
    """Act from one request on, by costs at which K pays if drafts are good.

    A step takes 20 ms and a millisecond a target token: with the prior's
    acceptance K is best, with one accepted draft in ten depth 1 is.
    """
    from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts

    capacity = worker.model_runner.capacity
    costs, planner = capacity.costs, capacity.planner
    reqs = np.arange(costs.max_num_reqs + 1)
    dearest = 20.0 + costs.max_num_tokens
    costs._costs = StepCosts(
        {d: 0.1 * d * reqs for d in costs.depths},
        {d: 20.0 + reqs * (d + 1.0) for d in costs.depths},
        np.full(costs.max_num_tokens + 1, dearest),
    )
    costs.activation_num_reqs = 1
    # What this machine's steps take says nothing about these costs.
    planner.corrector = capacity.mirror.on_step_time = None
    capacity.depth_of_load = planner.depth_of_load()
    engine_depth.log_depths(worker)


def depths_and_prior(worker: Any) -> dict[str, Any]:
    """Return the records of the served steps and what was learned."""
    runner = worker.model_runner
    return {
        "log": runner.depth_log,
        "prior": runner.capacity.mirror.prior.tolist(),
        "num_published": runner.capacity.mirror.serial,
        "manager": type(runner.capacity).__name__,
        "speculator": type(runner.speculator).__name__,
        "calibrates": runner.online_sts is not None,
        "num_varlen_graphs": len(runner.cudagraph_manager.varlen_num_tokens()),
    }
