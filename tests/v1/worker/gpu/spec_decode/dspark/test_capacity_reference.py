# SPDX-License-Identifier: Apache-2.0
"""The reference is the rule of DESIGN.md, 3.3, and its inputs reach every case."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.worker.gpu.spec_decode.dspark.capacity_reference import (
    CONFIDENCE_FAMILIES,
    assign_capacities_reference,
    make_admission_inputs,
)

families = st.sampled_from(sorted(CONFIDENCE_FAMILIES))


def brute_force(inputs, budget, fill_budget):
    """Sort all slots by (-survival, position, row); shares nothing with the package."""
    probs, slots, scheduled, _ = (t.numpy() for t in vars(inputs).values())
    probs = np.nan_to_num(probs, nan=1.0).clip(0.0, 1.0)[slots]
    survival = np.multiply.accumulate(probs, axis=1, dtype=np.float32)
    rows, steps = np.indices(survival.shape)
    is_slot = (steps < scheduled[:, None]) & (slots[:, None] >= 0)
    if not fill_budget:
        is_slot &= survival > 0
    order = np.lexsort((rows[is_slot], steps[is_slot], -survival[is_slot]))
    winners = rows[is_slot][order][:budget]
    return np.bincount(winners, minlength=len(slots)).tolist()


@settings(deadline=None, max_examples=150)
@given(
    family=families,
    num_reqs=st.integers(1, 40),
    num_steps=st.integers(1, 16),
    budget_share=st.floats(0, 1.2),
    fill_budget=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_reference_is_the_sort_by_survival_position_row(
    family, num_reqs, num_steps, budget_share, fill_budget, seed
):
    inputs = make_admission_inputs(num_reqs, num_steps, family=family, seed=seed)
    budget = int(budget_share * inputs.num_drafts)
    found = assign_capacities_reference(
        *list(vars(inputs).values())[:3], budget, fill_budget=fill_budget
    )
    assert found.tolist() == brute_force(inputs, budget, fill_budget)


def test_ragged_inputs_have_padded_rows_and_all_counts():
    inputs = make_admission_inputs(256, 7, seed=0)
    assert (inputs.idx_mapping == -1).any()
    assert set(inputs.scheduled_drafts.tolist()) == set(range(8))
