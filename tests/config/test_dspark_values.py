# SPDX-License-Identifier: Apache-2.0
"""Rules of a steps-per-second curve, inline and in a file."""

import json
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.config import dspark_values as values
from vllm.config.dspark_capacity import (
    DSparkCapacityConfig,
    DSparkCapacityConfigError,
    load_sps_curve,
)
from vllm.config.dspark_values import MAX_CURVE_FILE_BYTES

CURVE = [[6, 200], [12, 80.5]]


def refusal(curve) -> str:
    with pytest.raises(DSparkCapacityConfigError) as caught:
        DSparkCapacityConfig.from_keys({"dspark_sps_curve": curve})
    return str(caught.value)


RATES = st.floats(min_value=1e-3, max_value=1e6, allow_nan=False)
CURVES = st.lists(
    st.tuples(st.integers(1, 10**6), RATES),
    min_size=2,
    max_size=20,
    unique_by=lambda point: point[0],
).map(lambda points: [list(p) for p in sorted(points)])


@settings(deadline=None)
@given(CURVES)
def test_valid_curve_survives_keys_and_pickle(curve):
    config = DSparkCapacityConfig.from_keys({"dspark_sps_curve": curve})
    assert [list(p) for p in config.dspark_sps_curve.points] == curve
    again = DSparkCapacityConfig.from_keys(
        json.loads(json.dumps(pickle.loads(pickle.dumps(config)).to_keys()))
    )
    assert again == config


BAD_CURVES = {
    "empty": [],
    "one point": [[6, 200]],
    "equal tokens": [[6, 200], [6, 100]],
    "falling tokens": [[12, 100], [6, 200]],
    "zero rate": [[6, 200], [12, 0]],
    "negative rate": [[6, 200], [12, -1]],
    "nan rate": [[6, math.nan], [12, 80]],
    "infinite rate": [[6, 200], [12, math.inf]],
    "rate too small to add": [[6, 200], [12, 1e-305]],
    "absurd token count": [[6, 200], [10**400, 30]],
    "rate beyond a double": [[6, 200], [12, 10**400]],
    "rate whose step time overflows": [[6, 200], [12, 1e-320]],
    "bool rate": [[6, 200], [12, True]],
    "string rate": [[6, 200], [12, "80"]],
    "bool tokens": [[True, 200], [12, 80]],
    "fractional tokens": [[6.5, 200], [12, 80]],
    "zero tokens": [[0, 200], [12, 80]],
    "triple": [[6, 200, 1], [12, 80, 1]],
    "flat list": [6, 200],
    "object without schema": {"sps_curve": CURVE},
    "other schema": {"schema": "x", "version": 1, "sps_curve": CURVE},
    "newer version": {
        "schema": "vllm-dspark-sps-curve",
        "version": 2,
        "sps_curve": CURVE,
    },
    "bool version": {
        "schema": "vllm-dspark-sps-curve",
        "version": True,
        "sps_curve": CURVE,
    },
    "no curve": {"schema": "vllm-dspark-sps-curve", "version": 1},
    "number": 3,
    "string": "auto",
}


@pytest.mark.parametrize("case", BAD_CURVES)
def test_bad_curve_is_refused_from_a_file(tmp_path, case):
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(BAD_CURVES[case]))
    text = refusal(str(path))
    assert "dspark_sps_curve" in text and str(path) in text
    assert "steps_per_s" in text and 'use "auto"' in text


@pytest.mark.parametrize("case", [c for c in BAD_CURVES if c != "string"])
def test_bad_curve_is_refused_inline(case):
    assert "steps_per_s" in refusal(BAD_CURVES[case])


def test_curve_file_holds_a_list_or_a_versioned_object_with_extras(tmp_path):
    document = {
        "schema": "vllm-dspark-sps-curve",
        "version": 1,
        "sps_curve": CURVE,
        "draft_ms": {"7": [1.0, 2.0]},
    }
    bare, versioned = tmp_path / "a.json", tmp_path / "b.json"
    bare.write_text(json.dumps(CURVE))
    versioned.write_text(json.dumps(document))
    assert load_sps_curve(bare).points == ((6, 200.0), (12, 80.5))
    assert load_sps_curve(bare).document is None
    loaded = load_sps_curve(str(versioned))
    assert loaded.points == load_sps_curve(bare).points
    assert loaded.document["draft_ms"] == {"7": [1.0, 2.0]}
    assert loaded.to_json_value() == document


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[" + b" " * MAX_CURVE_FILE_BYTES + b"]", "larger than"),
        (b"[" * 100_000, "not JSON"),
        (b"tokens,rate\n6,200\n", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"", "not JSON"),
    ],
)
def test_unusable_file_is_refused(tmp_path, content, problem):
    path = tmp_path / "curve.json"
    path.write_bytes(content)
    assert problem in refusal(str(path))


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (
            '{"sps_curve": [[1, 9], [2, 8]], %s, "sps_curve": [[1, 1]]}',
            "sps_curve",
        ),
        ('{"sps_curve": [[1, 9], [2, 8]], %s, "draft_ms": {"7": [1], "7": [2]}}', "7"),
    ],
)
def test_a_key_that_stands_twice_in_a_file_is_named(tmp_path, content, key):
    path = tmp_path / "curve.json"
    path.write_text(content % '"schema": "vllm-dspark-sps-curve", "version": 1')
    text = refusal(str(path))
    assert f"the file has the key '{key}' more than once" in text
    assert "curve.json" in text


