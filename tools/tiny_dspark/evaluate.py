# SPDX-License-Identifier: Apache-2.0
"""Held-out figures by kind: accuracy, acceptance, confidence, repetition.

Greedy speculative decoding is replayed on the target's own greedy answer: a draft
token is accepted while it equals that answer, exactly as at temperature 0 in the
engine. Nothing past ``<eos>`` is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from tokenizers import Tokenizer

from tiny_dspark.corpus import EOS, Corpus, pack
from tiny_dspark.generation import generate
from tiny_dspark.grammar import KINDS, PROBLEM_KINDS
from tiny_dspark.model import Draft, Target, rotary_table

REPLAY_ROWS = 16


@dataclass(frozen=True)
class VerifyStep:
    """One replayed verify step.

    Attributes:
        confidences: one per draft token.
        accepted: accepted draft tokens.
        remaining: tokens that the answer still had after the anchor.
    """

    confidences: tuple[float, ...]
    accepted: int
    remaining: int

    @property
    def emitted(self) -> int:
        """Tokens that the step brings: accepted + 1, cut at the end of the answer."""
        return min(self.accepted + 1, self.remaining)


def answer_number(text: str) -> str:
    """Return what follows the last ``####``, or an empty text."""
    return text.rpartition("####")[2].strip() if "####" in text else ""


def walk(
    sequence: Sequence[int],
    start: int,
    drafts: Sequence[Sequence[int]],
    confidences: Sequence[Sequence[float]],
) -> list[VerifyStep]:
    """Replay verify steps over one finished sequence.

    Args:
        sequence: prompt and answer ids.
        start: position of the first answer token, which prefill samples.
        drafts: draft block for an anchor at ``start + i``, at index i.
        confidences: confidences of the same blocks.

    Returns:
        The steps in order.
    """
    steps, anchor, end = [], start, len(sequence) - 1
    while anchor < end:
        block, remaining = drafts[anchor - start], end - anchor
        accepted = 0
        while (
            accepted < min(len(block), remaining)
            and block[accepted] == sequence[anchor + 1 + accepted]
        ):
            accepted += 1
        chances = tuple(confidences[anchor - start])
        steps.append(VerifyStep(chances, accepted, remaining))
        anchor += accepted + 1
    return steps


@torch.no_grad()
def replay(target: Target, draft: Draft, corpus: Corpus) -> list[list[VerifyStep]]:
    """Return the verify steps of every sequence of ``corpus`` (on the device)."""
    rotary = rotary_table(target.shape, corpus.ids.device)
    result = []
    for first in range(0, len(corpus), REPLAY_ROWS):
        index = torch.arange(first, min(first + REPLAY_ROWS, len(corpus)))
        batch = corpus.rows(index.to(corpus.ids.device))
        _, taps = target(batch.ids, rotary)
        count = int((batch.lens - batch.prompt_lens).max()) - 1
        shift = torch.arange(max(count, 1), device=batch.ids.device)
        anchors = (batch.prompt_lens[:, None] + shift).clamp(max=batch.ids.shape[1] - 1)
        anchor_ids = batch.ids.gather(1, anchors)
        hidden = draft(target, taps, anchor_ids, anchors, rotary)
        tokens, chances = draft.propose(target, hidden, anchor_ids)
        for row in range(len(batch.lens)):
            sequence = batch.ids[row, : batch.lens[row]].tolist()
            start = int(batch.prompt_lens[row])
            blocks = (tokens[row].tolist(), chances[row].tolist())
            result.append(walk(sequence, start, *blocks))
    return result


