# SPDX-License-Identifier: Apache-2.0
"""A tiny Gemma4 text target and its DSpark draft, with seeded weights.

Nothing is trained. The target's vocabulary projection favours one successor of every
token, and its layers add a context-dependent part that often overrules it. The
draft's Markov head knows the successors, its layers know nothing: a good part of its
drafts is accepted and a good part is rejected.

Invariant (pinned by tests/v1/worker/gpu/test_dspark_gemma4.py): the greedy token
leads by far more than rounding, so that the shape of a batch decides nothing.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TARGET_ARCHITECTURE = "Gemma4TextUnderPrefix"
VOCAB_SIZE = 32
MASK_TOKEN = VOCAB_SIZE - 1
BLOCK_SIZE = 5
HIDDEN_SIZE = 32
INTERMEDIATE_SIZE = 64
NUM_HEADS = 2
# As in Gemma4: full attention has another head size than sliding attention.
HEAD_DIM, GLOBAL_HEAD_DIM = 32, 64
SLIDING_WINDOW = 16
PER_LAYER_INPUT_SIZE = 8
TARGET_LAYERS = ["sliding_attention", "full_attention"] * 2
DRAFT_LAYERS = ["full_attention"] * 2
# What each part of a target layer adds, in units of the token's embedding.
LAYER_WEIGHT = 0.6
# How strongly the draft's layers disturb what its Markov head knows.
DRAFT_BASE_SCALE = 0.4
LOGIT_SCALE = 2.0
# Of those tried, one whose greedy outputs differ, do not repeat soon and lead widely.
SEED = 3

_COMMON: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "global_head_dim": GLOBAL_HEAD_DIM,
    "sliding_window": SLIDING_WINDOW,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "attention_k_eq_v": True,
    "tie_word_embeddings": False,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
Weights = dict[str, torch.Tensor]


def write_gemma4_pair(path: Path) -> tuple[str, str]:
    """Write both checkpoints; return the directories of target and draft."""
    generator = torch.Generator().manual_seed(SEED)
    embedding = _random(generator, VOCAB_SIZE, HIDDEN_SIZE)
    successor = torch.randperm(VOCAB_SIZE, generator=generator)
    head = torch.zeros_like(embedding)
    head[successor] = embedding * LOGIT_SCALE
    target = _target_weights(generator, embedding, head)
    draft = _draft_weights(generator, embedding, head)
    return (
        _write(path / "target", _target_config(), target),
        _write(path / "draft", _draft_config(), draft),
    )


def _write(path: Path, config: dict[str, Any], weights: Weights) -> str:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(_COMMON | config))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def _target_config() -> dict[str, Any]:
    return {
        "architectures": [TARGET_ARCHITECTURE],
        "num_hidden_layers": len(TARGET_LAYERS),
        "layer_types": TARGET_LAYERS,
        "hidden_size_per_layer_input": PER_LAYER_INPUT_SIZE,
    }


def _draft_config() -> dict[str, Any]:
    layer_ids = list(range(len(TARGET_LAYERS)))
    return {
        "architectures": ["Gemma4DSparkModel"],
        "num_hidden_layers": len(DRAFT_LAYERS),
        "layer_types": DRAFT_LAYERS,
        "hidden_size_per_layer_input": 0,
        "block_size": BLOCK_SIZE,
        "num_target_layers": len(TARGET_LAYERS),
        "target_layer_ids": layer_ids,
        "mask_token_id": MASK_TOKEN,
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": layer_ids},
        "markov_rank": HIDDEN_SIZE,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Return weights that keep the size of what they are multiplied with."""
    return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5


def _norm(size: int, weight: float = 1.0) -> torch.Tensor:
    return torch.full((size,), weight)


