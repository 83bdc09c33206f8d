# SPDX-License-Identifier: Apache-2.0
"""Seeded inputs and cost tables for the planner's tests."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from vllm.v1.worker.gpu.spec_decode.dspark.planner import PlanInputs
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts

K = 4
DEPTHS = (0, 1, 2, K)
MAX_NUM_REQS = 8
NO_CAP = 10**6
# Oracle and planner add the same float64 terms in another order.
RATE_TOLERANCE = 1e-12
# Timing says nothing here: machines that run tests are shared.
NO_DEADLINE = settings(deadline=None)
SEEDS = st.integers(0, 2**32 - 1)


def random_costs(rng):
    """Rising tables with plateaus and jumps, unlike each other."""

    def rising(size, scale):
        steps = rng.random(size) * rng.integers(0, 2, size) * scale
        return 1.0 + np.cumsum(steps)

    size = MAX_NUM_REQS + 1
    return StepCosts(
        {d: (rising(size, 0.05 * d) - 1.0) for d in DEPTHS},
        {d: rising(size, 0.1 * (d + 1)) for d in DEPTHS},
        rising(MAX_NUM_REQS * (K + 1) + 21, 0.1),
        overhead_ms=float(rng.random()),
        verify_context_ms={d: rising(size, 1e-4) - 1.0 for d in DEPTHS},
        draft_context_ms={d: rising(size, 1e-5) - 1.0 for d in DEPTHS},
    )


def linear_costs(per_token_ms, *, base_ms=5.0, draft_ms=0.0, whole_step=False):
    reqs = np.arange(MAX_NUM_REQS + 1)
    return StepCosts(
        {d: draft_ms * d * reqs for d in DEPTHS},
        {d: base_ms + per_token_ms * reqs * (d + 1) for d in DEPTHS},
        base_ms + per_token_ms * np.arange(MAX_NUM_REQS * (K + 1) + 21),
        whole_step=whole_step,
    )


def make_inputs(survival, scheduled=None, **changes):
    survival = np.asarray(survival)
    num_reqs = len(survival)
    if scheduled is None:
        scheduled = np.full(num_reqs, survival.shape[1])
    inputs = PlanInputs(
        survival_probs=survival,
        scheduled_drafts=np.asarray(scheduled, dtype=np.int32),
        num_non_draft_tokens=num_reqs,
        num_sampling_reqs=num_reqs,
        max_draft_budget=NO_CAP,
        current_depth=K,
        next_survival=np.array([0.8, 0.6, 0.4, 0.2]),
        depths=DEPTHS,
    )
    return inputs._replace(**changes)


def random_inputs(rng, *, quantised=False, dtype=np.float64):
    num_reqs = int(rng.integers(1, MAX_NUM_REQS + 1))
    confidence = rng.random((num_reqs, K))
    if quantised:
        confidence = np.round(confidence * 2) / 2
    uniform = rng.random() < 0.5
    scheduled = (
        np.full(num_reqs, rng.choice([0, 1, 2, 3, K]))
        if uniform
        else rng.integers(0, K + 1, num_reqs)
    )
    prefill = int(rng.choice([0, 0, 20]))
    return make_inputs(
        np.cumprod(confidence, axis=1).astype(dtype),
        scheduled,
        num_non_draft_tokens=num_reqs + prefill,
        max_draft_budget=int(rng.choice([0, 3, 9, NO_CAP])),
        current_depth=int(rng.choice(DEPTHS)),
        next_survival=np.sort(rng.random(K))[::-1],
        context_tokens=float(rng.choice([0, 128, 9000])),
    )