def auroc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the area under the ROC curve, ties half; None with one class only."""
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return None
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    above = ranks[labels == 1].sum() - positives * (positives + 1) / 2
    return round(float(above / (positives * negatives)), 4)


def expected_calibration_error(
    scores: np.ndarray, labels: np.ndarray, bins: int = 10
) -> float:
    """Return the mean gap of score and rate over equal-width bins, by their size."""
    index = np.minimum((scores * bins).astype(int), bins - 1)
    gaps = np.bincount(index, scores - labels, minlength=bins)
    return round(float(np.abs(gaps).sum() / max(1, len(scores))), 4)


def acceptance_figures(requests: Sequence[Sequence[VerifyStep]]) -> dict[str, object]:
    """Summarise the verify steps of some requests.

    A confidence is judged where its draft was really tested: all before accepted.
    """
    steps = [step for request in requests for step in request]
    lengths = [
        sum(step.emitted for step in request) / len(request)
        for request in requests
        if request
    ]
    tested = [
        (chance, int(index < step.accepted))
        for step in steps
        for index, chance in enumerate(step.confidences)
        if index <= step.accepted and index < step.remaining
    ]
    scores, labels = np.array(tested).T
    block = len(steps[0].confidences)
    rates = []
    for index in range(block):
        open_steps = [step for step in steps if index < step.remaining]
        hits = sum(step.accepted > index for step in open_steps)
        rates.append(round(hits / max(1, len(open_steps)), 3))
    quantiles = np.quantile(lengths, (0, 0.1, 0.5, 0.9, 1))
    return {
        "requests": len(requests),
        "verify_steps": len(steps),
        "tokens_per_step": round(sum(s.emitted for s in steps) / len(steps), 3),
        "per_request_min_p10_median_p90_max": [round(float(q), 2) for q in quantiles],
        "accept_rate_by_position": rates,
        "confidence_auroc": auroc(scores, labels),
        "confidence_ece": expected_calibration_error(scores, labels),
        "mean_confidence": round(float(scores.mean()), 4),
        "mean_accepted": round(float(labels.mean()), 4),
    }


def text_figures(
    kind: str, texts: Sequence[str], references: Sequence[str]
) -> dict[str, object]:
    """Return accuracy for problems, else how varied the texts are."""
    if kind in PROBLEM_KINDS:
        right = [
            answer_number(text) == answer_number(reference)
            for text, reference in zip(texts, references, strict=True)
        ]
        return {"accuracy": round(float(np.mean(right)), 4)}
    split = "\n" if kind == "list" else ". "
    parts = [[p.lstrip("0123456789. ") for p in text.split(split)] for text in texts]
    pairs = [p for text in texts for p in pairwise(text.split())]
    return {
        "distinct_answers": round(len(set(texts)) / len(texts), 4),
        "answers_with_a_repeated_sentence": round(
            float(np.mean([len(set(part)) < len(part) for part in parts])), 4
        ),
        "distinct_word_pairs": len(set(pairs)),
        "words_per_answer": round(float(np.mean([len(t.split()) for t in texts])), 1),
    }


def evaluate(
    target: Target, draft: Draft, tokenizer: Tokenizer, heldout: Corpus
) -> dict[str, object]:
    """Answer the held-out prompts greedily in float32 and replay the drafting.

    Args:
        target: in eval mode.
        draft: in eval mode, same device.
        tokenizer: the target's.
        heldout: encoded documents with reference answers, on the CPU.

    Returns:
        Figures by kind and, under ``all``, over every request.
    """
    device = target.lm_head.weight.device
    rows = [row[:n] for row, n in zip(heldout.ids.tolist(), heldout.lens, strict=True)]
    starts = heldout.prompt_lens.tolist()
    prompts = [row[:start] for row, start in zip(rows, starts, strict=True)]
    rotary = rotary_table(target.shape, device)
    answers = generate(target, prompts, rotary, max_new=160)
    full = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    corpus = pack(full, starts, heldout.kinds.tolist())
    steps = replay(target, draft, corpus.to(str(device)))
    texts = tokenizer.decode_batch(answers)
    references = tokenizer.decode_batch(
        [row[start:] for row, start in zip(rows, starts, strict=True)]
    )
    report: dict[str, object] = {}
    for number, kind in enumerate(KINDS):
        chosen = (heldout.kinds == number).nonzero().flatten().tolist()
        report[kind] = {
            **text_figures(
                kind, [texts[i] for i in chosen], [references[i] for i in chosen]
            ),
            **acceptance_figures([steps[i] for i in chosen]),
            "unfinished": sum(answers[i][-1] != EOS for i in chosen),
            "examples": [texts[i] for i in chosen[:2]],
        }
    report["all"] = acceptance_figures(steps)
    accuracies = [report[kind]["accuracy"] for kind in PROBLEM_KINDS]
    report["all"]["problem_accuracy"] = round(float(np.mean(accuracies)), 4)
    return report
