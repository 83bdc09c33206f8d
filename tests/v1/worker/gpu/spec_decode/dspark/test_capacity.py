# SPDX-License-Identifier: Apache-2.0
"""Every implementation against the reference, and each rule by example.

``admit_drafts`` and what is made of it are fixtures: see conftest.py.
"""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.helpers.admission import DEVICE, GARBAGE, inputs_of, run
from vllm.v1.worker.gpu.spec_decode.dspark import capacity
from vllm.v1.worker.gpu.spec_decode.dspark.capacity import (
    MAX_ADMISSION_REQS,
    admit_drafts_reference,
    assign_capacities_reference,
)
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_reference import (
    CONFIDENCE_FAMILIES,
    AdmissionInputs,
    make_admission_inputs,
)

families = st.sampled_from(sorted(CONFIDENCE_FAMILIES))


def assert_equals_reference(admit_drafts, inputs, budget, **options):
    ours = run(admit_drafts, inputs, budget, **options)
    assert ours == run(admit_drafts_reference, inputs, budget, **options)


# ---- The kernel is the reference -----------------------------------------------


@settings(deadline=None, max_examples=80)
@given(
    family=families,
    num_reqs=st.one_of(st.integers(1, 70), st.sampled_from([128, 255, 256, 257])),
    num_steps=st.integers(1, 16),
    budget_share=st.floats(0, 1.2),
    fill_budget=st.booleans(),
    min_survival=st.sampled_from([0.0, 0.0, 1e-45, 0.25, 0.3, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_kernel_equals_reference(
    admit_drafts,
    family,
    num_reqs,
    num_steps,
    budget_share,
    fill_budget,
    min_survival,
    seed,
):
    inputs = make_admission_inputs(num_reqs, num_steps, family=family, seed=seed)
    assert_equals_reference(
        admit_drafts,
        inputs,
        int(budget_share * inputs.num_drafts),
        fill_budget=fill_budget,
        min_survival=min_survival,
    )


@pytest.mark.parametrize("family", sorted(CONFIDENCE_FAMILIES))
@pytest.mark.parametrize(
    ("num_reqs", "num_steps"),
    [(1, 1), (1, 7), (2, 5), (7, 16), (64, 7), (257, 5), (1024, 16)],
)
def test_kernel_equals_reference_at_edge_budgets(
    admit_drafts, num_reqs, num_steps, family
):
    inputs = make_admission_inputs(num_reqs, num_steps, family=family, is_ragged=False)
    total = inputs.num_drafts
    for budget in {-1, 0, 1, total // 2, total - 1, total, total + 9}:
        assert_equals_reference(
            admit_drafts, inputs, budget, fill_budget=budget % 2 == 0
        )


def test_cpu_without_the_interpreter_uses_the_reference(monkeypatch):
    monkeypatch.setattr(capacity, "runs_admission_kernel", lambda device: False)
    monkeypatch.setattr(capacity, "_admit_drafts_kernel", None)
    inputs = make_admission_inputs(9, 7, family="tied")
    for fill_budget in (False, True):
        ours = run(capacity.admit_drafts, inputs, 20, fill_budget=fill_budget)
        expected = run(admit_drafts_reference, inputs, 20, fill_budget=fill_budget)
        assert ours == expected


@pytest.mark.parametrize("fill_budget", [False, True])
def test_kernel_equals_reference_at_the_largest_sizes(admit_drafts, fill_budget):
    inputs = make_admission_inputs(MAX_ADMISSION_REQS, 16, family="tied", seed=3)
    budget = inputs.num_drafts * 3 // 4
    assert_equals_reference(admit_drafts, inputs, budget, fill_budget=fill_budget)


def test_no_rows_write_only_the_leading_zeros_and_padding(admit_drafts):
    capacities, cu_num_logits, query_start_loc = run(
        admit_drafts, make_admission_inputs(0, 7), 0
    )
    assert set(capacities) == {GARBAGE}
    assert cu_num_logits == [0] + [GARBAGE] * 3
    assert query_start_loc == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_strided_confidences_and_both_index_types(assign_capacities, dtype):
    """A depth-limited view of the engine's wide buffer is read in place."""
    wide = torch.rand(20, 9, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    view = wide[:, :5]
    assert not view.is_contiguous()
    slots = torch.arange(19, -1, -1, dtype=dtype, device=DEVICE)
    scheduled = torch.full((20,), 5, dtype=torch.int32, device=DEVICE)
    expected = assign_capacities_reference(view.contiguous(), slots, scheduled, 40)
    assert torch.equal(assign_capacities(view, slots, scheduled, 40), expected)
    assert int(expected.sum()) == 40


# ---- The rules, one by one -----------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    family=families,
    num_reqs=st.integers(1, 64),
    num_steps=st.integers(1, 8),
    budget=st.integers(0, 600),
    fill_budget=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_budget_is_a_hard_cap_and_fill_spends_it_exactly(
    admitted, family, num_reqs, num_steps, budget, fill_budget, seed
):
    inputs = make_admission_inputs(num_reqs, num_steps, family=family, seed=seed)
    capacities = admitted(inputs, budget, fill_budget=fill_budget)
    limits = torch.where(inputs.idx_mapping >= 0, inputs.scheduled_drafts, 0)
    assert all(
        0 <= got <= most for got, most in zip(capacities, limits.tolist(), strict=True)
    )
    spendable = min(budget, inputs.num_drafts)
    if fill_budget:
        assert sum(capacities) == spendable
    else:
        assert sum(capacities) <= spendable


@settings(deadline=None, max_examples=25)
@given(family=families, seed=st.integers(0, 2**32 - 1), num_reqs=st.integers(1, 32))
def test_a_larger_budget_never_takes_a_draft_away(admitted, family, seed, num_reqs):
    """With a total order, budgets nest; this also gives the prefix property."""
    inputs = make_admission_inputs(num_reqs, 7, family=family, seed=seed)
    budgets = sorted({0, 1, 2, inputs.num_drafts // 2, inputs.num_drafts})
    runs = [admitted(inputs, b, fill_budget=True) for b in budgets]
    for small, large in zip(runs, runs[1:], strict=False):
        assert all(a <= b for a, b in zip(small, large, strict=True))


def test_ties_go_to_the_earlier_position_then_the_lower_row(admitted):
    inputs = inputs_of([[1.0, 1.0, 1.0]] * 4)
    assert admitted(inputs, 3) == [1, 1, 1, 0]  # lower rows of position 0
    assert admitted(inputs, 6) == [2, 2, 1, 1]  # position 0 of all before position 1
    assert admitted(inputs, 9) == [3, 2, 2, 2]


def test_a_tie_is_broken_by_position_even_against_a_lower_row(admitted):
    # Row 0 reaches 0.5 at position 1, row 1 at position 0.
    inputs = inputs_of([[1.0, 0.5], [0.5, 0.1]])
    assert admitted(inputs, 2) == [1, 1]


def test_higher_survival_beats_position_and_row(admitted):
    inputs = inputs_of([[0.4, 0.9], [0.9, 0.9]])
    assert admitted(inputs, 2) == [0, 2]


def test_zero_survival_is_never_admitted_without_fill(admitted):
    inputs = inputs_of([[0.0, 1.0, 1.0], [0.5, 0.0, 1.0], [0.0, 0.0, 0.0]])
    assert admitted(inputs, 9) == [0, 1, 0]


def test_fill_takes_zeros_by_position_then_row_and_only_after_the_rest(admitted):
    inputs = inputs_of([[0.0, 1.0], [0.5, 0.0], [0.0, 0.0]])
    assert [admitted(inputs, b, fill_budget=True) for b in range(8)] == [
        [0, 0, 0],
        [0, 1, 0],  # the one positive slot
        [1, 1, 0],  # position 0, row 0
        [1, 1, 1],  # position 0, row 2
        [2, 1, 1],  # position 1, row 0
        [2, 2, 1],
        [2, 2, 2],
        [2, 2, 2],  # nothing is left
    ]


def test_a_row_without_a_slot_has_no_drafts_and_reads_nothing(admitted):
    inputs = inputs_of([[0.9, 0.9]], slots=[-1, 0, 1, 2**31 - 1])
    assert admitted(inputs, 8, fill_budget=True) == [0, 2, 0, 0]


def test_scheduled_drafts_bound_the_row_and_are_clamped_to_the_columns(admitted):
    inputs = inputs_of([[1.0] * 3] * 4, scheduled=[0, 2, 9, -1])
    assert admitted(inputs, 99, fill_budget=True) == [0, 2, 3, 0]


def test_nan_counts_as_certain_and_other_values_are_clamped(admitted):
    nan, inf = float("nan"), float("inf")
    inputs = inputs_of([[nan, nan], [7.0, inf], [-1.0, 1.0], [-0.0, 1.0], [-inf, 1.0]])
    assert admitted(inputs, 10) == [2, 2, 0, 0, 0]
    assert admitted(inputs, 2) == [1, 1, 0, 0, 0]  # equal to 1.0: a tie


def test_negative_zero_ranks_as_zero(admitted):
    """Its bits are the least int32: unsanitised it would rank as "no slot"."""
    inputs = inputs_of([[-0.0, 1.0], [0.0, 1.0]])
    assert admitted(inputs, 3, fill_budget=True) == [2, 1]
    assert admitted(inputs, 3) == [0, 0]


def test_subnormal_survival_is_kept_and_ranked(admitted):
    tiny = float(np.finfo(np.float32).smallest_subnormal)
    normal = float(np.finfo(np.float32).tiny)
    inputs = inputs_of([[2 * tiny], [3 * tiny], [normal * 0.5], [tiny]])
    assert admitted(inputs, 3) == [1, 1, 1, 0]
    assert admitted(inputs, 2) == [0, 1, 1, 0]
    # A product that leaves the normal range must not be flushed either.
    product = inputs_of([[normal, 0.25], [normal, 0.5]])
    assert admitted(product, 3) == [1, 2]


def test_survival_is_the_product_in_position_order(admitted):
    """The two rows tie only if the product is not reassociated."""
    rng = np.random.default_rng(0)
    for _ in range(10_000):
        a, b, c, d = rng.random(4, dtype=np.float32)
        in_order, in_pairs = ((a * b) * c) * d, (a * b) * (c * d)
        if in_order != in_pairs:
            break
    assert in_order != in_pairs
    # Row 1 holds the in-order product as one value, at position 3 as well.
    rows = [[a, b, c, d], [1.0, 1.0, 1.0, in_order]]
    assert admitted(inputs_of(rows), 7) == [4, 3]  # a tie: the lower row wins
    above = np.nextafter(in_order, np.float32(1))
    assert admitted(inputs_of([rows[0], [1.0, 1.0, 1.0, above]]), 7) == [3, 4]


def test_min_survival_is_a_floor_that_includes_its_own_value(admitted):
    inputs = inputs_of([[0.5, 0.5, 1.0], [0.4, 1.0, 1.0], [0.3, 0.9, 0.9]])
    assert admitted(inputs, 9, min_survival=0.4) == [1, 3, 0]
    assert admitted(inputs, 2, min_survival=0.4) == [1, 1, 0]
    assert admitted(inputs, 9, min_survival=0.5) == [1, 0, 0]
    # Filling goes on below the floor in rank order.
    assert admitted(inputs, 5, min_survival=0.5, fill_budget=True) == [1, 3, 1]


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), num_reqs=st.integers(2, 40))
def test_result_follows_the_request_not_its_slot_or_row(admitted, seed, num_reqs):
    inputs = make_admission_inputs(num_reqs, 5, family="random", seed=seed)
    budget = inputs.num_drafts // 2
    before = admitted(inputs, budget)
    rng = np.random.default_rng(seed)
    order = torch.from_numpy(rng.permutation(num_reqs))
    moved = torch.from_numpy(rng.permutation(num_reqs + 2))
    slots = inputs.idx_mapping[order].long()
    new_probs = torch.empty_like(inputs.confidence_probs)
    new_probs[moved] = inputs.confidence_probs
    permuted = AdmissionInputs(
        new_probs,
        torch.where(slots >= 0, moved[slots.clamp(min=0)], -1).int(),
        inputs.scheduled_drafts[order],
        inputs.num_non_draft_tokens[order],
    )
    survivals = inputs.confidence_probs.cumprod(dim=1).flatten()
    assume(len(survivals.unique()) == len(survivals))  # Ties go by row.
    assert admitted(permuted, budget) == [before[i] for i in order.tolist()]


def test_offsets_are_the_prefix_sums_and_padding_is_the_planned_total(admit_drafts):
    inputs = inputs_of(
        [[1.0, 1.0], [0.5, 0.0], [0.0, 1.0]], slots=[2, 1, 0], non_draft=[1, 4, 2]
    )
    capacities, cu_num_logits, query_start_loc = run(
        admit_drafts, inputs, 4, max_reqs=6, num_bonus_tokens=2
    )
    assert capacities == [0, 1, 2] + [GARBAGE] * 3
    assert cu_num_logits == [0, 2, 5, 9] + [GARBAGE] * 3
    # 7 other tokens + budget 4: what the host shaped, though only 3 are admitted.
    assert query_start_loc == [0, 1, 6, 10] + [11] * 3


def test_padding_reaches_the_end_of_a_long_buffer(admit_drafts):
    inputs = inputs_of([[1.0] * 7])
    query_start_loc = run(admit_drafts, inputs, 3, max_reqs=700)[2]
    assert query_start_loc[1:] == [4] * 700


def test_with_fill_padded_rows_are_empty(admit_drafts):
    inputs = make_admission_inputs(37, 7, family="zeros")
    budget = inputs.num_drafts // 2
    query_start_loc = run(admit_drafts, inputs, budget, fill_budget=True)[2]
    assert set(query_start_loc[37:]) == {query_start_loc[37]}
