# SPDX-License-Identifier: Apache-2.0
"""The speculative config with our keys, through every way vLLM builds it."""

import copy
import json
import os
import pickle
import subprocess
import sys

import cloudpickle
import pytest

import vllm.config
import vllm.engine.arg_utils
from vllm.config import dspark_speculative
from vllm.config.dspark_capacity import DSPARK_KEYS, DSparkCapacityConfig
from vllm.config.dspark_speculative import (
    WORKER_CLS,
    DSparkSpeculativeConfig,
)
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import replace
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.plugins import dspark_capacity
from vllm.plugins.dspark_capacity import seam
from vllm.plugins.dspark_capacity.seams import SEAMS
from vllm.utils.argparse_utils import FlexibleArgumentParser

K = 7  # block size of the draft, tests/helpers/config_models.py
AUTO = {"dspark_sps_curve": "auto"}
CURVE = [[6, 200.0], [12, 80.0]]
pytestmark = pytest.mark.usefixtures("plugin")


def speculative_dict(argv) -> dict:
    """Return what vLLM's command line parser makes of ``argv``."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return parser.parse_args(argv).speculative_config


def dotted(keys):
    argv = []
    for name, value in keys.items():
        text = value if isinstance(value, str) else json.dumps(value)
        argv += [f"--speculative-config.{name}", text]
    return argv


WAYS = {
    "json": lambda keys: speculative_dict(["--speculative-config", json.dumps(keys)]),
    "dotted": lambda keys: speculative_dict(dotted(keys)),
    "dict": dict,
}


def create_speculative_config(target_args, keys):
    args = EngineArgs(**target_args, speculative_config=keys)
    return args.create_speculative_config(
        args.create_model_config(), vllm.config.ParallelConfig()
    )


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_starting_reads_our_keys(way, target_args, spec_keys):
    keys = AUTO | {
        "dspark_draft_depths": [1, 3, 7],
        "dspark_online_sts": False,
        "dspark_confidence_temperature": 1.5,
        "dspark_sps_overhead_ms": 2,
        "dspark_capacity_verification_mode": "mask",
    }
    spec = create_speculative_config(target_args, WAYS[way](spec_keys | keys))
    assert spec.capacity_config == DSparkCapacityConfig.from_keys(keys)
    assert spec.capacity_enabled


def test_dotted_form_delivers_decoded_json():
    keys = {
        "dspark_sps_curve": "auto",
        "dspark_budget_frac": 0.5,
        "dspark_draft_depths": [1, 3, 7],
        "dspark_online_sts": True,
        "dspark_sps_cache": "/a/b",
    }
    assert {
        name.replace("-", "_"): value
        for name, value in speculative_dict(dotted(keys)).items()
    } == keys


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("dspark_sps_curv", "dspark_sps_curve"),
        ("num_speculative_token", "num_speculative_tokens"),
        ("enable_adaptive_verificaton", "enable_adaptive_verification"),
    ],
)
def test_unknown_key_fails_before_the_draft_is_opened(
    way, name, near, target_args, spec_keys
):
    keys = spec_keys | {"model": "no/such/draft", name: 3}
    with pytest.raises(ValueError) as caught:
        create_speculative_config(target_args, WAYS[way](keys))
    message = str(caught.value)
    assert f"{name!r}. Did you mean {near!r}?" in message
    assert "Correct the name or remove it" in message
    assert "no/such/draft" not in message.split("[type=")[0]


@pytest.mark.parametrize("way", WAYS)
def test_bad_value_fails_before_the_draft_is_opened(way, target_args, spec_keys):
    keys = spec_keys | {"model": "no/such/draft", "dspark_budget_frac": True}
    with pytest.raises(ValueError, match="dspark_budget_frac=True: must be"):
        create_speculative_config(target_args, WAYS[way](keys))


def test_public_name_builds_our_class(build):
    spec = build(**AUTO)
    assert type(spec) is DSparkSpeculativeConfig
    assert isinstance(spec, SpeculativeConfig)
    with pytest.raises(ValueError, match="Did you mean 'dspark_sps_curve'"):
        build(dspark_sps_curves="auto")


def test_our_keys_collide_with_no_upstream_field():
    assert not set(DSPARK_KEYS) & set(SpeculativeConfig.__dataclass_fields__)
    ours = DSparkSpeculativeConfig.__dataclass_fields__
    added = [
        name for name in ours if name not in SpeculativeConfig.__dataclass_fields__
    ]
    assert added == list(DSPARK_KEYS)
    assert {n: ours[n].default for n in DSPARK_KEYS} == {
        f.name: f.default for f in DSparkCapacityConfig.__dataclass_fields__.values()
    }


def test_command_line_help_still_builds():
    kwargs = vllm.engine.arg_utils.get_kwargs(DSparkSpeculativeConfig)
    stock = vllm.engine.arg_utils.get_kwargs(SpeculativeConfig)
    assert {k: v["default"] for k, v in kwargs.items() if k in stock} == {
        k: v["default"] for k, v in stock.items()
    }


# Off by default.


def upstream_attributes():
    """Return the identity of every attribute of vLLM modules and classes."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("vllm.") or "dspark_capacity" in module_name:
            continue
        for name, value in list(vars(module).items()):
            if name.startswith("__"):
                continue
            found[module_name, name] = value
            if isinstance(value, type) and value.__module__.startswith("vllm."):
                for attr, member in list(vars(value).items()):
                    if not attr.startswith("__"):
                        found[value.__module__, value.__qualname__, attr] = member
    return found


