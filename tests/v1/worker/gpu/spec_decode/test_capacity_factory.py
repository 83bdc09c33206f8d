# SPDX-License-Identifier: Apache-2.0
"""Which manager is built: ours, upstream's for another engine, or the fallback."""

import re
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.capacity_cases import (
    DEVICE,
    MAX_NUM_REQS,
    FakeGroup,
    make_config,
    make_req_states,
)
from vllm.v1.worker.gpu.spec_decode import adaptive_verification, capacity
from vllm.v1.worker.gpu.spec_decode import capacity_factory as module
from vllm.v1.worker.gpu.spec_decode.capacity import (
    VarlenCapacityManager,
)
from vllm.v1.worker.gpu.spec_decode.capacity_factory import (
    create_fixed_shape_manager,
    wrap_manager_factory,
)
from vllm.v1.worker.gpu.spec_decode.depth_capacity import DepthCapacityManager
from vllm.v1.worker.gpu.spec_decode.mask_capacity import MaskCapacityManager

UPSTREAM = object()


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(capacity, "get_tp_group", FakeGroup)
    for name in ("CAPACITY_ACTIVATION_BATCH_SIZE", "TP_CHECK"):
        monkeypatch.delenv(f"VLLM_DSPARK_{name}", raising=False)


def make_arguments(*, enabled=True):
    return {
        "enable_adaptive_verification": True,
        "req_states": make_req_states(),
        "query_start_loc": torch.zeros(MAX_NUM_REQS + 1, dtype=torch.int32).to(DEVICE),
        "num_bonus_tokens": 1,
        "max_total_logits": 77,
        "vllm_config": SimpleNamespace(
            speculative_config=SimpleNamespace(
                capacity_enabled=enabled,
                capacity_config=make_config(dspark_budget_frac=0.5),
                reports_confidences=True,
            )
        ),
    }


def test_our_manager_replaces_upstreams_and_gets_the_runners_buffer():
    arguments = make_arguments()
    manager = wrap_manager_factory(lambda **kwargs: UPSTREAM)(**arguments)
    assert type(manager) is VarlenCapacityManager
    assert manager.query_start_loc is arguments["query_start_loc"]
    assert manager.req_states is arguments["req_states"]
    assert manager.planner._max_total_logits == 77


def test_upstreams_checks_run_first_with_the_same_arguments():
    seen = []
    arguments = make_arguments()
    wrap_manager_factory(lambda **kwargs: seen.append(kwargs))(**arguments)
    assert seen == [arguments]


@pytest.mark.parametrize("config", ["off", "foreign", "none"])
def test_engine_without_capacity_gets_what_upstream_builds(config):
    arguments = make_arguments(enabled=False)
    if config != "off":
        other = None if config == "none" else SimpleNamespace()
        arguments["vllm_config"] = SimpleNamespace(speculative_config=other)
    assert wrap_manager_factory(lambda **kwargs: UPSTREAM)(**arguments) is UPSTREAM

    def refuse(**kwargs):
        raise ValueError("upstream's own refusal")

    with pytest.raises(ValueError, match="own refusal"):
        wrap_manager_factory(refuse)(**arguments)


def test_nothing_is_built_where_upstream_builds_nothing():
    assert wrap_manager_factory(lambda **kwargs: None)(**make_arguments()) is None


def test_refusal_falls_back_to_mask_mode_and_says_why(monkeypatch):
    lines = []
    monkeypatch.setattr(
        module.logger, "warning_once", lambda text, *args: lines.append(text % args)
    )

    def refuse(**kwargs):
        raise ValueError("backend X cannot replay")

    assert wrap_manager_factory(refuse)(**make_arguments()) is None
    (line,) = lines
    assert "'mask'" in line and "backend X cannot replay" in line


@pytest.mark.parametrize("has_counts", [False, True])
def test_result_of_reallocate_drafts_follows_the_running_vllm(monkeypatch, has_counts):
    if has_counts:
        monkeypatch.setattr(
            adaptive_verification, "AdmittedDraftCounts", object, raising=False
        )
    else:
        monkeypatch.delattr(adaptive_verification, "AdmittedDraftCounts", raising=False)
    manager = wrap_manager_factory(lambda **kwargs: UPSTREAM)(**make_arguments())
    assert manager._reports_admitted_counts == has_counts


def make_runner(rejection_sampler):
    config = make_arguments()["vllm_config"].speculative_config
    config.enable_adaptive_verification = True
    return SimpleNamespace(
        rejection_sampler=rejection_sampler,
        speculative_config=config,
        speculator=SimpleNamespace(enable_adaptive_verification=True),
        req_states=make_req_states(),
        model_state=SimpleNamespace(num_new_sampled_tokens_per_step=1),
    )


def test_mask_manager_takes_the_varlen_flags_back():
    runner = make_runner(SimpleNamespace(capacity_invalid_drafts=None))
    manager = create_fixed_shape_manager(runner)
    assert type(manager) is MaskCapacityManager
    assert runner.speculative_config.enable_adaptive_verification is False
    assert runner.speculator.enable_adaptive_verification is False
    # Nothing is compacted: verification may take as many chunks as it needs.
    assert manager.planner._max_total_logits >= 10**9


@pytest.mark.parametrize("sampler", [None, SimpleNamespace()])
def test_a_draft_without_confidences_gets_the_depth_manager(sampler):
    runner = make_runner(sampler)  # it is told nothing, so any sampler will do
    runner.speculative_config.reports_confidences = False
    runner.speculative_config.capacity_config = make_config(dspark_sps_curve="auto")
    manager = create_fixed_shape_manager(runner)
    assert type(manager) is DepthCapacityManager
    assert manager.req_states is runner.req_states


@pytest.mark.parametrize("sampler", [None, SimpleNamespace()])
def test_mask_mode_refuses_a_sampler_that_cannot_be_told(sampler):
    runner = make_runner(sampler)
    with pytest.raises(ValueError, match=re.escape(type(sampler).__name__)) as error:
        create_fixed_shape_manager(runner)
    assert "'varlen'" in str(error.value)
    assert runner.speculator.enable_adaptive_verification, "nothing was changed"
