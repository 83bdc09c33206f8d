# SPDX-License-Identifier: Apache-2.0
"""Batched generation with a key-value cache: thousands of prompts at once.

Invariant (pinned by a test): greedy text equals that of repeated full forwards.
"""

from __future__ import annotations

import torch

from tiny_dspark.corpus import EOS, PAD
from tiny_dspark.model import Rotary, Target


@torch.no_grad()
def generate(
    target: Target,
    prompts: list[list[int]],
    rotary: Rotary,
    *,
    max_new: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Continue many prompts at once with a key-value cache.

    Args:
        target: the model, in eval mode.
        prompts: id lists, not empty.
        rotary: table of ``rotary_table`` on the model's device.
        max_new: most new tokens per prompt.
        temperature: 0 is greedy.
        generator: randomness for ``temperature > 0``, on the model's device.

    Returns:
        New ids of each prompt, up to and with ``<eos>``.
    """
    device, shape, count = target.lm_head.weight.device, target.shape, len(prompts)
    lens = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = int(lens.max())
    ids = torch.tensor([p + [PAD] * (longest - len(p)) for p in prompts], device=device)
    size = (count, shape.num_kv_heads, longest + max_new, shape.head_dim)
    caches = [
        (torch.zeros(size, device=device), torch.zeros(size, device=device))
        for _ in range(shape.num_layers)
    ]
    positions = torch.arange(longest, device=device).expand(count, -1)
    rows = torch.arange(count, device=device)
    slots = torch.arange(size[2], device=device)
    done = torch.zeros(count, dtype=torch.bool, device=device)
    last, new = lens - 1, []
    for step in range(max_new):
        here = (rotary[0][positions][:, None], rotary[1][positions][:, None])
        # Slots of padding beyond a row's end are masked until they are overwritten.
        limit = longest + step
        mask = (slots[:limit] <= positions[:, :, None])[:, None]
        hidden = target.model.embed_tokens(ids)
        for layer, (keys, values) in zip(target.model.layers, caches, strict=True):
            normed = layer.input_layernorm(hidden)
            k, v = layer.self_attn.keys_values(normed, here)
            keys[rows[:, None], :, positions] = k.transpose(1, 2)
            values[rows[:, None], :, positions] = v.transpose(1, 2)
            attended = layer.self_attn(
                normed, here, keys[:, :, :limit], values[:, :, :limit], mask=mask
            )
            hidden = layer.finish(hidden, attended)
        final = hidden[rows, last] if step == 0 else hidden[:, 0]
        logits = target.lm_head(target.model.norm(final)).float()
        if temperature == 0:
            ids = logits.argmax(-1)
        else:
            probs = (logits / temperature).softmax(-1)
            ids = torch.multinomial(probs, 1, generator=generator)[:, 0]
        ids = ids.masked_fill(done, PAD)
        new.append(ids)
        done |= ids == EOS
        ids, positions = ids[:, None], (lens + step)[:, None]
        # Asking the device costs a sync; every eighth step is enough.
        if step % 8 == 7 and bool(done.all()):
            break
    table = torch.stack(new, 1).tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in table]