EXPECTED_CHANGES = {
    ("vllm.engine.arg_utils", "SpeculativeConfig"),
    ("vllm.config", "SpeculativeConfig"),
}


def test_register_changes_nothing_but_the_config_names(monkeypatch):
    for name in (n for n in os.environ if n.startswith("VLLM_DSPARK_")):
        monkeypatch.delenv(name)
    seam.remove(seam.applied_ids())
    before = upstream_attributes()
    assert len(before) > 10_000  # the premise: vLLM is loaded
    dspark_capacity.register()
    after = upstream_attributes()
    changed = {k for k, v in before.items() if k in after and after[k] is not v}
    assert changed == EXPECTED_CHANGES
    assert set(seam.applied_ids()) == {s.id for s in SEAMS if s.scope.value == "config"}


def test_one_of_our_variables_adds_the_environ_rows(monkeypatch):
    monkeypatch.setenv("VLLM_DSPARK_TP_CHECK", "1")
    monkeypatch.delenv("VLLM_DSPARK_CPU_REHEARSAL", raising=False)
    seam.remove(seam.applied_ids())
    dspark_capacity.register()
    assert "config.environ" in seam.applied_ids()


def test_without_our_keys_the_config_is_as_stock(build, target_args, spec_keys):
    spec = build(enable_adaptive_verification=True, dspark_draft_topk=4)
    applied = seam.applied_ids()
    seam.remove(applied)
    stock = vllm.config.SpeculativeConfig
    assert stock is SpeculativeConfig
    plain = build(enable_adaptive_verification=True, dspark_draft_topk=4)
    assert type(plain) is SpeculativeConfig
    assert not spec.capacity_enabled
    assert spec.target_parallel_config.worker_cls == "auto"
    assert repr(spec) == repr(plain)
    assert spec.compute_hash() == plain.compute_hash()
    ours, theirs = dict(vars(spec)), dict(vars(plain))
    for name in DSPARK_KEYS:
        ours.pop(name)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert repr(ours[name]) == repr(value)
    assert not any(s.scope.value == "frontend" and s.id in applied for s in SEAMS)


# What switching on sets.


@pytest.mark.parametrize(
    "keys",
    [AUTO, {"dspark_confidence_threshold": 0.2}, {"dspark_budget_frac": 0.5}],
)
def test_varlen_turns_adaptive_verification_on(build, keys):
    spec = build(**keys)
    assert spec.enable_adaptive_verification is True
    assert spec.target_parallel_config.worker_cls == WORKER_CLS
    assert "config.vllm-config" in seam.applied_ids()
    assert build(**keys, enable_adaptive_verification=True).capacity_enabled


def test_mask_leaves_adaptive_verification_off(build):
    spec = build(**AUTO, dspark_capacity_verification_mode="mask")
    assert spec.enable_adaptive_verification is False
    assert spec.target_parallel_config.worker_cls == WORKER_CLS


