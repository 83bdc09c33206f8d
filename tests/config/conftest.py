# SPDX-License-Identifier: Apache-2.0
"""Config-only checkpoints and a builder of speculative configs."""

from types import SimpleNamespace

import pytest

import vllm.config
from tests.helpers.config_models import (
    registered_without_rehearsal,
    write_draft,
    write_target,
)
from vllm.engine.arg_utils import EngineArgs

K = 7


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return SimpleNamespace(
        root=root,
        target=write_target(root / "target"),
        draft=write_draft(root / "draft"),
    )


@pytest.fixture
def plugin(monkeypatch):
    """Register as a process without the rehearsal does; undo it afterwards."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    with registered_without_rehearsal(monkeypatch):
        yield


@pytest.fixture
def target_args(checkpoints):
    return {
        "model": checkpoints.target,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "max_model_len": 128,
        "dtype": "float32",
    }


@pytest.fixture
def spec_keys(checkpoints):
    return {
        "method": "dspark",
        "model": checkpoints.draft,
        "num_speculative_tokens": K,
    }


@pytest.fixture
def build(target_args, spec_keys):
    """Return a function from changed keys to a SpeculativeConfig; ... drops one."""

    def build_config(_parallel=None, _model=None, **changes):
        args = EngineArgs(**target_args)
        model_config = args.create_model_config()
        for name, value in (_model or {}).items():
            setattr(model_config, name, value)
        parallel_config = vllm.config.ParallelConfig()
        for name, value in (_parallel or {}).items():
            setattr(parallel_config, name, value)
        return vllm.config.SpeculativeConfig(
            target_model_config=model_config,
            target_parallel_config=parallel_config,
            **{k: v for k, v in (spec_keys | changes).items() if v is not ...},
        )

    return build_config
