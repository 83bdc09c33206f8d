# SPDX-License-Identifier: Apache-2.0
"""The saved calibration: what comes back, and what is refused."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.config.dspark_calibration import (
    CALIBRATION_KEY,
    CLASSES,
    ConfidenceCalibration,
)
from vllm.config.dspark_values import DSparkCapacityConfigError

K = 3
TEMPERATURES = st.lists(st.floats(0.125, 8.0), min_size=K, max_size=K)
BIASES = st.lists(st.floats(-8.0, 8.0), min_size=K, max_size=K)


@given(
    temperatures=st.tuples(TEMPERATURES, TEMPERATURES), biases=st.tuples(BIASES, BIASES)
)
def test_what_was_saved_comes_back(temperatures, biases):
    saved = ConfidenceCalibration(
        tuple(tuple(1 / t for t in row) for row in temperatures),
        tuple(map(tuple, biases)),
        (5, 70),
    )
    read = ConfidenceCalibration.from_json(json.loads(json.dumps(saved.to_json())))
    assert (read.biases, read.num_rows) == (saved.biases, saved.num_rows)
    for found, scales in zip(read.scales, saved.scales, strict=True):
        assert found == pytest.approx(scales, rel=1e-12)


def test_fewer_positions_take_the_first_ones_and_more_are_refused():
    saved = ConfidenceCalibration(((1.0, 2.0, 3.0),) * 2, ((0.1, 0.2, 0.3),) * 2)
    assert saved.first(2).scales == ((1.0, 2.0),) * 2
    assert saved.first(2).biases == ((0.1, 0.2),) * 2
    with pytest.raises(DSparkCapacityConfigError, match=f"{CALIBRATION_KEY}='3 pos"):
        saved.first(4)


def broken(change):
    value = ConfidenceCalibration.uniform(K).to_json()
    change(value)
    return value


BROKEN = [
    None,
    [],
    {},
    broken(lambda v: v.update(schema="other")),
    broken(lambda v: v.update(version=2)),
    broken(lambda v: v.pop("classes")),
    broken(lambda v: v["classes"].pop("greedy")),
    broken(lambda v: v["classes"].update(more=v["classes"]["greedy"])),
    broken(lambda v: v["classes"].update(greedy=[1.0])),
    broken(lambda v: v["classes"]["greedy"].update(temperature=[1.0, 1.0])),
    broken(lambda v: v["classes"]["greedy"].update(temperature=[], bias=[])),
    broken(lambda v: v["classes"]["sampled"].update(bias=[0.0, 0.0, math.nan])),
    broken(lambda v: v["classes"]["sampled"].update(bias=[0.0, 0.0, "0"])),
    broken(lambda v: v["classes"]["sampled"].update(temperature=[1.0, 0.0, 1.0])),
    broken(lambda v: v["classes"]["sampled"].update(temperature=[1.0, -1.0, 1.0])),
    broken(lambda v: v["classes"]["sampled"].update(num_rows=-1)),
    broken(lambda v: v["classes"]["sampled"].update(num_rows=True)),
    broken(
        lambda v: v["classes"]["greedy"].update(temperature=[1.0] * 4, bias=[0.0] * 4)
    ),
]


@pytest.mark.parametrize("value", BROKEN)
def test_a_broken_section_is_refused_by_name(value):
    with pytest.raises(DSparkCapacityConfigError) as caught:
        ConfidenceCalibration.from_json(value)
    assert str(caught.value).startswith(CALIBRATION_KEY)


def test_premise_the_unbroken_section_is_accepted():
    value = broken(lambda v: None)
    assert ConfidenceCalibration.from_json(value) == ConfidenceCalibration.uniform(K)
    assert tuple(value["classes"]) == CLASSES
