# SPDX-License-Identifier: Apache-2.0
"""Rules of the dspark_* keys and the VLLM_DSPARK_* variables."""

import ast
import math
import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.config import dspark_capacity, dspark_environ, dspark_values
from vllm.config.dspark_calibration import CALIBRATION_KEY, ConfidenceCalibration
from vllm.config.dspark_capacity import (
    DSPARK_KEYS,
    DSparkCapacityConfig,
    DSparkCapacityConfigError,
    DSparkCapacityEnv,
    default_draft_depths,
)

DEFAULTS = {
    "dspark_sps_curve": None,
    "dspark_confidence_threshold": 0.0,
    "dspark_budget_frac": 1.0,
    "dspark_capacity_verification_mode": "varlen",
    "dspark_confidence_temperature": 1.0,
    "dspark_online_sts": None,
    "dspark_sps_overhead_ms": 0.0,
    "dspark_draft_depths": None,
    "dspark_sps_cache": "off",
}
CURVE = [[6, 200], [12, 80.5]]
AUTO = {"dspark_sps_curve": "auto"}
NO_ENV = DSparkCapacityEnv()


def read(**keys):
    return DSparkCapacityConfig.from_keys(
        {f"dspark_{name}": value for name, value in keys.items()}
    )


def refusal(keys, **kwargs) -> str:
    with pytest.raises(DSparkCapacityConfigError) as caught:
        DSparkCapacityConfig.from_keys(keys, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("module", [dspark_capacity, dspark_environ, dspark_values])
def test_pure_modules_import_only_the_standard_library(module):
    allowed = set(sys.stdlib_module_names)
    names = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    assert names
    assert {
        n
        for n in names
        if n.split(".")[0] not in allowed and not n.startswith("vllm.config.dspark_")
    } == set()


# Modes.


def test_no_keys_leave_the_feature_off():
    config = read()
    assert (config.mode, config.enabled, config.use_online_sts) == (None, False, False)


def test_keys_at_their_defaults_leave_the_feature_off():
    assert set(DEFAULTS) == set(DSPARK_KEYS)
    config = DSparkCapacityConfig.from_keys(DEFAULTS)
    assert config == DSparkCapacityConfig()
    assert not config.enabled


@pytest.mark.parametrize(
    ("keys", "mode"),
    [
        (AUTO, "curve"),
        ({"dspark_sps_curve": CURVE}, "curve"),
        ({"dspark_confidence_threshold": 0.3}, "threshold"),
        ({"dspark_confidence_threshold": 1}, "threshold"),
        ({"dspark_budget_frac": 0.5}, "fraction"),
        ({"dspark_budget_frac": 0}, "fraction"),
    ],
)
def test_one_key_selects_the_mode(keys, mode):
    config = DSparkCapacityConfig.from_keys(DEFAULTS | keys)
    assert (config.mode, config.enabled) == (mode, True)


SELECTORS = {
    "dspark_sps_curve": "auto",
    "dspark_confidence_threshold": 0.5,
    "dspark_budget_frac": 0.25,
}


@pytest.mark.parametrize(
    "names",
    [
        ("dspark_confidence_threshold", "dspark_budget_frac"),
        ("dspark_confidence_threshold", "dspark_sps_curve"),
        ("dspark_budget_frac", "dspark_sps_curve"),
    ],
)
def test_two_modes_exclude_each_other_and_are_both_named(names):
    text = refusal({name: SELECTORS[name] for name in names})
    for name in names:
        assert f"{name}={SELECTORS[name]!r}" in text
    assert "exclude each other" in text and "Keep one" in text


@pytest.mark.parametrize(
    ("given_sts", "curve", "expected"),
    [
        (None, "auto", True),
        (None, CURVE, False),
        (True, CURVE, True),
        (False, "auto", False),
    ],
)
def test_online_sts_defaults_to_on_with_auto_only(given_sts, curve, expected):
    config = read(sps_curve=curve, online_sts=given_sts)
    assert config.use_online_sts is expected


# Values.

BAD_VALUES = [
    ("dspark_confidence_threshold", value)
    for value in (True, "0.5", math.nan, math.inf, -0.1, 1.1, None, [], 10**400)
]
BAD_VALUES += [
    ("dspark_budget_frac", value)
    for value in (False, "0.5", math.nan, -math.inf, -0.1, 1.1, None)
]
BAD_VALUES += [
    ("dspark_confidence_temperature", value)
    for value in (True, "1", math.nan, math.inf, 0, -1, 0.001, 101)
]
BAD_VALUES += [
    ("dspark_sps_overhead_ms", value)
    for value in (True, "1", math.nan, math.inf, -1, None)
]
BAD_VALUES += [
    ("dspark_capacity_verification_mode", value)
    for value in ("VARLEN", "", None, 1, ["mask"])
]
BAD_VALUES += [("dspark_online_sts", value) for value in (1, 0, "true", "auto")]
BAD_VALUES += [
    ("dspark_draft_depths", value)
    for value in ([], 7, "1,7", [1, True], [1, 2.0], [-1, 7], ["1"], {"1": 7})
]
BAD_VALUES += [
    ("dspark_sps_cache", value)
    for value in ("", " ", None, True, __file__, "/dev/null/x", "a\0b", "OFF", "auto")
]
BAD_VALUES += [
    ("dspark_sps_curve", value)
    for value in (True, 3, "", "no/such/file.json", "AUTO", ".")
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_bad_value_names_key_value_allowed_and_way_out(name, value):
    keys = {name: value}
    if name not in SELECTORS:
        keys |= AUTO
    text = refusal(keys)
    assert text.startswith(f"{name}=")
    assert repr(value)[:100] in text or f"{value}" in text
    assert "must be" in text
    assert any(w in text for w in ("Correct", "Give", "leave"))


NO_EFFECT = [
    ({"dspark_online_sts": True}, "dspark_online_sts"),
    (
        {"dspark_capacity_verification_mode": "mask"},
        "dspark_capacity_verification_mode",
    ),
    ({"dspark_confidence_temperature": 2.0}, "dspark_confidence_temperature"),
    ({"dspark_sps_overhead_ms": 1.0}, "dspark_sps_overhead_ms"),
    ({"dspark_draft_depths": [7]}, "dspark_draft_depths"),
    ({"dspark_sps_cache": "curves"}, "dspark_sps_cache"),
    (
        {"dspark_sps_overhead_ms": 1.0, "dspark_budget_frac": 0.5},
        "dspark_sps_overhead_ms",
    ),
    ({"dspark_sps_cache": "curves", "dspark_sps_curve": CURVE}, "dspark_sps_cache"),
    (
        {"dspark_draft_depths": [3, 7], "dspark_budget_frac": 0.5},
        "dspark_draft_depths",
    ),
    (
        {"dspark_draft_depths": [0, 7], "dspark_confidence_threshold": 0.5},
        "dspark_draft_depths",
    ),
    (
        {
            "dspark_confidence_temperature": 2.0,
            "dspark_sps_curve": {
                "schema": "vllm-dspark-sps-curve",
                "version": 1,
                "sps_curve": CURVE,
                CALIBRATION_KEY: ConfidenceCalibration.uniform(7, 1.5).to_json(),
            },
        },
        "dspark_confidence_temperature",
    ),
]


@pytest.mark.parametrize(("keys", "named"), NO_EFFECT)
def test_option_that_nothing_would_read_is_refused(keys, named):
    text = refusal(keys)
    assert text.startswith(f"{named}=")
    assert "no effect" in text and "Leave the key out or" in text


def test_switching_calibration_off_needs_no_mode():
    assert not read(online_sts=False).enabled


def with_calibration(section):
    header = {"schema": "vllm-dspark-sps-curve", "version": 1, "sps_curve": CURVE}
    return header | {CALIBRATION_KEY: section}


@pytest.mark.parametrize("given_sts", [None, True, False])
def test_the_temperature_is_where_calibration_starts(given_sts):
    config = read(sps_curve="auto", online_sts=given_sts, confidence_temperature=2)
    assert config.start_calibration(7) == ConfidenceCalibration.uniform(7, 2.0)


def test_confidences_are_left_alone_unless_something_asks_for_more():
    assert read(sps_curve=CURVE).start_calibration(7) is None
    assert read(sps_curve="auto", online_sts=False).start_calibration(7) is None
    identity = ConfidenceCalibration.uniform(7)
    assert read(sps_curve="auto").start_calibration(7) == identity


@pytest.mark.parametrize("given_sts", [None, True])
def test_a_curve_may_bring_its_calibration(given_sts):
    saved = ConfidenceCalibration.uniform(7, 1.6)
    curve = with_calibration(saved.to_json())
    config = read(sps_curve=curve, online_sts=given_sts)
    assert config.start_calibration(5) == saved.first(5)
    again = DSparkCapacityConfig.from_keys(config.to_keys())
    assert again.start_calibration(7) == saved


@pytest.mark.parametrize("k", [None, 8])
def test_a_broken_or_too_short_calibration_is_refused(k):
    section = ConfidenceCalibration.uniform(7).to_json()
    if k is None:
        section["version"] = 99
    text = refusal(
        {"dspark_sps_curve": with_calibration(section)}, num_speculative_tokens=k
    )
    assert text.startswith(f"{CALIBRATION_KEY}=")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("dspark_sps_curv", "dspark_sps_curve"),
        ("dspark_treshold", "dspark_confidence_threshold"),
        ("dspark_budget_fraction", "dspark_budget_frac"),
    ],
)
def test_unknown_key_names_the_nearest_and_all_known(name, near):
    text = refusal({name: "auto"})
    assert repr(name) in text
    assert all(key in text for key in DSPARK_KEYS)
    if name != "dspark_treshold":  # too far for a guess; the list still helps
        assert f"Did you mean {near!r}?" in text


