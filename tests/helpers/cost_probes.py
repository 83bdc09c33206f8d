# SPDX-License-Identifier: Apache-2.0
"""Set-ups and probes for engines whose costs were measured."""

from typing import Any


def act_always(worker: Any) -> None:
    """Let capacity act from one request on, and count what is learned."""
    capacity = worker.model_runner.capacity
    capacity.costs.activation_num_reqs = 1
    correction = capacity.planner.corrector.correction
    worker.observed = []
    original = correction.observe

    def observe(depth: int, num_tokens: int, **kwargs: Any) -> None:
        worker.observed.append([depth, num_tokens, kwargs["measured_ms"]])
        original(depth, num_tokens, **kwargs)

    correction.observe = observe


def costs(worker: Any) -> dict[str, Any]:
    """Return where the costs came from and what steps taught."""
    runner = worker.model_runner
    own, capacity = runner.capacity.costs, runner.capacity
    return {
        "measured": own.measured,
        "profile_s": own.profile_s,
        "depths": list(own.step_costs.depths),
        "draft_ms": own.step_costs.draft_ms[7].tolist(),
        "observed": worker.observed,
        "common_ratio": capacity.planner.corrector.correction.common_ratio,
        "shares": {
            name: share.num_graphs
            for name, share in runner.cudagraph_manager.capture_meter.shares.items()
        },
    }
