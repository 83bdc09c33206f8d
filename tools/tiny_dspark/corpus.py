# SPDX-License-Identifier: Apache-2.0
"""Documents -> byte-level BPE tokenizer -> padded id matrix -> length-sorted batches.

Invariants (pinned by tests): digits are single tokens; an id row is
``<bos> prompt answer <eos>``; an epoch visits every document once.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tiny_dspark.grammar import KINDS, Document

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<mask>")
PAD, BOS, EOS, MASK = range(4)
MAX_LENGTH = 256
LENGTH_BUCKET = 16
SORT_WINDOW = 16384
"""Documents sorted by length together: large enough to pad little, small enough that
an epoch keeps a random order of batches."""


@dataclass(frozen=True)
class Corpus:
    """Encoded documents, all on one device.

    Attributes:
        ids: Shape [N, L], int16, padded on the right with ``<pad>``.
        prompt_lens: Shape [N], int64, tokens before the answer, ``<bos>`` included.
        lens: Shape [N], int64, tokens in all, ``<eos>`` included.
        kinds: Shape [N], int64, index into ``grammar.KINDS``.
    """

    ids: torch.Tensor
    prompt_lens: torch.Tensor
    lens: torch.Tensor
    kinds: torch.Tensor

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.lens)

    def to(self, device: str) -> Corpus:
        """Return the corpus on ``device``."""
        parts = (self.ids, self.prompt_lens, self.lens, self.kinds)
        return Corpus(*(part.to(device) for part in parts))

    def rows(self, index: torch.Tensor) -> Batch:
        """Gather documents; the batch is cut to the longest one, rounded up."""
        lens = self.lens[index]
        width = -(-int(lens.max()) // LENGTH_BUCKET) * LENGTH_BUCKET
        width = min(width, self.ids.shape[1])
        ids = self.ids[index, :width].long()
        return Batch(ids, self.prompt_lens[index], lens)


@dataclass(frozen=True)
class Batch:
    """One training batch. Shapes [B, T], [B], [B]; int64; device of the corpus."""

    ids: torch.Tensor
    prompt_lens: torch.Tensor
    lens: torch.Tensor


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer that adds ``<bos>`` and splits digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = (f"{document.prompt} {document.answer}" for document in documents)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the two files that ``AutoTokenizer`` needs."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, indent=1) + "\n"
    (directory / "tokenizer_config.json").write_text(text)


def pack(
    rows: Sequence[Sequence[int]], prompt_lens: Sequence[int], kinds: Sequence[int]
) -> Corpus:
    """Pad id rows to one matrix, dropping rows longer than ``MAX_LENGTH``."""
    keep = [index for index, row in enumerate(rows) if len(row) <= MAX_LENGTH]
    lens = np.array([len(rows[index]) for index in keep])
    flat = np.concatenate([np.asarray(rows[index], np.int16) for index in keep])
    ids = np.full((len(keep), int(lens.max())), PAD, np.int16)
    ids[np.arange(ids.shape[1]) < lens[:, None]] = flat
    take = np.array(keep)
    return Corpus(
        torch.from_numpy(ids),
        torch.from_numpy(np.asarray(prompt_lens)[take]),
        torch.from_numpy(lens),
        torch.from_numpy(np.asarray(kinds)[take]),
    )


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> Corpus:
    """Encode documents as ``<bos> prompt answer <eos>``."""
    prompts = tokenizer.encode_batch([document.prompt for document in documents])
    answers = tokenizer.encode_batch(
        [f" {document.answer}" for document in documents], add_special_tokens=False
    )
    rows = [p.ids + a.ids + [EOS] for p, a in zip(prompts, answers, strict=True)]
    kinds = [KINDS.index(document.kind) for document in documents]
    return pack(rows, [len(prompt.ids) for prompt in prompts], kinds)


def batches(corpus: Corpus, tokens: int, seed: str) -> Iterator[Batch]:
    """Yield length-sorted batches of about ``tokens`` padded tokens, for ever."""
    rng = random.Random(seed)
    lens = corpus.lens.tolist()
    while True:
        order = list(range(len(corpus)))
        rng.shuffle(order)
        for start in range(0, len(order), SORT_WINDOW):
            window = sorted(order[start : start + SORT_WINDOW], key=lens.__getitem__)
            cuts = [0]
            for at, row in enumerate(window, 1):
                width = -(-lens[row] // LENGTH_BUCKET) * LENGTH_BUCKET
                if width * (at - cuts[-1]) > tokens and at - 1 > cuts[-1]:
                    cuts.append(at - 1)
            spans = list(zip(cuts, cuts[1:] + [len(window)], strict=True))
            rng.shuffle(spans)
            for first, last in spans:
                index = torch.tensor(window[first:last])
                yield corpus.rows(index.to(corpus.lens.device))
