# SPDX-License-Identifier: Apache-2.0
"""Training loops: the target on documents, the draft on what the target writes.

Invariants (pinned by tests): with no minute limit, equal settings and seed give
equal weights; a minute limit still ends with the learning rate decayed.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tiny_dspark.corpus import Batch, Corpus, batches, pack
from tiny_dspark.generation import generate
from tiny_dspark.model import Draft, Shape, Target, rotary_table

logger = logging.getLogger(__name__)

PROMPT_WEIGHT = 0.1
"""Loss weight of prompt tokens: enough to shape the features, the answer counts."""
POSITION_DECAY = 4.0
"""Loss weight exp(-i / 4) of block offset i: later drafts matter only if all before
were accepted (DSpark, arXiv 2607.05147, weights early offsets likewise)."""
CE_WEIGHT, L1_WEIGHT = 0.1, 0.9
GENERATE_ROWS = 4096


@dataclass(frozen=True)
class Settings:
    """Settings of one training stage.

    Attributes:
        steps: most optimiser steps.
        minutes: wall-clock limit, 0 = none. The schedule follows whichever of steps
            and minutes is nearer to its end.
        learning_rate: peak; linear warm-up, then cosine to 2 % of it.
        tokens: padded tokens in a batch.
        anchors: draft blocks per sequence (draft stage only).
        seed: any text.
        device: torch device name.
        bf16: autocast to bfloat16; weights stay float32.
        log_every: steps between log lines.
    """

    steps: int
    minutes: float
    learning_rate: float
    tokens: int
    seed: str
    device: str
    anchors: int = 16
    bf16: bool = True
    log_every: int = 250


class Stage:
    """Clock, schedule and optimiser of one stage; per step: ticks, then apply."""

    WARMUP_STEPS = 100

    def __init__(self, model: nn.Module, settings: Settings, name: str) -> None:
        """Start the clock.

        Args:
            model: its trainable parameters are optimised.
            settings: limits and rates.
            name: for log lines.
        """
        self.settings, self.name, self.model = settings, name, model
        params = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
        self.step = 0
        self.curve: list[dict[str, float]] = []
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the start."""
        return time.monotonic() - self._start

    def progress(self) -> float:
        """Return the share of the stage that is over, 0 to 1."""
        share = self.step / self.settings.steps
        if self.settings.minutes:
            share = max(share, self.seconds / (60 * self.settings.minutes))
        return min(1.0, share)

    def ticks(self) -> Iterator[int]:
        """Yield step numbers with the learning rate set, until steps or time end."""
        while (progress := self.progress()) < 1.0:
            rate = 0.51 + 0.49 * math.cos(math.pi * progress)
            rate *= min(1.0, (self.step + 1) / self.WARMUP_STEPS)
            for group in self.optimizer.param_groups:
                group["lr"] = rate * self.settings.learning_rate
            yield self.step
            self.step += 1

    def apply(self, loss: torch.Tensor) -> None:
        """Backward, clip to norm 1, optimiser step."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def log(self, **figures: torch.Tensor | float) -> None:
        """Record and print figures every ``log_every`` steps (a device sync each)."""
        if self.step % self.settings.log_every:
            return
        row = {name: round(float(value), 4) for name, value in figures.items()}
        self.curve.append({"step": self.step, **row})
        text = " ".join(f"{name} {value}" for name, value in row.items())
        logger.info(
            "%s step %d %s | %.0f %% %.0f s",
            *(self.name, self.step, text, 100 * self.progress(), self.seconds),
        )

    def summary(self) -> dict[str, object]:
        """Return what ``info.json`` keeps of the stage."""
        return {
            "steps": self.step,
            "seconds": round(self.seconds, 1),
            "batch_tokens": self.settings.tokens,
            "learning_rate": self.settings.learning_rate,
            "curve": self.curve[:: max(1, len(self.curve) // 12)] + self.curve[-1:],
        }


def seed_number(stage: str, seed: str) -> int:
    """Return the integer seed of one stage."""
    return zlib.crc32(f"{stage}/{seed}".encode())


def _autocast(settings: Settings) -> torch.autocast:
    kind = torch.device(settings.device).type
    return torch.autocast(kind, torch.bfloat16, enabled=settings.bf16)


def train_target(
    shape: Shape, corpus: Corpus, settings: Settings
) -> tuple[Target, dict[str, object]]:
    """Train the target on next-token loss, answers weighted ten times the prompt."""
    torch.manual_seed(seed_number("target", settings.seed))
    target = Target(shape).to(settings.device)
    rotary = rotary_table(shape, settings.device)
    stage = Stage(target, settings, "target")
    stream = batches(corpus, settings.tokens, f"target/{settings.seed}")
    for _ in stage.ticks():
        batch = next(stream)
        position = torch.arange(1, batch.ids.shape[1], device=settings.device)
        answer = (position >= batch.prompt_lens[:, None]).float()
        weight = PROMPT_WEIGHT + (1 - PROMPT_WEIGHT) * answer
        weight = weight * (position < batch.lens[:, None])
        with _autocast(settings):
            hidden, _ = target(batch.ids[:, :-1], rotary)
            logits = target.lm_head(hidden).float()
        labels = batch.ids[:, 1:].flatten()
        losses = F.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
        losses = losses.view_as(weight)
        stage.apply((losses * weight).sum() / weight.sum())
        answer = answer * (position < batch.lens[:, None])
        stage.log(answer_loss=(losses.detach() * answer).sum() / answer.sum())
    return target.eval(), stage.summary()


def write_answers(target: Target, prompts: Corpus, settings: Settings) -> Corpus:
    """Let the target answer every prompt: half greedily, half at temperature 1.

    Args:
        target: a trained target on ``settings.device``.
        prompts: documents whose answers are replaced.
        settings: device and seed.

    Returns:
        A corpus on the CPU with the prompts and the target's own answers.
    """
    rotary = rotary_table(target.shape, settings.device)
    generator = torch.Generator(settings.device)
    generator.manual_seed(seed_number("write", settings.seed))
    order = torch.argsort(prompts.prompt_lens, stable=True).tolist()
    ids, lens = prompts.ids.tolist(), prompts.prompt_lens.tolist()
    rows: list[list[int]] = []
    for temperature, half in ((0.0, order[::2]), (1.0, order[1::2])):
        for start in range(0, len(half), GENERATE_ROWS):
            heads = [ids[i][: lens[i]] for i in half[start : start + GENERATE_ROWS]]
            answers = generate(
                target,
                heads,
                rotary,
                max_new=150,
                temperature=temperature,
                generator=generator,
            )
            rows += [head + tail for head, tail in zip(heads, answers, strict=True)]
        logger.info("written %d of %d answers", len(rows), len(order))
    order = order[::2] + order[1::2]
    kinds = prompts.kinds.tolist()
    return pack(rows, [lens[i] for i in order], [kinds[i] for i in order])


def draw_anchors(
    batch: Batch, count: int, block_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw anchors among the answer tokens that have a successor.

    Args:
        batch: sequences.
        count: anchors per sequence.
        block_size: draft tokens per anchor.
        generator: CPU randomness, so that every device draws the same anchors.

    Returns:
        Anchors [B, count]; position of the token before each label
        [B, count, block]; whether that label exists (bool, same shape).
    """
    share = torch.rand(len(batch.lens), count, generator=generator)
    span = (batch.lens - 1 - batch.prompt_lens).clamp(min=1)[:, None]
    anchors = batch.prompt_lens[:, None] + (share.to(span.device) * span).long()
    anchors = torch.minimum(anchors, batch.lens[:, None] - 2)
    before = anchors[:, :, None] + torch.arange(block_size, device=anchors.device)
    valid = before + 1 < batch.lens[:, None, None]
    return anchors, before.clamp(max=batch.ids.shape[1] - 2), valid


