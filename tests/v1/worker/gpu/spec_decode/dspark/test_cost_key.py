# SPDX-License-Identifier: Apache-2.0
"""Every part of a configuration that changes costs gives another cache entry."""

from types import SimpleNamespace

import pytest

from tests.helpers.capacity_cases import DEVICE, K, make_config
from vllm.v1.worker.gpu.spec_decode.dspark import cost_key as module
from vllm.v1.worker.gpu.spec_decode.dspark.cost_key import make_cache, make_key


def model(name="target", content="a", layers=1):
    return SimpleNamespace(
        model=name,
        dtype="bfloat16",
        quantization=None,
        max_model_len=1024,
        compute_hash=lambda: f"hash of {content}",
        hf_config=SimpleNamespace(to_json_string=lambda: f"{layers} layers"),
    )


def make_runner():
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    return SimpleNamespace(
        device=DEVICE,
        attn_groups=[[SimpleNamespace(backend=backend)]],
        vllm_config=SimpleNamespace(
            model_config=model(),
            num_speculative_tokens=K,
            speculative_config=SimpleNamespace(
                draft_model_config=model("draft"),
                capacity_config=make_config(dspark_sps_curve="auto"),
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                data_parallel_size=1,
                enable_expert_parallel=False,
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
            compilation_config=SimpleNamespace(
                cudagraph_mode="FULL", cudagraph_capture_sizes=[1, 2]
            ),
            cache_config=SimpleNamespace(cache_dtype="auto"),
        ),
    )


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """The GPU's name, to be changed."""
    name = ["H200"]
    monkeypatch.setattr(
        module.current_platform, "get_device_name", lambda *_: name[0], raising=False
    )
    return name


CHANGES = {
    "model hash": lambda c: setattr(c, "model_config", model(content="b")),
    "model file": lambda c: setattr(c, "model_config", model(layers=2)),
    "dtype": lambda c: setattr(c.model_config, "dtype", "float16"),
    "quantization": lambda c: setattr(c.model_config, "quantization", "fp8"),
    "context": lambda c: setattr(c.model_config, "max_model_len", 2048),
    "draft": lambda c: setattr(
        c.speculative_config, "draft_model_config", model("draft", "b")
    ),
    "depths": lambda c: setattr(
        c.speculative_config,
        "capacity_config",
        make_config(dspark_sps_curve="auto", dspark_draft_depths=[1, K]),
    ),
    "K": lambda c: setattr(c, "num_speculative_tokens", K + 1),
    "tensor parallel": lambda c: setattr(c.parallel_config, "tensor_parallel_size", 2),
    "max_num_seqs": lambda c: setattr(c.scheduler_config, "max_num_seqs", 9),
    "tokens": lambda c: setattr(c.scheduler_config, "max_num_batched_tokens", 65),
    "sizes": lambda c: setattr(c.compilation_config, "cudagraph_capture_sizes", [1]),
    "graphs": lambda c: setattr(c.compilation_config, "cudagraph_mode", "PIECEWISE"),
    "kv dtype": lambda c: setattr(c.cache_config, "cache_dtype", "fp8"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_part_of_the_configuration_is_in_the_key(what, tmp_path):
    runner = make_runner()
    before = make_cache(runner, tmp_path).path
    assert make_cache(make_runner(), tmp_path).path == before, "premise: stable"
    CHANGES[what](runner.vllm_config)
    assert make_cache(runner, tmp_path).path != before


def test_gpu_versions_and_attention_are_in_the_key(gpu, monkeypatch):
    keys = [make_key(make_runner())]
    gpu[0] = "H100"
    keys.append(make_key(make_runner()))
    monkeypatch.setattr(module.vllm, "__version__", "0.99")
    keys.append(make_key(make_runner()))
    monkeypatch.setattr(module, "overlay_version", lambda: "9.9")
    keys.append(make_key(make_runner()))
    runner = make_runner()
    runner.attn_groups[0][0].backend.get_name = lambda: "FLASHINFER"
    keys.append(make_key(runner))
    assert all(a != b for a, b in zip(keys, keys[1:], strict=False))


def test_without_a_directory_there_is_no_cache():
    assert make_cache(make_runner(), None) is None
