# SPDX-License-Identifier: Apache-2.0
"""Records confidence logits and what became of the drafts, on the bundled checkpoint.

    python benchmarks/record_calibration.py --out record.jsonl

A plain-torch replay, not the engine: the target answers fresh questions of the
checkpoint's own grammar, greedily or at temperature 1, and every verify step is
walked through on that answer with all drafts verified. The draft is one-hot (argmax),
vLLM's default, so "the sampled token equals the draft" has the distribution of
rejection sampling. Confidences do not change what is drafted or accepted, so one
record serves every distortion of the confidence head.

Each line is one request: ``class``, and rows of accepted, verified, then K logits.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from tiny_dspark.checkpoint import load  # noqa: E402
from tiny_dspark.corpus import pack  # noqa: E402
from tiny_dspark.evaluate import replay  # noqa: E402
from tiny_dspark.generation import generate  # noqa: E402
from tiny_dspark.grammar import make_heldout  # noqa: E402
from tiny_dspark.model import Draft, Shape, Target, rotary_table  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from benchmarks.arguments import output_file, positive_int  # noqa: E402

CHECKPOINT = ROOT / "tests" / "fixtures" / "tiny-dspark"
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
MAX_NEW = 160


def record(per_kind: int, seed: str, device: str, name: str) -> list[list[list[float]]]:
    """Return the rows of every request of one class.

    Args:
        per_kind: Questions of each of the five kinds.
        seed: Of questions and sampling.
        device: ``cpu`` or ``cuda``.
        name: ``greedy`` or ``sampled``.
    """
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "target" / "tokenizer.json"))
    shape = Shape(tokenizer.get_vocab_size())
    target = load(Target(shape), CHECKPOINT / "target", device).eval()
    draft = load(Draft(shape), CHECKPOINT / "draft", device).eval()
    questions = [d.prompt for d in make_heldout(per_kind, seed)]
    prompts = [e.ids for e in tokenizer.encode_batch(questions)]
    answers = generate(
        target,
        prompts,
        rotary_table(shape, device),
        max_new=MAX_NEW,
        temperature=TEMPERATURES[name],
        generator=torch.Generator(device).manual_seed(0),
    )
    full = [p + a for p, a in zip(prompts, answers, strict=True)]
    corpus = pack(full, [len(p) for p in prompts], [0] * len(full))
    return [
        [
            [
                step.accepted,
                min(len(step.confidences), step.remaining),
                *(round(x, 3) for x in _logits(step.confidences)),
            ]
            for step in steps
        ]
        for steps in replay(target, draft, corpus.to(device))
    ]


def _logits(confidences: tuple[float, ...]) -> list[float]:
    return torch.logit(torch.tensor(confidences), eps=1e-6).tolist()


def main(argv: list[str] | None = None) -> int:
    """Record both classes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--per-kind", type=positive_int, default=20, help="questions of a kind"
    )
    parser.add_argument("--seed", default="calibration")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "-o", "--out", type=output_file, default="out/calibration-record.jsonl"
    )
    args = parser.parse_args(argv)
    if args.per_kind < 1:
        parser.error(f"--per-kind={args.per_kind}: must be at least 1. Ask for more")
    with args.out.open("w") as file:
        for name in TEMPERATURES:
            rows = record(args.per_kind, args.seed, args.device, name)
            for request in rows:
                line = {"class": name, "rows": request}
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
            print(f"{name}: {sum(map(len, rows))} verify steps of {len(rows)} requests")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