def test_upstreams_own_dspark_key_passes():
    assert not DSparkCapacityConfig.from_keys({"dspark_draft_topk": 4}).enabled


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["auto", "off", "mask", "varlen"])
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(DSPARK_KEYS), JSON_VALUES, max_size=4))
def test_any_json_is_accepted_or_refused_with_our_error(keys):
    try:
        config = DSparkCapacityConfig.from_keys(keys, num_speculative_tokens=7)
    except DSparkCapacityConfigError:
        return
    assert DSparkCapacityConfig.from_keys(config.to_keys()) == config
    assert hash(config) == hash(pickle.loads(pickle.dumps(config)))


# Depths.


def test_depths_are_sorted_and_unique():
    config = read(sps_curve="auto", draft_depths=[7, 1, 3, 1, 0])
    assert config.dspark_draft_depths == (0, 1, 3, 7)


@pytest.mark.parametrize("depths", [[1, 3], [1, 7, 8], [8], [0]])
def test_depths_must_lie_within_k_and_contain_it(depths):
    keys = AUTO | {"dspark_draft_depths": depths}
    text = refusal(keys, num_speculative_tokens=7)
    assert f"dspark_draft_depths={sorted(depths)}" in text
    assert "num_speculative_tokens = 7" in text and "Add 7" in text


