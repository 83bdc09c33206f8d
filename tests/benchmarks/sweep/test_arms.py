# SPDX-License-Identifier: Apache-2.0
"""What an arm name means."""

import pytest

from benchmarks.sweep.arms import Arm

FULL = 7


def config(name):
    return Arm.parse(name).speculative_config("draft", FULL)


@pytest.mark.parametrize("name", ["fixed0", "depths0", "pinned", "none3", "fixed100"])
def test_other_names_are_refused_with_what_is_allowed(name):
    with pytest.raises(ValueError, match=f"{name}.*depthsK"):
        Arm.parse(name)


def test_only_capacity_arms_have_capacity_keys():
    assert config("none") is None
    assert set(config("fixed3")) == {"method", "model", "num_speculative_tokens"}
    assert config("upstream7")["enable_adaptive_verification"]
    assert config("capacity7")["dspark_sps_curve"] == "auto"


@pytest.mark.parametrize(
    ("name", "k", "depths"),
    [
        ("pinned0", FULL, [0, FULL]),
        ("pinned3", FULL, [3, FULL]),
        ("pinned9", 9, [9]),
        ("depths5", 5, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_arms_that_hold_a_depth_enable_it_beside_k_and_never_trim(name, k, depths):
    found = config(name)
    assert Arm.parse(name).holds_depth
    assert found["num_speculative_tokens"] == k
    assert found["dspark_draft_depths"] == depths
    rates = {rate for _, rate in found["dspark_sps_curve"]}
    assert len(rates) == 1, "a flat curve: no plan verifies less"
    assert not Arm.parse("capacity7").holds_depth


def test_dflash_arms_hold_their_depth_without_a_curve():
    found = Arm.parse("depths5").speculative_config("draft", FULL, "dflash")
    assert found["method"] == "dflash"
    assert found["dspark_sps_curve"] == "auto", "DFlash refuses any other curve"
    assert found["dspark_draft_depths"] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("half5", {"dspark_budget_frac": 0.5}),
        (
            "mask5",
            {
                "dspark_budget_frac": 0.5,
                "dspark_capacity_verification_mode": "mask",
            },
        ),
        ("zero5", {"dspark_confidence_threshold": 1.0}),
    ],
)
def test_arms_that_trim_whatever_the_costs_have_no_knee(name, keys):
    arm = Arm.parse(name)
    found = arm.speculative_config("draft", FULL)
    assert {k: v for k, v in found.items() if k.startswith("dspark_")} == keys
    assert arm.environ == {"VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": "1"}
    assert not Arm.parse("capacity5").environ
