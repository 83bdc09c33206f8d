# SPDX-License-Identifier: Apache-2.0
"""Rules of the VLLM_DSPARK_* variables."""

import pytest

from vllm.config.dspark_capacity import DSparkCapacityConfigError, DSparkCapacityEnv
from vllm.config.dspark_environ import VARIABLES

NO_ENV = DSparkCapacityEnv()


def test_environment_defaults_and_foreign_variables():
    env = DSparkCapacityEnv.from_environ({"PATH": "x", "VLLM_USE_V1": "1"})
    assert env == DSparkCapacityEnv(0, True, 8, 1, 0.0, 0.0, 0, False)


def test_every_variable_is_read():
    env = DSparkCapacityEnv.from_environ(
        {
            "VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": "32",
            "VLLM_DSPARK_DYNAMIC_DRAFT_DEPTH": "False",
            "VLLM_DSPARK_DYNAMIC_DRAFT_DEPTH_WINDOW": " 4 ",
            "VLLM_DSPARK_DYNAMIC_DRAFT_MIN_DEPTH": "0",
            "VLLM_DSPARK_CAPACITY_LOG_INTERVAL": "2.5",
            "VLLM_DSPARK_STS_LOG_INTERVAL": "10",
            "VLLM_DSPARK_TP_CHECK": "2",
            "VLLM_DSPARK_CPU_REHEARSAL": "true",
        }
    )
    expected = (32, False, 4, 0, 2.5, 10.0, 2, True)
    assert len(env.given) == len(expected)
    assert env == DSparkCapacityEnv(*expected, given=env.given)


@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_empty_variable_means_its_default(name):
    assert DSparkCapacityEnv.from_environ({name: " "}) == NO_ENV


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE", "-1"),
        ("VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE", "1.5"),
        ("VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE", "1_0"),
        ("VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE", "+-1"),
        ("VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE", "\u0663"),
        ("VLLM_DSPARK_DYNAMIC_DRAFT_DEPTH", "yes"),
        ("VLLM_DSPARK_DYNAMIC_DRAFT_DEPTH", "2"),
        ("VLLM_DSPARK_DYNAMIC_DRAFT_DEPTH_WINDOW", "0"),
        ("VLLM_DSPARK_DYNAMIC_DRAFT_MIN_DEPTH", "-1"),
        ("VLLM_DSPARK_CAPACITY_LOG_INTERVAL", "nan"),
        ("VLLM_DSPARK_CAPACITY_LOG_INTERVAL", "-1"),
        ("VLLM_DSPARK_CAPACITY_LOG_INTERVAL", "1_0"),
        ("VLLM_DSPARK_CAPACITY_LOG_INTERVAL", "\u0661"),
        ("VLLM_DSPARK_STS_LOG_INTERVAL", "inf"),
        ("VLLM_DSPARK_STS_LOG_INTERVAL", "often"),
        ("VLLM_DSPARK_TP_CHECK", "3"),
        ("VLLM_DSPARK_CPU_REHEARSAL", "on"),
        ("VLLM_DSPARK_ADMISSION_OP", "Triton"),
    ],
)
def test_bad_variable_names_itself_value_and_way_out(name, text):
    with pytest.raises(DSparkCapacityConfigError) as caught:
        DSparkCapacityEnv.from_environ({name: text})
    message = str(caught.value)
    assert message.startswith(f"{name}={text!r}: must be ")
    assert f"unset {name}" in message


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("VLLM_DSPARK_TPCHECK", "'VLLM_DSPARK_TP_CHECK'"),
        ("VLLM_DSPARK_TEMPERATURE", r"'VLLM_DSPARK_TEMPERATURE'\. Known"),
        ("VLLM_DSPARK", "environment variable 'VLLM_DSPARK'"),
        ("VLLM_DSPARKTP_CHECK", "'VLLM_DSPARK_TP_CHECK'"),
    ],
)
def test_unknown_variable_of_our_prefix_is_refused_with_the_nearest(name, hint):
    with pytest.raises(DSparkCapacityConfigError, match=hint):
        DSparkCapacityEnv.from_environ({name: "1"})


def test_admission_op_is_chosen_by_the_worker_unless_it_is_given():
    assert NO_ENV.admission_op == "auto"
    for op in ("auto", "triton", "native"):
        env = DSparkCapacityEnv.from_environ({"VLLM_DSPARK_ADMISSION_OP": op})
        assert env.admission_op == op


def test_profile_options_are_read_and_checked():
    names = {"REPEATS": "9", "WARMUP": "2", "SIZES": "64, 1,8,8"}
    environ = {f"VLLM_DSPARK_PROFILE_{name}": text for name, text in names.items()}
    env = DSparkCapacityEnv.from_environ(environ)
    assert (env.profile_repeats, env.profile_warmup) == (9, 2)
    assert env.profile_sizes == (1, 8, 64)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("REPEATS", "0"),
        ("WARMUP", "-1"),
        ("SIZES", "1,0"),
        ("SIZES", "1,,2"),
        ("SIZES", "x"),
    ],
)
def test_bad_profile_options_are_refused(name, text):
    with pytest.raises(DSparkCapacityConfigError, match=f"PROFILE_{name}='{text}':"):
        DSparkCapacityEnv.from_environ({f"VLLM_DSPARK_PROFILE_{name}": text})
