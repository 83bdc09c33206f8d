# SPDX-License-Identifier: Apache-2.0
"""Config-only targets with DSpark drafts, for dummy weights.

They cost what a real checkpoint of those dimensions costs; what they generate is
meaningless, so acceptance comes from vLLM's synthetic rejection sampler.
``deepseek-v4-reduced`` keeps every width that its kernels know from
DeepSeek-V4-Flash, with four layers, narrower experts and a smaller vocabulary; its
draft is part of the target's checkpoint.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Dimensions:
    """Sizes of one preset.

    Attributes:
        hidden: Hidden size.
        heads: Attention heads.
        kv_heads: Key and value heads.
        head_dim: Size of a head.
        intermediate: Size of the MLP.
        vocab: Vocabulary size.
        layers: Target layers.
        draft_layers: Draft layers.
        target_layer_ids: Target layers whose states the draft reads.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: int
    draft_layers: int
    target_layer_ids: tuple[int, ...]


QWEN3 = {
    "tiny-dims": Dimensions(512, 8, 4, 64, 1024, 4096, 4, 2, (0, 1, 2)),
    # Qwen3-8B's config.json, with a draft of five layers.
    "qwen3-8b-dims": Dimensions(
        4096, 32, 8, 128, 12288, 151936, 36, 5, (1, 9, 17, 25, 33)
    ),
}

DEEPSEEK_V4 = "deepseek-v4-reduced"
PRESETS = (*QWEN3, DEEPSEEK_V4)
_DEEPSEEK_V4_DRAFT_READS = (0, 1, 3)
# What engines of a preset need besides the arguments of every sweep.
LLM_ARGUMENTS: dict[str, dict[str, Any]] = {
    DEEPSEEK_V4: {
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8",
        "block_size": 256,
        "kernel_config": {
            "enable_jit_warmup": False,
            "enable_flashinfer_autotune": False,
            "enable_cutedsl_warmup": False,
        },
    }
}
# Kernels are built when they are first called, by the loads before the first one that
# counts, instead of every shape at start.
ENVIRON: dict[str, dict[str, str]] = {DEEPSEEK_V4: {"VLLM_DEEP_GEMM_WARMUP": "skip"}}


def check_num_layers(preset: str, num_layers: int) -> None:
    """Check the number of target layers that a preset is asked for.

    Raises:
        ValueError: The draft reads a layer that the target would not have.
    """
    least = 1 + max(
        _DEEPSEEK_V4_DRAFT_READS
        if preset == DEEPSEEK_V4
        else QWEN3[preset].target_layer_ids
    )
    if 0 < num_layers < least:
        raise ValueError(f"{num_layers} layers: the draft of {preset} reads {least}")


def write_preset(
    root: Path, preset: str, block_size: int, num_layers: int = 0
) -> tuple[str, str | None]:
    """Write the config.json files of a preset.

    Args:
        root: Directory to write into.
        preset: One of ``PRESETS``.
        block_size: Positions that the draft was "trained" for.
        num_layers: Layers of the target; 0 for the preset's own.

    Returns:
        Directories of the target and the draft; None for a draft that is part of the
        target's checkpoint.

    Raises:
        ValueError: See ``check_num_layers``.
    """
    check_num_layers(preset, num_layers)
    root = root / f"{preset}-{block_size}"
    if preset == DEEPSEEK_V4:
        config = _deepseek_v4(block_size, num_layers or 4)
        return _write(root / "target", config), None
    dims = QWEN3[preset]
    target, draft = _qwen3(replace(dims, layers=num_layers or dims.layers), block_size)
    return _write(root / "target", target), _write(root / "draft", draft)


def _write(path: Path, config: dict[str, Any]) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return str(path)


def _qwen3(dims: Dimensions, block_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configs of a target and its draft."""
    shared: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": dims.hidden,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "intermediate_size": dims.intermediate,
        "vocab_size": dims.vocab,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    mask_token_id = dims.vocab - 1
    layer_ids = list(dims.target_layer_ids)
    draft = {
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": dims.draft_layers,
        "num_target_layers": dims.layers,
        "block_size": block_size,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "mask_token_id": mask_token_id,
        "target_layer_ids": layer_ids,
        "dflash_config": {
            "mask_token_id": mask_token_id,
            "target_layer_ids": layer_ids,
            "block_size": block_size,
        },
    }
    target = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": dims.layers,
    }
    return {**shared, **target}, {**shared, **draft}


def _deepseek_v4(block_size: int, num_layers: int) -> dict[str, Any]:
    """Return the config of a target whose checkpoint holds one draft layer.

    Layers by how they compress the context: sliding window alone, by 4 with the
    sparse indexer, then by 128 and by 4 in turn.
    """
    vocab = 32768
    by_4, by_128 = "compressed_sparse_attention", "heavily_compressed_attention"
    in_turn = [by_128, by_4] * num_layers
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "vocab_size": vocab,
        "hidden_size": 4096,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", by_4, *in_turn][:num_layers],
        "compress_rates": {by_4: 4, by_128: 128},
        "compress_rope_theta": 160000.0,
        "rope_theta": 10000.0,
        "max_position_embeddings": 65536,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "mlp_layer_types": ["moe"] * num_layers,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        # The draft. At least one of these layers also gives the draft its plan for
        # sliding-window attention.
        "num_nextn_predict_layers": 1,
        "n_mtp_layers": 1,
        "dspark_block_size": block_size,
        "dspark_target_layer_ids": list(_DEEPSEEK_V4_DRAFT_READS),
        "dspark_noise_token_id": vocab - 1,
        "dspark_markov_rank": 256,
        "enable_confidence_head": True,
        "expert_dtype": "fp8",
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    }
