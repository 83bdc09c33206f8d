# SPDX-License-Identifier: Apache-2.0
"""Cost tables: what they accept, what they promise, and their file form."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.helpers.plan_cases import random_costs
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import (
    MIN_VERIFY_MS,
    StepCosts,
    check_sps_points,
)

# Timing says nothing here: machines that run tests are shared.
NO_DEADLINE = settings(deadline=None)
MS = st.floats(0.0, 1e6, allow_subnormal=True)


def make_costs(**changes):
    fields = {
        "draft_ms": {2: [0.0, 1.0, 1.5], 0: [0.0, 0.1, 0.1]},
        "verify_uniform_ms": {0: [1.0, 1.0, 2.0], 2: [1.0, 3.0, 4.0]},
        "verify_varlen_ms": [1.0, 1.0, 2.0, 3.5, 3.5, 4.0, 5.0],
        "overhead_ms": 0.25,
    }
    return StepCosts(**{**fields, **changes})


def between_in_loops(costs, num_reqs, num_tokens):
    """Price one trimmed batch, step by step."""
    table = costs.verify_varlen_ms

    def padded(tokens):
        while tokens + 1 < len(table) and table[tokens + 1] == table[tokens]:
            tokens += 1
        return tokens

    most = min(num_reqs * (costs.depths[-1] + 1), costs.max_num_tokens)
    known = [(padded(num_reqs), table[num_reqs])]
    for depth in costs.depths:
        tokens = num_reqs * (depth + 1)
        if known[0][0] < tokens <= most:
            ms = min(costs.verify_uniform_ms[depth][num_reqs], table[tokens])
            known.append((tokens, max(ms, known[-1][1])))
    at = min(max(padded(num_tokens), known[0][0]), known[-1][0])
    found = known[-1][1]
    for (low, low_ms), (high, high_ms) in itertools.pairwise(known):
        if low <= at <= high:
            found = low_ms + (high_ms - low_ms) * (at - low) / (high - low)
            break
    return min(found, table[num_tokens])


@NO_DEADLINE
@given(st.integers(0, 2**32 - 1))
def test_trimmed_batches_are_priced_between_the_uniform_ones(seed):
    costs = random_costs(np.random.default_rng(seed))
    for num_reqs in range(1, costs.max_num_reqs + 1):
        found = costs.decode_varlen_ms(num_reqs)
        most = min(num_reqs * (costs.depths[-1] + 1), costs.max_num_tokens)
        assert len(found) == most - num_reqs + 1
        expected = [
            between_in_loops(costs, num_reqs, tokens)
            for tokens in range(num_reqs, most + 1)
        ]
        np.testing.assert_allclose(found, np.maximum.accumulate(expected), rtol=1e-12)
        assert (found <= costs.verify_varlen_ms[num_reqs : most + 1]).all()
        assert costs.decode_varlen_ms(num_reqs) is found, "a step allocates nothing"


def test_few_requests_cost_less_than_many_of_as_many_tokens():
    tokens = np.arange(61)
    costs = StepCosts(
        {d: np.zeros(13) for d in (1, 4)},
        # 1 ms a token and 0.5 ms a request, up to 12 requests.
        {d: np.arange(13) * (d + 1 + 0.5) for d in (1, 4)},
        tokens + 0.5 * np.minimum(tokens, 12),
    )
    for num_reqs in (1, 4, 12):
        expected = np.arange(num_reqs, 5 * num_reqs + 1) + 0.5 * num_reqs
        np.testing.assert_allclose(costs.decode_varlen_ms(num_reqs), expected)


def test_a_trimmed_batch_pays_for_the_graph_that_it_is_padded_to():
    # Graphs of 4, 8 and 12 tokens; 1 ms a token.
    sizes = np.array([4] * 5 + [8] * 4 + [12] * 4, dtype=float)
    costs = StepCosts(
        {2: np.zeros(5)}, {2: np.array([4.0, 4.0, 8.0, 12.0, 12.0])}, sizes
    )
    assert costs.decode_varlen_ms(4).tolist() == [4.0] + [8.0] * 4 + [12.0] * 4


def test_curves_of_whole_steps_price_by_tokens_alone():
    costs = make_costs(whole_step=True)
    assert costs.decode_varlen_ms(2).tolist() == costs.verify_varlen_ms[2:7].tolist()
    assert make_costs().decode_varlen_ms(0).tolist() == [1.0]


@NO_DEADLINE
@given(arrays(np.float64, st.integers(1, 40), elements=MS))
def test_tables_become_the_running_maximum(values):
    costs = make_costs(verify_varlen_ms=values)
    expected = np.maximum.accumulate(np.maximum(values, MIN_VERIFY_MS))
    np.testing.assert_array_equal(costs.verify_varlen_ms, expected)


def test_tables_are_copies_that_cannot_be_written():
    source = np.array([1.0, 2.0])
    costs = make_costs(verify_varlen_ms=source)
    source[0] = 9.0
    assert costs.verify_varlen_ms[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        costs.verify_varlen_ms[0] = 9.0
    with pytest.raises(TypeError):
        costs.draft_ms[2] = source


def test_depths_are_ascending_and_bounds_follow_the_tables():
    costs = make_costs()
    assert costs.depths == (0, 2)
    assert (costs.max_num_reqs, costs.max_num_tokens) == (2, 6)


def test_fixed_step_adds_draft_verify_and_overhead():
    assert make_costs().uniform_step_ms(2, 1) == 1.0 + 3.0 + 0.25


def test_context_adds_the_prices_of_target_and_drafter():
    costs = make_costs(
        verify_context_ms={0: [0.0, 0.1, 0.2], 2: [0.0, 0.3, 0.4]},
        draft_context_ms={2: [0.0, 0.01, 0.02]},
    )
    assert costs.context_ms(2, 2, 1, 10.0) == pytest.approx(3.1)
    assert costs.context_ms(0, 2, 2, 10.0) == pytest.approx(2.2)
    # A width without tables is priced as the deepest, a missing table is free.
    assert costs.context_ms(1, 0, 1, 10.0) == pytest.approx(3.0)
    assert costs.uniform_step_ms(2, 1, 10.0) == pytest.approx(4.25 + 3.1)
    with_context = dict(costs.sps_curve(context_tokens=10.0))
    assert with_context[3] == pytest.approx(1000 / 7.35)


def test_fitted_keeps_what_the_engine_needs():
    costs = make_costs(verify_context_ms={2: [0.0, 0.3, 0.4]})
    part = costs.fitted([2], 1, 4)
    assert (part.depths, part.max_num_reqs, part.max_num_tokens) == ((2,), 1, 4)
    assert part.uniform_step_ms(2, 1, 7.0) == costs.uniform_step_ms(2, 1, 7.0)
    np.testing.assert_array_equal(part.verify_varlen_ms, costs.verify_varlen_ms[:5])


@pytest.mark.parametrize(
    ("depths", "num_reqs", "num_tokens", "why"),
    [
        ([1, 2], 1, 1, r"lack draft depths \[1\]"),
        ([2], 3, 1, "end at max_num_seqs 2, below 3"),
        ([2], 1, 7, "end at max_num_batched_tokens 6, below 7"),
    ],
)
def test_tables_that_do_not_cover_an_engine_say_why(depths, num_reqs, num_tokens, why):
    with pytest.raises(ValueError, match=why):
        make_costs().fitted(depths, num_reqs, num_tokens)


def test_sps_curve_is_the_deepest_fixed_path_in_target_tokens():
    expected = ((3, 1000 / 4.25), (6, 1000 / 5.75))
    assert make_costs().sps_curve() == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_ms": {}}, "same depths"),
        ({"draft_ms": {2: [0.0, 1.0, 1.5]}}, "same depths"),
        ({"verify_uniform_ms": {0: [1.0, 1.0, 2.0], 2: [1.0]}}, r"uniform_ms\[2\]"),
        ({"verify_varlen_ms": []}, "verify_varlen_ms has shape"),
        ({"verify_varlen_ms": [1.0, math.nan]}, "verify_varlen_ms must be within"),
        ({"verify_varlen_ms": [1.0, math.inf]}, "verify_varlen_ms must be within"),
        ({"verify_varlen_ms": [1.0, -1.0]}, "verify_varlen_ms must be within"),
        ({"overhead_ms": -1.0}, "dspark_sps_overhead_ms"),
        ({"overhead_ms": math.nan}, "dspark_sps_overhead_ms"),
    ],
)
def test_bad_tables_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        make_costs(**changes)


def assert_equal(left, right):
    assert left.depths == right.depths
    for depth in left.depths:
        np.testing.assert_array_equal(left.draft_ms[depth], right.draft_ms[depth])
        np.testing.assert_array_equal(
            left.verify_uniform_ms[depth], right.verify_uniform_ms[depth]
        )
        for name in ("verify_context_ms", "draft_context_ms"):
            left_table, right_table = getattr(left, name), getattr(right, name)
            np.testing.assert_array_equal(left_table[depth], right_table[depth])
    np.testing.assert_array_equal(left.verify_varlen_ms, right.verify_varlen_ms)
    for name in ("overhead_ms", "whole_step", "num_stalled_samples"):
        assert getattr(left, name) == getattr(right, name)


@NO_DEADLINE
@given(
    arrays(np.float64, 9, elements=MS),
    st.floats(0.0, 1e3),
    st.booleans(),
    st.integers(0, 9),
)
def test_json_round_trip_is_exact(values, overhead_ms, whole_step, num_stalled):
    costs = make_costs(
        draft_ms={0: values[:3], 2: values[3:6]},
        verify_varlen_ms=values,
        verify_context_ms={0: values[2:5]},
        draft_context_ms={2: values[4:7]},
        overhead_ms=overhead_ms,
        whole_step=whole_step,
        num_stalled_samples=num_stalled,
    )
    text = json.dumps({**costs.to_json(), "host": "extra keys are allowed"})
    assert_equal(StepCosts.from_json(json.loads(text)), costs)


def test_a_file_from_before_context_was_priced_is_read():
    written = make_costs().to_json()
    for name in ("verify_context_ms", "draft_context_ms"):
        del written[name]
    costs = StepCosts.from_json(written)
    assert_equal(
        costs,
        dataclasses.replace(make_costs(), verify_context_ms={}, draft_context_ms={}),
    )
    assert costs.context_ms(costs.depths[-1], costs.depths[-1], 1, 1e6) == 0.0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema", "other", "schema, version"),
        ("version", 2, "schema, version"),
        ("draft_ms", None, "damaged"),
        ("draft_ms", {"x": [1.0]}, "is not a draft depth"),
        ("overhead_ms", None, "overhead_ms=None"),
        ("verify_varlen_ms", [], "verify_varlen_ms has shape"),
    ],
)
def test_bad_files_are_refused(key, value, message):
    with pytest.raises(ValueError, match=message):
        StepCosts.from_json({**make_costs().to_json(), key: value})


@pytest.mark.parametrize("data", [None, [], "text"])
def test_what_is_no_object_is_refused(data):
    with pytest.raises(ValueError, match="schema, version"):
        StepCosts.from_json(data)


def test_file_without_a_table_is_refused_by_name():
    data = make_costs().to_json()
    del data["verify_varlen_ms"]
    with pytest.raises(ValueError, match="verify_varlen_ms.*let .auto. measure"):
        StepCosts.from_json(data)


@pytest.mark.parametrize(
    "points",
    [
        [],
        [[6, 200.0, 1.0]],
        [[0, 200.0]],
        [[6.5, 200.0]],
        [[6, 0.0]],
        [[6, -1.0]],
        [[6, math.nan]],
        [[6, math.inf]],
        [[math.nan, 200.0]],
        [[math.inf, 200.0]],
        [[12, 80.0], [6, 200.0]],
        [[6, 200.0], [6, 80.0]],
    ],
)
def test_bad_curve_points_are_refused(points):
    with pytest.raises(ValueError, match="dspark_sps_curve"):
        check_sps_points(points)


def test_curve_points_become_milliseconds():
    assert check_sps_points([[6, 200.0], [12, 80.0]]) == [(6, 5.0), (12, 12.5)]


HUGE = 10**400


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": True}, "schema, version"),
        ({"whole_step": "false"}, "whole_step='false'"),
        ({"whole_step": 1}, "whole_step=1"),
        ({"overhead_ms": "1.5"}, "overhead_ms='1.5'"),
        ({"overhead_ms": True}, "overhead_ms=True"),
        ({"overhead_ms": HUGE}, "overhead_ms"),
        ({"overhead_ms": 1e308}, "overhead_ms"),
        ({"num_stalled_samples": math.inf}, "num_stalled_samples=inf"),
        ({"verify_varlen_ms": ["1", "2"]}, "verify_varlen_ms is not a list of numbers"),
        ({"verify_varlen_ms": [1.0, True]}, "verify_varlen_ms is not a list"),
        ({"verify_varlen_ms": [1.0, HUGE]}, "verify_varlen_ms holds an integer"),
        ({"verify_varlen_ms": [1.0, 1.7e308]}, "verify_varlen_ms must be within"),
        ({"draft_ms": {"0": [0.0] * 3, "02": [0.0] * 3}}, "'02' is not a draft depth"),
        ({"draft_ms": {"": [0.0] * 3}}, "'' is not a draft depth"),
        ({"draft_ms": {"2": None}}, "draft_ms.2. is not a list"),
    ],
)
def test_a_file_is_read_strictly(changes, named):
    written = json.loads(json.dumps(make_costs().to_json()))
    StepCosts.from_json(written)
    with pytest.raises(ValueError, match=named):
        StepCosts.from_json({**written, **changes})