@pytest.mark.parametrize(
    ("k", "min_depth", "expected"),
    [
        (7, 1, (1, 3, 5, 7)),
        (7, 0, (0, 1, 3, 5, 7)),
        (7, 4, (4, 5, 7)),
        (7, 7, (7,)),
        (5, 1, (1, 3, 5)),
        (1, 1, (1,)),
        (1, 0, (0, 1)),
        (16, 1, (1, 3, 5, 8, 12, 16)),
    ],
)
def test_default_depths(k, min_depth, expected):
    assert default_draft_depths(k, min_depth) == expected
    env = DSparkCapacityEnv(min_draft_depth=min_depth)
    assert read(sps_curve="auto").resolve_depths(k, env) == expected


@settings(deadline=None)
@given(st.integers(1, 64).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))))
def test_default_depths_increase_from_the_smallest_to_k(k_and_min):
    k, low = k_and_min
    depths = default_draft_depths(k, low)
    assert list(depths) == sorted(set(depths))
    assert depths[-1] == k
    assert depths[0] == low


@pytest.mark.parametrize("keys", [{"confidence_threshold": 0.5}, {"budget_frac": 0.5}])
def test_modes_without_costs_draft_k_whether_listed_or_not(keys):
    assert read(**keys).resolve_depths(7, NO_ENV) == (7,)
    assert read(**keys, draft_depths=[7, 7]).resolve_depths(7, NO_ENV) == (7,)


def test_dynamic_depth_off_leaves_k_alone():
    env = DSparkCapacityEnv(dynamic_draft_depth=False)
    assert read(sps_curve="auto").resolve_depths(7, env) == (7,)


def test_listed_zero_is_kept_under_the_default_smallest_depth():
    config = read(sps_curve="auto", draft_depths=[0, 7])
    assert config.resolve_depths(7, NO_ENV) == (0, 7)


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        (
            {"VLLM_DSPARK_DYNAMIC_DRAFT_MIN_DEPTH": "2"},
            "VLLM_DSPARK_DYNAMIC_DRAFT_MIN_DEPTH",
        ),
        ({"VLLM_DSPARK_DYNAMIC_DRAFT_DEPTH": "0"}, "VLLM_DSPARK_DYNAMIC_DRAFT_DEPTH"),
    ],
)
def test_environment_must_not_contradict_listed_depths(environ, variable):
    config = read(sps_curve="auto", draft_depths=[1, 7])
    env = DSparkCapacityEnv.from_environ(environ)
    with pytest.raises(DSparkCapacityConfigError) as caught:
        config.resolve_depths(7, env)
    assert variable in str(caught.value) and "[1, 7]" in str(caught.value)


def test_smallest_depth_must_not_exceed_k():
    env = DSparkCapacityEnv.from_environ({"VLLM_DSPARK_DYNAMIC_DRAFT_MIN_DEPTH": "8"})
    with pytest.raises(DSparkCapacityConfigError, match="MIN_DEPTH='8'.*= 7"):
        read(sps_curve="auto").resolve_depths(7, env)


def test_depths_read_the_process_environment_by_default(monkeypatch):
    monkeypatch.setenv("VLLM_DSPARK_DYNAMIC_DRAFT_DEPTH", "0")
    assert read(sps_curve="auto").resolve_depths(7) == (7,)
