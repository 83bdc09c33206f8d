# SPDX-License-Identifier: Apache-2.0
"""What the speculative config refuses once the feature is on."""

from types import SimpleNamespace

import pytest

from tests.helpers.config_models import write_draft
from vllm.config.dspark_calibration import CALIBRATION_KEY, ConfidenceCalibration
from vllm.config.dspark_speculative import MAX_DRAFT_TOKENS, has_confidence_head
from vllm.platforms import current_platform
from vllm.plugins.dspark_capacity import config_check
from vllm.v1.worker.gpu.spec_decode.dspark import capacity_checks

AUTO = {"dspark_sps_curve": "auto"}
pytestmark = pytest.mark.usefixtures("plugin")


REFUSED = {
    "pipeline_parallel_size": {"_parallel": {"pipeline_parallel_size": 2}},
    "data_parallel_size": {"_parallel": {"data_parallel_size": 2}},
    "decode_context_parallel_size": {"_parallel": {"decode_context_parallel_size": 2}},
    "prefill_context_parallel_size": {
        "_parallel": {"prefill_context_parallel_size": 2}
    },
    "enable_batch_sharded_sampling": {
        "_parallel": {"enable_batch_sharded_sampling": True}
    },
    "worker_cls": {"_parallel": {"worker_cls": "my.Worker"}},
    "enforce_eager": {"_model": {"enforce_eager": True}},
    "num_speculative_tokens_per_batch_size": {
        "num_speculative_tokens_per_batch_size": [(1, 8, 7), (9, 512, 3)]
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_setting_is_named_with_a_way_out(build, name):
    assert not build(**REFUSED[name]).capacity_enabled  # the keys make the error
    with pytest.raises(ValueError) as caught:
        build(**AUTO, **REFUSED[name])
    text = str(caught.value)
    assert f"{name}=" in text and "must be" in text
    assert "drop the dspark_* keys" in text


SYNTHETIC = {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1],
}


def test_calibrating_on_synthetic_acceptance_is_refused_only_if_asked_for(build):
    assert build(**AUTO, **SYNTHETIC).capacity_config.use_online_sts
    with pytest.raises(ValueError, match="dspark_online_sts=True would have no effect"):
        build(**AUTO, **SYNTHETIC, dspark_online_sts=True)
    assert build(**AUTO, dspark_online_sts=True).capacity_enabled


def test_a_saved_calibration_for_fewer_positions_is_refused(build):
    curve = {
        "schema": "vllm-dspark-sps-curve",
        "version": 1,
        "sps_curve": [[1, 100.0], [64, 20.0]],
    }
    for positions in (6, 7):
        section = ConfidenceCalibration.uniform(positions, 1.5).to_json()
        keys = {"dspark_sps_curve": curve | {CALIBRATION_KEY: section}}
        if positions == 7:
            assert build(**keys).num_speculative_tokens == 7, "premise"
        else:
            with pytest.raises(ValueError, match=f"{CALIBRATION_KEY}='6 positions'"):
                build(**keys)


def test_cpu_without_the_rehearsal_is_pointed_to_it(build, monkeypatch):
    monkeypatch.delenv("VLLM_DSPARK_CPU_REHEARSAL", raising=False)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    assert not build().capacity_enabled
    with pytest.raises(ValueError, match="platform='cpu'.*VLLM_DSPARK_CPU_REHEARSAL=1"):
        build(**AUTO)


def test_v1_runner_is_refused(build, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        build(**AUTO)


def test_method_without_confidence_is_refused(build):
    with pytest.raises(ValueError, match="method='ngram'.*must be \"dspark\""):
        build(**AUTO, method="ngram", model=None)


@pytest.fixture
def build_dflash(build, checkpoints):
    """Return a function from keys to the config of a DFlash draft."""

    def build_config(architecture="DFlashDraftModel", method="dflash", **keys):
        draft = write_draft(
            checkpoints.root / f"dflash-{architecture}", architectures=[architecture]
        )
        return build(method=method, model=draft, **keys)

    return build_config


def test_dflash_takes_the_keys_that_choose_a_depth(build_dflash, tmp_path):
    config = build_dflash(
        **AUTO,
        dspark_draft_depths=[1, 3, 7],
        dspark_sps_overhead_ms=1.0,
        dspark_sps_cache=str(tmp_path),
        dspark_online_sts=False,
    )
    assert config.capacity_enabled and not config.reports_confidences
    assert config.enable_adaptive_verification is False, "nothing is trimmed"
    assert config.capacity_config.resolve_depths(7) == (1, 3, 7)
    assert config.target_parallel_config.worker_cls != "auto"


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("dspark_sps_curve", {"dspark_confidence_threshold": 0.5}),
        ("dspark_sps_curve", {"dspark_budget_frac": 0.5}),
        ("dspark_sps_curve", {"dspark_sps_curve": [[6, 200.0], [12, 80.0]]}),
        (
            "dspark_capacity_verification_mode",
            AUTO | {"dspark_capacity_verification_mode": "mask"},
        ),
        (
            "dspark_confidence_temperature",
            AUTO | {"dspark_confidence_temperature": 2.0},
        ),
        ("dspark_online_sts", AUTO | {"dspark_online_sts": True}),
        (
            "enable_adaptive_verification",
            AUTO | {"enable_adaptive_verification": True},
        ),
        ("dspark_draft_depths", AUTO | {"dspark_draft_depths": [7]}),
        ("architectures", AUTO | {"architecture": "DFlash2DraftModel"}),
        ("architectures", AUTO | {"architecture": "LiLiCorrDraftModel"}),
    ],
)
def test_dflash_refuses_what_needs_confidences(build_dflash, name, keys):
    with pytest.raises(ValueError) as caught:
        build_dflash(**keys)
    text = str(caught.value)
    assert f"{name}=" in text and "DFlash" in text and "must be" in text
    assert "drop the dspark_* keys" in text


