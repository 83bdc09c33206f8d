# SPDX-License-Identifier: Apache-2.0
"""What the whole engine configuration decides, on config-only checkpoints."""

import os
import pickle
from types import SimpleNamespace

import pytest

import vllm.config
from tests.helpers.config_models import (
    registered_without_rehearsal,
    write_draft,
    write_target,
)
from vllm.config.dspark_capacity import DSparkCapacityConfigError
from vllm.config.dspark_environ import VARIABLES
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.plugins import dspark_capacity
from vllm.plugins.dspark_capacity import config_check, seam
from vllm.plugins.dspark_capacity.config_check import (
    ASYNC_SCHEDULER_CLS,
    SCHEDULER_CLS,
    check_and_update_vllm_config,
)
from vllm.plugins.dspark_capacity.seam import Scope
from vllm.plugins.dspark_capacity.seams import install

AUTO = {"dspark_sps_curve": "auto"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return SimpleNamespace(
        target=write_target(root / "target"), draft=write_draft(root / "draft")
    )


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    """Register as a process without the rehearsal does; undo it afterwards.

    A CPU has neither Triton nor CUDA graphs. What the rehearsal does about that is
    tested with it; here vLLM is only told that it has them, from within: taking away
    a rehearsal row of an earlier test would take what was told before along.
    """
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    platform = type(current_platform)
    with registered_without_rehearsal(monkeypatch), monkeypatch.context() as told:
        told.setattr(platform, "support_static_graph_mode", lambda self: True)
        told.setattr(vllm.config.vllm, "HAS_TRITON", True)
        yield


@pytest.fixture
def build(checkpoints):
    """Return a function from keys and engine arguments to a VllmConfig."""

    def build_config(keys, **args):
        return EngineArgs(
            **{
                "model": checkpoints.target,
                "skip_tokenizer_init": True,
                "load_format": "dummy",
                "max_model_len": 128,
                "dtype": "float32",
                "speculative_config": {
                    "method": "dspark",
                    "model": checkpoints.draft,
                    "num_speculative_tokens": 7,
                    **keys,
                },
                **args,
            }
        ).create_engine_config()

    return build_config


@pytest.fixture
def enabled(build):
    config = build(AUTO)
    assert config.speculative_config.capacity_enabled
    assert config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    return config


def refusal(vllm_config) -> str:
    with pytest.raises(DSparkCapacityConfigError) as caught:
        check_and_update_vllm_config(vllm_config)
    text = str(caught.value)
    assert "must be" in text and "drop the dspark_* keys" in text
    return text


@pytest.mark.parametrize("mode", ["varlen", "mask"])
def test_scheduler_and_worker_are_set_while_the_config_is_made(build, mode):
    config = build(AUTO | {"dspark_capacity_verification_mode": mode})
    is_async = config.scheduler_config.async_scheduling
    assert is_async is not None  # the platform has decided
    scheduler_cls = ASYNC_SCHEDULER_CLS if is_async else SCHEDULER_CLS
    assert config.scheduler_config.scheduler_cls == scheduler_cls
    assert config.parallel_config.worker_cls.endswith(".DSparkCapacityWorker")
    again = pickle.loads(pickle.dumps(config))
    assert again.scheduler_config.scheduler_cls == scheduler_cls


@pytest.mark.parametrize(
    ("is_async", "expected"), [(True, ASYNC_SCHEDULER_CLS), (False, SCHEDULER_CLS)]
)
def test_scheduler_follows_async_scheduling(enabled, is_async, expected):
    enabled.scheduler_config.async_scheduling = is_async
    check_and_update_vllm_config(enabled)
    assert enabled.scheduler_config.scheduler_cls == expected


def test_checking_again_changes_nothing(enabled):
    before = repr(enabled)
    check_and_update_vllm_config(enabled)
    assert repr(enabled) == before


def test_config_without_our_keys_is_left_alone(build):
    config = build({})
    assert config.scheduler_config.scheduler_cls is None
    assert "DSpark" not in config.parallel_config.worker_cls
    assert "config.vllm-config" not in seam.applied_ids()
    # Also in a process in which another engine switched the feature on.
    build(AUTO)
    assert "config.vllm-config" in seam.applied_ids()
    again = build({})
    assert again.scheduler_config.scheduler_cls is None
    assert again.parallel_config.worker_cls == config.parallel_config.worker_cls


def test_lora_is_refused(enabled):
    enabled.lora_config = vllm.config.LoRAConfig()
    assert "enable_lora=True" in refusal(enabled)


def test_v1_runner_is_refused(enabled, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert not enabled.use_v2_model_runner
    assert "model runner=V1" in refusal(enabled)


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE"])
def test_mode_without_full_graphs_is_refused(build, mode):
    arguments = {"compilation_config": {"cudagraph_mode": mode}}
    assert build({}, **arguments).compilation_config.cudagraph_mode.name in (
        mode,
        "NONE",  # a CPU compiles no pieces
    )
    with pytest.raises(ValueError) as caught:
        build(AUTO, **arguments)
    assert "cudagraph_mode=" in str(caught.value)
    assert "FULL_DECODE_ONLY" in str(caught.value)


def test_scheduler_of_the_user_is_refused(build):
    assert build({}, scheduler_cls="my.Scheduler").scheduler_config.scheduler_cls
    with pytest.raises(ValueError, match="scheduler_cls=my.Scheduler"):
        build(AUTO, scheduler_cls="my.Scheduler")


class Backend:
    """An attention backend enumeration member, as far as the check looks."""

    name = "SOME_BACKEND"

    def __init__(self, fits):
        self.fits = fits

    def get_class(self):
        if self.fits is None:
            raise ImportError("no such library")
        return SimpleNamespace(
            supports_device_cpu_query_lens_mismatch=lambda: self.fits
        )


@pytest.mark.parametrize("fits", [True, False, None])
def test_chosen_attention_backend_must_take_lengths_from_the_device(
    enabled, monkeypatch, fits
):
    stub = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr(config_check, "current_platform", stub)
    enabled.attention_config.backend = Backend(fits)
    if fits is False:
        assert "attention_backend=SOME_BACKEND" in refusal(enabled)
        enabled.speculative_config.enable_adaptive_verification = False
    # An unknown answer is left to the selection at load; mask trims nothing.
    check_and_update_vllm_config(enabled)


def test_our_variables_pass_strict_validation(monkeypatch):
    install(Scope.ENVIRON)
    for name in (n for n in os.environ if n.startswith("VLLM_")):
        monkeypatch.delenv(name)
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
    current_platform.validate_environ(True)
    # In the table they would change the keys of the compile cache.
    assert not VARIABLES.keys() & vllm.envs.environment_variables.keys()
    monkeypatch.setenv("VLLM_NO_SUCH_VARIABLE", "1")
    with pytest.raises(ValueError, match="VLLM_NO_SUCH_VARIABLE"):
        current_platform.validate_environ(True)
    assert not VARIABLES.keys() & vllm.envs.environment_variables.keys()


def test_register_refuses_a_bad_variable(monkeypatch):
    monkeypatch.setenv("VLLM_DSPARK_TP_CHECK", "9")
    with pytest.raises(DSparkCapacityConfigError, match="VLLM_DSPARK_TP_CHECK='9'"):
        dspark_capacity.register()


def test_register_refuses_another_vllm(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.1.0")
    with pytest.raises(RuntimeError, match=r"found vLLM 0\.1\.0"):
        dspark_capacity.register()


def test_registering_twice_changes_nothing(monkeypatch):
    monkeypatch.delenv("VLLM_DSPARK_CPU_REHEARSAL", raising=False)
    before = seam.applied_ids()
    dspark_capacity.register()
    assert seam.applied_ids() == before
