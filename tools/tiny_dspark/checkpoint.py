# SPDX-License-Identifier: Apache-2.0
"""Write and read the checkpoint folders that vLLM loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from safetensors.torch import load_file, save_file
from torch import nn

from tiny_dspark.corpus import BOS, EOS, MASK, PAD
from tiny_dspark.model import Draft, Shape, Target

Model = TypeVar("Model", bound=nn.Module)


def _base_config(shape: Shape) -> dict[str, object]:
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "attention_bias": False,
    }


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON, creating the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def _write(directory: Path, config: dict[str, object], model: nn.Module) -> None:
    write_json(directory / "config.json", config)
    tensors = {
        name: tensor.detach().float().cpu().contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def save_target(target: Target, directory: Path) -> None:
    """Write the target's weights and configs (the tokenizer is written apart)."""
    config = _base_config(target.shape) | {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": target.shape.num_layers,
    }
    _write(directory, config, target)
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    write_json(directory / "generation_config.json", ids)


def save_draft(draft: Draft, directory: Path) -> None:
    """Write the draft's weights and config."""
    shape, layer_ids = draft.shape, list(draft.shape.target_layer_ids)
    config = _base_config(shape) | {
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": shape.num_draft_layers,
        "block_size": shape.block_size,
        "target_layer_ids": layer_ids,
        "mask_token_id": MASK,
        "num_target_layers": shape.num_layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": layer_ids},
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    _write(directory, config, draft)


def load(model: Model, directory: Path, device: str) -> Model:
    """Fill ``model`` from ``directory`` and return it on ``device`` in eval mode."""
    model.load_state_dict(load_file(directory / "model.safetensors"))
    return model.to(device).eval()
