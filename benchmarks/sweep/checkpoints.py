# SPDX-License-Identifier: Apache-2.0
"""Config-only Qwen3 targets with DSpark drafts, for dummy weights.

They cost what a real checkpoint of those dimensions costs; what they generate is
meaningless, so acceptance comes from vLLM's synthetic rejection sampler.
"""

import json
from dataclasses import dataclass
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


PRESETS = {
    "tiny-dims": Dimensions(512, 8, 4, 64, 1024, 4096, 4, 2, (0, 1, 2)),
    # Qwen3-8B's config.json, with a draft of five layers.
    "qwen3-8b-dims": Dimensions(
        4096, 32, 8, 128, 12288, 151936, 36, 5, (1, 9, 17, 25, 33)
    ),
}


def write_preset(root: Path, preset: str, block_size: int) -> tuple[str, str]:
    """Write the two config.json files of a preset.

    Args:
        root: Directory to write into.
        preset: Key of ``PRESETS``.
        block_size: Positions that the draft was "trained" for.

    Returns:
        Directories of the target and the draft.
    """
    dims = PRESETS[preset]
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
    paths = []
    for name, own in (("target", target), ("draft", draft)):
        path = root / f"{preset}-{block_size}" / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps({**shared, **own}, indent=1))
        paths.append(str(path))
    return paths[0], paths[1]