def draft_losses(
    logits: torch.Tensor,
    confidence: torch.Tensor,
    target_logits: torch.Tensor,
    labels: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return the three unweighted losses of the draft.

    The confidence label is 1 - TV(draft, target) = the chance that a *sampled* draft
    is accepted; at temperature 0 it is too high where the text is high in entropy.

    Args:
        logits: draft, Shape [..., V], float32.
        confidence: draft confidence logits, Shape [...], float32.
        target_logits: Shape [..., V], float32.
        labels: next tokens, Shape [...], int64.

    Returns:
        ``ce``, ``l1`` and ``confidence``, each Shape [...].
    """
    log_probs = logits.log_softmax(-1)
    ce = -log_probs.gather(-1, labels[..., None]).squeeze(-1)
    l1 = (log_probs.exp() - target_logits.softmax(-1)).abs().sum(-1)
    accepted = (1 - 0.5 * l1).detach().clamp(0, 1)
    bce = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    return {"ce": ce, "l1": l1, "confidence": bce}


def train_draft(
    target: Target, corpus: Corpus, settings: Settings
) -> tuple[Draft, dict[str, object]]:
    """Train the draft on target-written text.

    Args:
        target: frozen here.
        corpus: result of ``write_answers``, on ``settings.device``.
        settings: limits and rates.

    Returns:
        The draft in eval mode and the stage summary.
    """
    torch.manual_seed(seed_number("draft", settings.seed))
    target.requires_grad_(False)
    shape = target.shape
    draft = Draft(shape).to(settings.device)
    rotary = rotary_table(shape, settings.device)
    offsets = torch.arange(shape.block_size, device=settings.device)
    decay = torch.exp(-offsets / POSITION_DECAY)
    stage = Stage(draft, settings, "draft")
    stream = batches(corpus, settings.tokens, f"draft/{settings.seed}")
    generator = torch.Generator()
    generator.manual_seed(seed_number("anchors", settings.seed))
    for _ in stage.ticks():
        batch = next(stream)
        anchors, before, valid = draw_anchors(
            batch, settings.anchors, shape.block_size, generator
        )
        rows = torch.arange(len(batch.ids), device=settings.device)[:, None, None]
        with _autocast(settings):
            with torch.no_grad():
                final, taps = target(batch.ids, rotary)
                target_logits = target.lm_head(final[rows, before]).float()
            anchor_ids = batch.ids.gather(1, anchors)
            hidden = draft(target, taps, anchor_ids, anchors, rotary)
            outputs = draft.heads(target, hidden, batch.ids[rows, before])
        labels = batch.ids[rows, before + 1]
        losses = draft_losses(*outputs, target_logits, labels)
        weight = decay * valid
        means = {k: (v * weight).sum() / weight.sum() for k, v in losses.items()}
        stage.apply(
            CE_WEIGHT * means["ce"] + L1_WEIGHT * means["l1"] + means["confidence"]
        )
        stage.log(**{name: mean.detach() for name, mean in means.items()})
    return draft.eval(), stage.summary()