def test_dflash_that_upstream_found_out_must_be_named(build_dflash):
    assert build_dflash(method=...).method == "dflash", "premise: by the model's path"
    with pytest.raises(ValueError, match='set "method": "dflash"'):
        build_dflash(**AUTO, method=...)


def test_draft_without_confidence_head_is_refused(build, checkpoints):
    draft = write_draft(checkpoints.root / "headless", enable_confidence_head=False)
    assert not build(model=draft).capacity_enabled
    with pytest.raises(ValueError, match="enable_confidence_head: true"):
        build(**AUTO, model=draft)


@pytest.mark.parametrize(
    ("architecture", "target_type", "given_value", "expected"),
    [
        ("Qwen3DSparkModel", "qwen3", None, False),
        ("Qwen3DSparkModel", "qwen3", True, True),
        ("Gemma4DSparkModel", "gemma4", None, False),
        ("Gemma4DSparkModel", "gemma4", True, True),
        ("Qwen3OmniDSparkModel", "qwen3_omni_moe", True, True),
        ("MuseSparkDSparkModel", "muse_spark", True, True),
        ("K3DSparkModel", "kimi_k3", None, False),
        ("K3DSparkModel", "kimi_k3", True, True),
        ("DSparkDraftModel", "deepseek_v4", None, True),
        ("DSparkV41DraftModel", "deepseek_v41", None, True),
        ("DSparkDraftModel", "deepseek_v4", False, False),
        # Upstream's name for a draft that it did not recognise.
        ("DSparkDraftModel", "qwen3", None, False),
    ],
)
def test_confidence_head_default_depends_on_the_architecture(
    architecture, target_type, given_value, expected
):
    hf_config = SimpleNamespace()
    if given_value is not None:
        hf_config.enable_confidence_head = given_value
    model = SimpleNamespace(hf_config=hf_config, architectures=[architecture])
    target = SimpleNamespace(hf_config=SimpleNamespace(model_type=target_type))
    spec = SimpleNamespace(draft_model_config=model, target_model_config=target)
    assert has_confidence_head(spec) is expected


def test_a_plain_model_as_draft_is_refused_by_name(build, target_args):
    with pytest.raises(ValueError, match="enable_confidence_head: true"):
        build(**AUTO, model=target_args["model"])


def test_a_draft_that_was_left_out_is_said_to_be_missing(build):
    with pytest.raises(ValueError, match="this is the target itself") as caught:
        build(**AUTO, model=None)
    assert 'Give "model", the draft' in str(caught.value)


@pytest.mark.parametrize("method", ["mtp", "eagle"])
def test_another_method_is_refused_before_upstream_looks_at_it(build, method):
    with pytest.raises(ValueError, match=f"method='{method}' does not work"):
        build(**AUTO, method=method)


def test_limits_are_those_of_the_admission_kernel(build):
    assert MAX_DRAFT_TOKENS == capacity_checks.MAX_ADMISSION_STEPS
    assert config_check.MAX_NUM_SEQS == capacity_checks.MAX_ADMISSION_REQS
    with pytest.raises(ValueError, match="num_speculative_tokens=17"):
        build(**AUTO, num_speculative_tokens=17)


@pytest.mark.parametrize("value", [True, "7", 7.0])
def test_k_of_another_type_is_refused(build, value):
    keys = {"num_speculative_tokens": value}
    assert build(**keys).num_speculative_tokens in (1, 7), "premise: upstream takes it"
    with pytest.raises(ValueError) as caught:
        build(**AUTO, **keys)
    text = str(caught.value)
    assert f"num_speculative_tokens={value!r}" in text
    assert "an integer in [1, 16]" in text and "for example 7" in text


def test_adaptive_verification_of_another_type_is_refused(build):
    with pytest.raises(ValueError, match="enable_adaptive_verification=no"):
        build(**AUTO, enable_adaptive_verification="no")


def test_environment_is_checked_against_k(build, monkeypatch):
    monkeypatch.setenv("VLLM_DSPARK_DYNAMIC_DRAFT_MIN_DEPTH", "8")
    assert not build().capacity_enabled
    with pytest.raises(ValueError, match="num_speculative_tokens = 7"):
        build(**AUTO)
