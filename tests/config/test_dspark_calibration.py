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
BENDS = st.lists(st.floats(-0.9, 0.9), min_size=K, max_size=K)


@given(
    temperatures=st.tuples(TEMPERATURES, TEMPERATURES),
    biases=st.tuples(BIASES, BIASES),
    bends=st.tuples(BENDS, BENDS),
)
def test_what_was_saved_comes_back(temperatures, biases, bends):
    saved = ConfidenceCalibration(
        tuple(tuple(1 / t for t in row) for row in temperatures),
        tuple(map(tuple, biases)),
        tuple(map(tuple, bends)),
        (5, 70),
    )
    read = ConfidenceCalibration.from_json(json.loads(json.dumps(saved.to_json())))
    assert (read.biases, read.bends) == (saved.biases, saved.bends)
    assert read.num_rows == saved.num_rows
    for found, scales in zip(read.scales, saved.scales, strict=True):
        assert found == pytest.approx(scales, rel=1e-12)


def test_fewer_positions_take_the_first_ones_and_more_are_refused():
    saved = ConfidenceCalibration(
        ((1.0, 2.0, 3.0),) * 2, ((0.1, 0.2, 0.3),) * 2, ((0.4, 0.5, 0.6),) * 2
    )
    assert saved.first(2).scales == ((1.0, 2.0),) * 2
    assert saved.first(2).biases == ((0.1, 0.2),) * 2
    assert saved.first(2).bends == ((0.4, 0.5),) * 2
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
    broken(lambda v: v.update(version=3)),
    broken(lambda v: v.update(version=[2])),
    broken(lambda v: v.update(version=True)),
    broken(lambda v: v.pop("version")),
    broken(lambda v: v.pop("classes")),
    broken(lambda v: v["classes"].pop("greedy")),
    broken(lambda v: v["classes"].update(more=v["classes"]["greedy"])),
    broken(lambda v: v["classes"].update(greedy=[1.0])),
    broken(lambda v: v["classes"]["greedy"].update(temperature=[1.0, 1.0])),
    broken(lambda v: v["classes"]["greedy"].update(temperature=[], bias=[], bend=[])),
    broken(lambda v: v["classes"]["greedy"].pop("bend")),
    broken(lambda v: v["classes"]["greedy"].update(bend=[0.0])),
    broken(lambda v: v["classes"]["sampled"].update(bend=[0.0, 1.0, 0.0])),
    broken(lambda v: v["classes"]["sampled"].update(bend=[0.0, math.nan, 0.0])),
    broken(lambda v: v["classes"]["sampled"].update(bias=[0.0, 0.0, math.nan])),
    broken(lambda v: v["classes"]["sampled"].update(bias=[0.0, 0.0, "0"])),
    broken(lambda v: v["classes"]["sampled"].update(temperature=[1.0, 0.0, 1.0])),
    broken(lambda v: v["classes"]["sampled"].update(temperature=[1.0, -1.0, 1.0])),
    broken(lambda v: v["classes"]["sampled"].update(num_rows=-1)),
    broken(lambda v: v["classes"]["sampled"].update(num_rows=True)),
    broken(
        lambda v: v["classes"].update(
            greedy={"temperature": [1.0] * 4, "bias": [0.0] * 4, "bend": [0.0] * 4}
        )
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


def version_1():
    """Return a section as it was saved before there were bends."""
    one = {"temperature": [0.5, 1.0, 2.0], "bias": [0.1, 0.2, 0.3], "num_rows": 9}
    value = ConfidenceCalibration.uniform(K).to_json()
    return value | {"version": 1, "classes": dict.fromkeys(CLASSES, one)}


def test_a_section_of_version_1_has_no_bends():
    read = ConfidenceCalibration.from_json(version_1())
    assert read.scales == ((2.0, 1.0, 0.5),) * 2
    assert read.biases == ((0.1, 0.2, 0.3),) * 2
    assert read.bends == ((0.0, 0.0, 0.0),) * 2
    assert read.num_rows == (9, 9)
    assert read.to_json()["version"] == 2


def test_a_version_1_with_bends_is_refused():
    value = version_1()
    value["classes"]["greedy"] = value["classes"]["greedy"] | {"bend": [0.0] * K}
    with pytest.raises(DSparkCapacityConfigError, match="greedy 'bend'"):
        ConfidenceCalibration.from_json(value)


def test_an_unknown_version_is_named_with_those_that_are_read():
    value = broken(lambda v: v.update(version=3))
    with pytest.raises(DSparkCapacityConfigError, match=r"'version': 3.*\[1, 2\]"):
        ConfidenceCalibration.from_json(value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda v: v.update(clases={}),
            f"key of {CALIBRATION_KEY} 'clases'. Did you mean 'classes'?",
        ),
        (
            lambda v: v["classes"]["sampled"].update(num_row=5),
            f"key of {CALIBRATION_KEY}.sampled 'num_row'. Did you mean 'num_rows'?",
        ),
        (
            lambda v: v["classes"]["greedy"].update(tempreature=[2.0] * K),
            f"key of {CALIBRATION_KEY}.greedy 'tempreature'. "
            "Did you mean 'temperature'?",
        ),
    ],
)
def test_a_key_that_nothing_reads_is_named(change, named):
    with pytest.raises(DSparkCapacityConfigError) as caught:
        ConfidenceCalibration.from_json(broken(change))
    assert f"Unknown {named}" in str(caught.value)