def _layer(generator: torch.Generator, layer_type: str, weight: float) -> Weights:
    """Return a decoder layer whose attention and MLP add ``weight`` each."""
    is_full = layer_type == "full_attention"
    head_dim = GLOBAL_HEAD_DIM if is_full else HEAD_DIM
    hidden, inner = HIDDEN_SIZE, INTERMEDIATE_SIZE
    weights = {
        "self_attn.q_proj.weight": _random(generator, NUM_HEADS * head_dim, hidden),
        "self_attn.k_proj.weight": _random(generator, head_dim, hidden),
        "self_attn.o_proj.weight": _random(generator, hidden, NUM_HEADS * head_dim),
        # Scores are not divided by the root of the head size.
        "self_attn.q_norm.weight": _norm(head_dim, 2.0 / head_dim**0.5),
        "self_attn.k_norm.weight": _norm(head_dim),
        "mlp.gate_proj.weight": _random(generator, inner, hidden),
        "mlp.up_proj.weight": _random(generator, inner, hidden),
        "mlp.down_proj.weight": _random(generator, hidden, inner),
        "input_layernorm.weight": _norm(hidden),
        "post_attention_layernorm.weight": _norm(hidden, weight),
        "pre_feedforward_layernorm.weight": _norm(hidden),
        "post_feedforward_layernorm.weight": _norm(hidden, weight),
        "layer_scalar": _norm(1),
    }
    if not is_full:  # only full attention takes its values from k_proj
        v_proj = _random(generator, head_dim, hidden)
        weights["self_attn.v_proj.weight"] = v_proj
    return weights


def _per_layer_input(generator: torch.Generator, weight: float) -> Weights:
    size, hidden = PER_LAYER_INPUT_SIZE, HIDDEN_SIZE
    return {
        "per_layer_input_gate.weight": _random(generator, size, hidden),
        "per_layer_projection.weight": _random(generator, hidden, size),
        "post_per_layer_input_norm.weight": _norm(hidden, weight),
    }


def _target_weights(
    generator: torch.Generator, embedding: torch.Tensor, head: torch.Tensor
) -> Weights:
    size = PER_LAYER_INPUT_SIZE
    width = len(TARGET_LAYERS) * size
    weights = {
        "model.embed_tokens.weight": embedding.clone(),
        "model.embed_tokens_per_layer.weight": _random(generator, VOCAB_SIZE, width),
        "model.per_layer_model_projection.weight": _random(
            generator, width, HIDDEN_SIZE
        ),
        "model.per_layer_projection_norm.weight": _norm(size),
        "model.norm.weight": _norm(HIDDEN_SIZE),
        "lm_head.weight": head.clone(),
    }
    for i, layer_type in enumerate(TARGET_LAYERS):
        layer = _layer(generator, layer_type, LAYER_WEIGHT)
        layer |= _per_layer_input(generator, LAYER_WEIGHT)
        weights |= {f"model.layers.{i}.{name}": w for name, w in layer.items()}
    return weights


def _draft_weights(
    generator: torch.Generator, embedding: torch.Tensor, head: torch.Tensor
) -> Weights:
    hidden = HIDDEN_SIZE
    base = _random(generator, VOCAB_SIZE, hidden) * LOGIT_SCALE * DRAFT_BASE_SCALE
    weights = {
        "embed_tokens.weight": embedding.clone(),
        "fc.weight": _random(generator, hidden, hidden * len(TARGET_LAYERS)),
        "hidden_norm.weight": _norm(hidden),
        "norm.weight": _norm(hidden),
        "lm_head.weight": base,
        "markov_head.markov_w1.weight": embedding * hidden**0.5,
        "markov_head.markov_w2.weight": head.clone(),
        "confidence_head.proj.weight": 2.0 * _random(generator, 1, 2 * hidden),
        "confidence_head.proj.bias": torch.ones(1),
    }
    for i, layer_type in enumerate(DRAFT_LAYERS):
        layer = _layer(generator, layer_type, 1.0)
        weights |= {f"layers.{i}.{name}": w for name, w in layer.items()}
    return weights
