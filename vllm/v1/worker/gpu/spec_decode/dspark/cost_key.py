# SPDX-License-Identifier: Apache-2.0
"""What the measured costs of a runner depend on: the key of its cache entry.

Invariant (pinned by tests/.../dspark/test_cost_key.py): every part of the key that
changes gives another entry.
"""

import hashlib
import importlib.metadata
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.config.dspark_environ import DSparkCapacityEnv
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.dspark.cost_cache import CostCache

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.worker.gpu.dspark_capacity_model_runner import (
        DSparkCapacityModelRunner,
    )

# Raise it when the way of measuring changes, so that older figures are dropped.
PROFILE_VERSION = 1


def overlay_version() -> str:
    """Return the version of this overlay; ``checkout`` where it is only linked."""
    try:
        return importlib.metadata.version("vllm-dspark-capacity")
    except importlib.metadata.PackageNotFoundError:
        return "checkout"


def _model_hash(model: "ModelConfig") -> str:
    """Hash vLLM's view of a model and its configuration file, without the weights."""
    text = f"{model.compute_hash()} {model.hf_config.to_json_string()}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def make_key(runner: "DSparkCapacityModelRunner") -> dict[str, Any]:
    """Return the cache key of a runner whose KV cache has been initialised."""
    config, env = runner.vllm_config, DSparkCapacityEnv.from_environ(os.environ)
    model, parallel = config.model_config, config.parallel_config
    speculative, scheduler = config.speculative_config, config.scheduler_config
    compilation, num_steps = config.compilation_config, config.num_speculative_tokens
    draft = speculative.draft_model_config
    capacity = speculative.capacity_config
    backends = {g.backend.get_name() for groups in runner.attn_groups for g in groups}
    return {
        "model": model.model,
        "model_hash": _model_hash(model),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "draft": draft.model,
        "draft_hash": _model_hash(draft),
        "gpu": current_platform.get_device_name(runner.device.index or 0),
        "vllm_version": vllm.__version__,
        "overlay_version": overlay_version(),
        "profile_version": PROFILE_VERSION,
        "profile": [env.profile_repeats, env.profile_warmup, *env.profile_sizes],
        "graph_mode": str(compilation.cudagraph_mode),
        "graph_sizes": list(compilation.cudagraph_capture_sizes or ()),
        "parallel_sizes": {
            "tensor": parallel.tensor_parallel_size,
            "pipeline": parallel.pipeline_parallel_size,
            "data": parallel.data_parallel_size,
            "expert": parallel.enable_expert_parallel,
        },
        "num_speculative_tokens": num_steps,
        "depths": list(capacity.resolve_depths(num_steps)),
        "verification_mode": capacity.dspark_capacity_verification_mode,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_model_len": model.max_model_len,
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "attention_backends": sorted(backends),
    }


def make_cache(
    runner: "DSparkCapacityModelRunner", directory: Path | None
) -> CostCache | None:
    """Return the runner's cache entry; None where nothing is to be kept.

    Args:
        runner: Runner whose KV cache has been initialised.
        directory: Of the cache, prepared; None when it is off.
    """
    if directory is None:
        return None
    key = make_key(runner)
    return CostCache(directory, key, name=key["model"])