def test_equal_keys_of_different_objects_are_no_duplicates(tmp_path):
    path = tmp_path / "curve.json"
    document = {"schema": "vllm-dspark-sps-curve", "version": 1, "sps_curve": CURVE}
    extra = {"env": {"version": 1}, "measured": [{"a": 1}, {"a": 2}]}
    path.write_text(json.dumps(document | extra))
    assert load_sps_curve(path).document == document | extra


@pytest.mark.parametrize(
    ("key", "near"),
    [("confidence_calibratoin", "confidence_calibration"), ("drfat_ms", "draft_ms")],
)
@pytest.mark.parametrize("as_file", [False, True])
def test_a_key_that_nothing_reads_is_named_with_the_nearest(
    tmp_path, key, near, as_file
):
    """Served without it, the curve would be another than the user wrote."""
    document = {"schema": "vllm-dspark-sps-curve", "version": 1, "sps_curve": CURVE}
    given_curve = document | {key: {}}
    if as_file:
        path = tmp_path / "curve.json"
        path.write_text(json.dumps(given_curve))
        given_curve = str(path)
    text = refusal(given_curve)
    assert "Unknown key of dspark_sps_curve" in text and f"{key!r}" in text
    assert f"Did you mean {near!r}?" in text
    assert not as_file or str(path) in text


@pytest.mark.parametrize("name", ["/dev/zero", ""])
def test_what_is_no_regular_file_is_called_so(tmp_path, name):
    given_curve = name or str(tmp_path)
    assert f"{given_curve!r} is no regular file" in refusal(given_curve)


def test_a_path_object_names_a_file_as_its_text_does(tmp_path):
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(CURVE))
    for given_path in (path, str(path)):
        config = DSparkCapacityConfig.from_keys({"dspark_sps_curve": given_path})
        assert [list(p) for p in config.dspark_sps_curve.points] == CURVE
    assert "there is no file" in refusal(tmp_path / "none.json")


def test_largest_allowed_file_is_read(tmp_path):
    text = json.dumps(CURVE)
    path = tmp_path / "curve.json"
    path.write_text(text + " " * (MAX_CURVE_FILE_BYTES - len(text)))
    assert path.stat().st_size == MAX_CURVE_FILE_BYTES
    assert len(load_sps_curve(path).points) == 2


def test_long_values_are_shortened_in_the_message():
    text = refusal([[1, 1.0]] * 10_000)
    assert len(text) < 1000


def test_directory_may_exist_or_be_made_and_is_not_made_here(tmp_path):
    new = tmp_path / "a" / "b"
    for path in (tmp_path, new):
        assert values.read_directory("key", str(path), off="off") == str(path)
    assert not new.exists()
    assert values.read_directory("key", "off", off="off") == "off"


@pytest.mark.parametrize("under", ["", "/x", "/x/y"])
def test_file_in_the_way_of_a_directory_is_named(tmp_path, under):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(values.DSparkCapacityConfigError) as error:
        values.read_directory("key", f"{file}{under}", off="off")
    assert f"{file} is not a directory" in str(error.value)


def test_directory_without_permission_is_refused(tmp_path, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(values.tempfile, "TemporaryFile", refuse)
    with pytest.raises(
        values.DSparkCapacityConfigError,
        match=r"cannot be written to \(Permission denied\)",
    ):
        values.read_directory("key", str(tmp_path / "new"), off="off")


def test_file_system_that_takes_no_files_is_refused_to_root_too():
    with pytest.raises(values.DSparkCapacityConfigError, match="/proc cannot be wr"):
        values.read_directory("key", "/proc/costs", off="off")


def test_a_directory_is_tried_and_nothing_is_left_in_it(tmp_path):
    assert values.read_directory("key", str(tmp_path / "new"), off="off")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("~nosuchuser/x", "no user 'nosuchuser'"),
        ("/tmp/" + 300 * "x", "longer than 255 bytes"),
        ("/tmp/\udfff\ud800", "no file system"),
    ],
)
def test_directory_that_could_not_be_made_is_refused(value, problem):
    with pytest.raises(DSparkCapacityConfigError, match=problem):
        values.read_directory("dspark_sps_cache", value, off="off")


@pytest.mark.parametrize("value", [10**5000, [10**5000]], ids=["bare", "listed"])
def test_number_that_python_does_not_show_is_refused_by_name(value):
    with pytest.raises(DSparkCapacityConfigError, match="key=<(int|list) too long"):
        values.read_number("key", value, low=0)
    with pytest.raises(DSparkCapacityConfigError, match="dspark_sps_curve"):
        values.read_sps_curve([[1, 2.0], [10**5000, 1.0]])


def test_misspelt_auto_is_recognised():
    with pytest.raises(DSparkCapacityConfigError, match='did you mean "auto"'):
        load_sps_curve(" AUTO")
