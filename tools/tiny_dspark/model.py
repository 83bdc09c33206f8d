# SPDX-License-Identifier: Apache-2.0
"""The Qwen3 target and the DSpark draft in plain torch, as vLLM computes them.

Module and parameter names are those of the checkpoint, so ``state_dict`` is the file.

Invariants (pinned by tests):
    * An anchor at position a is a token that was sampled and not yet forwarded: its
      block sees target features of positions 0..a-1 only.
    * Block offset i predicts the token at a+i+1 from its hidden state and the token
      at a+i; offsets of one block see each other in both directions.
    * ``k_norm`` of the draft stays 1: vLLM's CPU kernel applies the first draft
      layer's weight to every layer, so any other value would differ from CUDA.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tiny_dspark.corpus import MASK


@dataclass(frozen=True)
class Shape:
    """Sizes of both models; the defaults are the bundled checkpoint's."""

    vocab_size: int
    hidden_size: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 640
    num_layers: int = 4
    num_draft_layers: int = 2
    markov_rank: int = 64
    block_size: int = 7
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    max_positions: int = 1024

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose output the draft reads: all of them."""
        return tuple(range(self.num_layers))


Rotary = tuple[torch.Tensor, torch.Tensor]


def rotary_table(shape: Shape, device: str | torch.device) -> Rotary:
    """Return cos and sin, each Shape [max_positions, head_dim], float32."""
    steps = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
    positions = torch.arange(shape.max_positions, device=device).float()
    angles = positions[:, None] * shape.rope_theta**-steps
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * rotary[0] + torch.cat([-second, first], -1) * rotary[1]


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.5 / math.sqrt(inputs))
    return layer


def _embedding(count: int, width: int) -> nn.Embedding:
    layer = nn.Embedding(count, width)
    nn.init.normal_(layer.weight, std=0.5)
    return layer


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, whatever autocast says."""

    def __init__(self, width: int, eps: float) -> None:
        """Start with weight 1. ``width`` is the size of the last dimension."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension; float32 out."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with query and key norms."""

    def __init__(self, shape: Shape) -> None:
        """Build the projections for ``shape``."""
        super().__init__()
        self.head_dim = shape.head_dim
        self.groups = shape.num_heads // shape.num_kv_heads
        self.q_proj = _linear(shape.hidden_size, shape.num_heads * shape.head_dim)
        self.k_proj = _linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim)
        self.v_proj = _linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim)
        self.o_proj = _linear(shape.num_heads * shape.head_dim, shape.hidden_size)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_values(self, x: torch.Tensor, rotary: Rotary) -> Rotary:
        """Return keys and values. x: Shape [B, T, H] -> [B, kv_heads, T, head_dim]."""
        keys = _rotate(self.k_norm(self._heads(self.k_proj(x))), rotary)
        values = self._heads(self.v_proj(x))
        return keys.to(values.dtype), values

    def forward(
        self,
        x: torch.Tensor,
        rotary: Rotary,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from ``x`` [B, T, H]; mask [B, 1, T, S] bool, or None for causal."""
        query = _rotate(self.q_norm(self._heads(self.q_proj(x))), rotary)
        attend = _attend_cuda if x.is_cuda else _attend_cpu
        out = attend(query.to(values.dtype), keys, values, self.groups, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _attend_cuda(query, keys, values, groups, mask):
    keys, values = (t.repeat_interleave(groups, 1) for t in (keys, values))
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=mask is None
    )


def _attend_cpu(query, keys, values, groups, mask):
    # Plain products: the backward of the fused CPU kernel took 43 % of a step.
    length = query.shape[2]
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool).tril()
    query = query.unflatten(1, (-1, groups)).flatten(2, 3) * query.shape[-1] ** -0.5
    logits = query @ keys.transpose(2, 3)
    logits = logits.masked_fill(~torch.cat([mask] * groups, -2), float("-inf"))
    out = logits.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
    return out.unflatten(2, (groups, length)).flatten(1, 2)


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        """Build the projections for ``shape``."""
        super().__init__()
        self.gate_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = _linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape [..., H] -> [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer; the caller provides keys and values."""

    def __init__(self, shape: Shape) -> None:
        """Build attention, feed-forward and both norms."""
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Add the attention output and the feed-forward output to ``x``."""
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """Qwen3ForCausalLM, untied."""

    def __init__(self, shape: Shape) -> None:
        """Build the model with random weights of the default torch generator."""
        super().__init__()
        self.shape = shape
        self.model = nn.Module()
        self.model.embed_tokens = _embedding(shape.vocab_size, shape.hidden_size)
        self.model.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.model.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = _linear(shape.hidden_size, shape.vocab_size)

    def forward(
        self, ids: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the whole sequence.

        Args:
            ids: Shape [B, T], int64.
            rotary: table of ``rotary_table`` on the same device.

        Returns:
            Normed hidden states, Shape [B, T, H], and the residual stream after each
            layer (before the final norm), Shape [B, T, layers * H].
        """
        rotary = (rotary[0][: ids.shape[1]], rotary[1][: ids.shape[1]])
        hidden, taps = self.model.embed_tokens(ids), []
        for layer in self.model.layers:
            normed = layer.input_layernorm(hidden)
            keys, values = layer.self_attn.keys_values(normed, rotary)
            attended = layer.self_attn(normed, rotary, keys, values, mask=None)
            hidden = layer.finish(hidden, attended)
            taps.append(hidden)
        return self.model.norm(hidden), torch.cat(taps, -1)


class Draft(nn.Module):
    """Qwen3DSparkModel: embeddings and output head are the target's."""

    def __init__(self, shape: Shape) -> None:
        """Build the draft; ``k_norm`` is frozen at 1 (module docstring)."""
        super().__init__()
        self.shape = shape
        width, eps = shape.hidden_size, shape.norm_eps
        self.fc = _linear(width * len(shape.target_layer_ids), width)
        self.hidden_norm, self.norm = RMSNorm(width, eps), RMSNorm(width, eps)
        layers = (Layer(shape) for _ in range(shape.num_draft_layers))
        self.layers = nn.ModuleList(layers)
        for layer in self.layers:
            layer.self_attn.k_norm.weight.requires_grad_(False)
        self.markov_head = nn.Module()
        self.markov_head.markov_w1 = _embedding(shape.vocab_size, shape.markov_rank)
        self.markov_head.markov_w2 = _linear(shape.markov_rank, shape.vocab_size)
        self.confidence_head = nn.Module()
        self.confidence_head.proj = nn.Linear(width + shape.markov_rank, 1)
        nn.init.zeros_(self.confidence_head.proj.weight)
        nn.init.zeros_(self.confidence_head.proj.bias)

    def forward(
        self,
        target: Target,
        taps: torch.Tensor,
        anchor_ids: torch.Tensor,
        anchors: torch.Tensor,
        rotary: Rotary,
    ) -> torch.Tensor:
        """Run many blocks of each sequence at once.

        Args:
            target: owner of the embeddings.
            taps: target residual streams, Shape [B, T, layers * H].
            anchor_ids: token at each anchor, Shape [B, A], int64.
            anchors: position of each anchor, Shape [B, A], int64.
            rotary: table of ``rotary_table`` on the same device.

        Returns:
            Normed hidden states, Shape [B, A, block, H].
        """
        width, device = self.shape.block_size, taps.device
        count, length = anchors.shape[1], taps.shape[1]
        context = self.hidden_norm(self.fc(taps))
        ids = torch.full((*anchors.shape, width), MASK, device=device)
        ids[:, :, 0] = anchor_ids
        offsets = torch.arange(width, device=device)
        positions = (anchors[:, :, None] + offsets).flatten(1)
        query_rotary = (rotary[0][positions][:, None], rotary[1][positions][:, None])
        context_rotary = (rotary[0][:length], rotary[1][:length])
        block = torch.arange(count, device=device).repeat_interleave(width)
        bound = anchors.repeat_interleave(width, 1)[:, :, None]
        sees_context = torch.arange(length, device=device) < bound
        sees_block = (block[:, None] == block).expand(len(ids), -1, -1)
        mask = torch.cat([sees_context, sees_block], -1)[:, None]
        hidden = target.model.embed_tokens(ids.flatten(1))
        for layer in self.layers:
            normed = layer.input_layernorm(hidden)
            pairs = zip(
                layer.self_attn.keys_values(context, context_rotary),
                layer.self_attn.keys_values(normed, query_rotary),
                strict=True,
            )
            keys, values = (torch.cat(pair, 2) for pair in pairs)
            attended = layer.self_attn(normed, query_rotary, keys, values, mask=mask)
            hidden = layer.finish(hidden, attended)
        return self.norm(hidden).unflatten(1, (count, width))

    def heads(
        self, target: Target, hidden: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [..., V] and confidence logits [...], float32.

        Args:
            target: owner of the output head.
            hidden: Shape [..., H].
            previous: token before the predicted one, Shape [...], int64.
        """
        state = self.markov_head.markov_w1(previous)
        logits = target.lm_head(hidden).float()
        logits = logits + self.markov_head.markov_w2(state).float()
        confidence = self.confidence_head.proj(torch.cat([hidden, state], -1))
        return logits, confidence.float().squeeze(-1)

    @torch.no_grad()
    def propose(
        self, target: Target, hidden: torch.Tensor, anchor_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft greedily, left to right.

        Args:
            target: owner of the output head.
            hidden: result of ``forward``, Shape [B, A, block, H].
            anchor_ids: Shape [B, A], int64.

        Returns:
            Draft tokens (int64) and confidences (float32), each [B, A, block].
        """
        tokens, confidences, previous = [], [], anchor_ids
        for step in range(hidden.shape[2]):
            logits, confidence = self.heads(target, hidden[:, :, step], previous)
            previous = logits.argmax(-1)
            tokens.append(previous)
            confidences.append(confidence.sigmoid())
        return torch.stack(tokens, -1), torch.stack(confidences, -1)