@pytest.mark.parametrize(("mode", "flag"), [("varlen", False), ("mask", True)])
def test_contradicting_adaptive_verification_names_both(build, mode, flag):
    with pytest.raises(ValueError) as caught:
        build(
            **AUTO,
            dspark_capacity_verification_mode=mode,
            enable_adaptive_verification=flag,
        )
    text = str(caught.value)
    assert f"enable_adaptive_verification={flag}" in text
    assert f"dspark_capacity_verification_mode={mode!r}" in text


def test_hash_follows_upstreams_flag_alone(build):
    masked = build(**AUTO, dspark_capacity_verification_mode="mask")
    assert masked.compute_hash() == build().compute_hash()
    adaptive = build(enable_adaptive_verification=True)
    assert build(**AUTO).compute_hash() == adaptive.compute_hash()
    assert masked.compute_hash() != adaptive.compute_hash()


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("draft_method", ["greedy", "probabilistic"])
def test_sampling_methods_of_upstream_stay_allowed(build, method, draft_method):
    spec = build(
        **AUTO, rejection_sample_method=method, draft_sample_method=draft_method
    )
    assert spec.capacity_enabled


def test_depth_comes_from_the_draft_when_not_given(build):
    spec = build(**AUTO, num_speculative_tokens=..., dspark_draft_depths=[7, 1])
    assert spec.num_speculative_tokens == K
    with pytest.raises(ValueError, match="num_speculative_tokens = 7"):
        build(**AUTO, num_speculative_tokens=..., dspark_draft_depths=[1, 8])


# Copies and other processes.


def test_curve_file_travels_as_content(build, tmp_path):
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(CURVE))
    spec = build(dspark_sps_curve=str(path))
    path.unlink()
    again = pickle.loads(pickle.dumps(spec))
    assert again.capacity_config.dspark_sps_curve.points == ((6, 200.0), (12, 80.0))


def test_copies_are_equal_and_keep_the_class(build):
    spec = build(**AUTO, dspark_draft_depths=[7, 1], dspark_sps_overhead_ms=1)
    for other in (
        pickle.loads(pickle.dumps(spec)),
        pickle.loads(cloudpickle.dumps(spec)),
        copy.copy(spec),
        # Upstream refuses its own completed lookup lengths.
        replace(spec, prompt_lookup_max=None, prompt_lookup_min=None),
    ):
        assert type(other) is DSparkSpeculativeConfig
        assert other.capacity_config == spec.capacity_config
        assert other.enable_adaptive_verification


UNPICKLE = """
import pickle, sys
spec = pickle.load(open(sys.argv[1], "rb"))
import vllm.config
from vllm.plugins.dspark_capacity.seam import applied_ids
assert spec.capacity_enabled and spec.num_speculative_tokens == 7
assert vllm.config.SpeculativeConfig is vllm.config.speculative.SpeculativeConfig
assert applied_ids() == ()
print("unpickled", spec.capacity_config.mode)
"""


def test_unpickling_needs_no_plugin(build, tmp_path):
    path = tmp_path / "spec.pickle"
    path.write_bytes(pickle.dumps(build(**AUTO)))
    done = subprocess.run(
        [sys.executable, "-c", UNPICKLE, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "unpickled curve" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize(("num_tokens", "warns"), [(K, False), (K + 1, True)])
def test_positions_that_the_draft_was_not_trained_for_are_warned_of(
    target_args, spec_keys, monkeypatch, num_tokens, warns
):
    warnings = []
    monkeypatch.setattr(
        dspark_speculative.logger,
        "warning_once",
        lambda text, *args: warnings.append(text % args),
    )
    keys = spec_keys | AUTO | {"num_speculative_tokens": num_tokens}
    create_speculative_config(target_args, keys)
    assert [w for w in warnings if "block size 7" in w and "7 or less" in w] == (
        warnings if warns else []
    )
    assert bool(warnings) == warns
    # Without our keys it is vLLM's business alone.
    warnings.clear()
    create_speculative_config(
        target_args, spec_keys | {"num_speculative_tokens": num_tokens}
    )
    assert not warnings
