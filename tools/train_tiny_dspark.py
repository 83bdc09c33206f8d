# SPDX-License-Identifier: Apache-2.0
"""Train the bundled tiny checkpoint from nothing but a seed.

    python tools/train_tiny_dspark.py --out OUT --device cuda --preset gpu
    python tools/train_tiny_dspark.py --out OUT --preset cpu      # about half an hour

The first line trains the checkpoint in tests/fixtures/tiny-dspark again: the same data
and steps in one run, near figures but not equal bits (its MODEL_CARD.md says why).

Writes ``target/``, ``draft/``, ``heldout.jsonl`` and ``info.json`` under OUT. Stages
(data, target, draft, eval) can run one by one; each reads what the ones before wrote.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from tiny_dspark import checkpoint, corpus, evaluate, train
from tiny_dspark.grammar import Document, make_documents, make_heldout
from tiny_dspark.model import Draft, Shape, Target
from tokenizers import Tokenizer

logger = logging.getLogger("train_tiny_dspark")

STAGES = ("data", "target", "draft", "eval")
PRESETS: dict[str, dict[str, float]] = {
    "gpu": {
        "tokenizer_documents": 20_000,
        "documents": 300_000,
        "target_steps": 4_338,
        "target_tokens": 65_536,
        "written": 16_384,
        "draft_steps": 800,
        "draft_tokens": 32_768,
    },
    "cpu": {
        "tokenizer_documents": 20_000,
        "documents": 120_000,
        "target_steps": 1_600,
        "target_tokens": 6_144,
        "written": 8_192,
        "draft_steps": 1_600,
        "draft_tokens": 3_072,
    },
    "smoke": {
        "tokenizer_documents": 600,
        "documents": 600,
        "target_steps": 12,
        "target_tokens": 1_024,
        "written": 48,
        "draft_steps": 12,
        "draft_tokens": 1_024,
    },
}
"""Sizes. ``gpu`` is the bundled checkpoint: its draft stops early on purpose, because a
long-trained one is right nearly always (6.97 tokens a verify step after 4,344 steps
on 65,536 answers) and leaves little for capacity to decide. ``smoke`` only proves that
every stage runs."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; preset values fill what is not given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=2, help="torch CPU threads")
    parser.add_argument("--seed", default="0", help="any text")
    parser.add_argument("--vocab-size", type=int, default=768, help="upper bound")
    parser.add_argument("--heldout-per-kind", type=int, default=84)
    for name in PRESETS["cpu"]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--anchors", type=int, default=16, help="blocks per sequence")
    parser.add_argument("--target-lr", type=float, default=2e-3)
    parser.add_argument("--draft-lr", type=float, default=2e-3)
    parser.add_argument("--target-minutes", type=float, default=0, help="0 = no limit")
    parser.add_argument("--draft-minutes", type=float, default=0, help="0 = no limit")
    parser.add_argument("--log-every", type=int, default=250)
    args = parser.parse_args(argv)
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


class Run:
    """One run over an output folder; per stage: read, work, write, time."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Draw the held-out documents, which every stage needs."""
        self.args, self.out = args, args.out
        self.heldout = make_heldout(args.heldout_per_kind, f"{args.seed}/heldout")
        self.avoid = frozenset(document.question for document in self.heldout)
        self.info: dict[str, object] = {"seed": args.seed, "preset": args.preset}
        self.seconds: dict[str, float] = {}
        info = self.out / "info.json"
        if info.exists():
            self.info |= json.loads(info.read_text())
            self.seconds |= self.info.get("stage_seconds", {})

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time one stage and save ``info.json`` after it."""
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 1)
        logger.info("stage %s took %.1f s", name, self.seconds[name])
        self.info["stage_seconds"] = self.seconds
        checkpoint.write_json(self.out / "info.json", self.info)

    def settings(self, stage: str) -> train.Settings:
        """Return the settings of ``stage`` (target or draft)."""
        args = vars(self.args)
        return train.Settings(
            steps=args[f"{stage}_steps"],
            minutes=args[f"{stage}_minutes"],
            learning_rate=args[f"{stage}_lr"],
            tokens=args[f"{stage}_tokens"],
            anchors=args["anchors"],
            seed=args["seed"],
            device=args["device"],
            log_every=args["log_every"],
        )

    def documents(self, name: str, count: int) -> list[Document]:
        """Draw training documents of the part ``name``."""
        return make_documents(count, f"{self.args.seed}/{name}", avoid=self.avoid)

    @property
    def tokenizer(self) -> Tokenizer:
        """The saved tokenizer."""
        return Tokenizer.from_file(str(self.out / "target/tokenizer.json"))

    @property
    def shape(self) -> Shape:
        """Model sizes for the saved tokenizer."""
        return Shape(self.tokenizer.get_vocab_size())

    def target(self) -> Target:
        """Load the saved target."""
        model = Target(self.shape)
        return checkpoint.load(model, self.out / "target", self.args.device)

    def data(self) -> None:
        """Write the tokenizer and the held-out requests."""
        documents = self.documents("tokenizer", self.args.tokenizer_documents)
        tokenizer = corpus.train_tokenizer(documents, self.args.vocab_size)
        corpus.save_tokenizer(tokenizer, self.out / "target")
        lines = [
            json.dumps(asdict(document) | {"prompt": document.prompt})
            for document in self.heldout
        ]
        (self.out / "heldout.jsonl").write_text("\n".join(lines) + "\n")

    def train_target(self) -> None:
        """Train and write the target."""
        documents = self.documents("train", self.args.documents)
        encoded = corpus.encode(self.tokenizer, documents)
        logger.info(
            "%d documents, %d tokens, longest %d, vocabulary %d",
            *(len(encoded), encoded.lens.sum(), encoded.lens.max()),
            self.shape.vocab_size,
        )
        settings = self.settings("target")
        target, self.info["target"] = train.train_target(
            self.shape, encoded.to(settings.device), settings
        )
        checkpoint.save_target(target, self.out / "target")

    def train_draft(self) -> None:
        """Let the target write, then train and write the draft."""
        settings, target = self.settings("draft"), self.target()
        documents = self.documents("written", self.args.written)
        prompts = corpus.encode(self.tokenizer, documents)
        with self.timed("write"):
            written = train.write_answers(target, prompts, settings)
        draft, self.info["draft"] = train.train_draft(
            target, written.to(settings.device), settings
        )
        checkpoint.save_draft(draft, self.out / "draft")

    def evaluate(self) -> None:
        """Measure the saved pair on the held-out requests."""
        draft = Draft(self.shape)
        draft = checkpoint.load(draft, self.out / "draft", self.args.device)
        heldout = corpus.encode(self.tokenizer, self.heldout)
        report = evaluate.evaluate(self.target(), draft, self.tokenizer, heldout)
        self.info["eval"] = report
        logger.info("%s", json.dumps(report, indent=1))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chosen stages in order."""
    args = parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    # cuDNN plans every new shape anew, and length-sorted batches have many shapes.
    torch.backends.cuda.enable_cudnn_sdp(False)
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    work = {
        "data": run.data,
        "target": run.train_target,
        "draft": run.train_draft,
        "eval": run.evaluate,
    }
    for stage in STAGES:
        if stage in args.stages:
            with run.timed(stage):
                work[stage]()


if __name__ == "__main__":
    main()
