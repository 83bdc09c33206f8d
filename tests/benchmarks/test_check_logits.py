# SPDX-License-Identifier: Apache-2.0
"""Teacher-forced logits: what differs by rounding passes, what is wrong does not."""

import json

import numpy as np
import pytest
import torch

from benchmarks import check_logits
from benchmarks.check_logits import LARGEST_ERROR, Rounding, errors_of, rounding_of
from benchmarks.sweep.teacher import text_tokens
from tests.helpers.engine import REHEARSAL_ENVIRONMENT

TIMEOUT_S = 600


def noisy_rows(rng, noise, *, count=400, copies=1):
    """Return rows of equal truth for equal keys, each with noise of its own."""
    truth = np.random.default_rng(7).normal(size=(count, 48))
    return {
        (1, position): [row + noise * rng.normal(size=48) for _ in range(copies)]
        for position, row in enumerate(truth)
    }


def test_rounding_passes_and_a_few_wrong_rows_do_not():
    rng = np.random.default_rng(0)
    reference = noisy_rows(rng, 0.01, copies=3)
    rounding = rounding_of(reference)
    assert 0.02 < rounding.median < rounding.p99 < 0.08
    same = noisy_rows(rng, 0.01)
    assert rounding.accepts(errors_of(reference, same))
    assert not rounding.accepts(errors_of(reference, noisy_rows(rng, 0.03)))
    for position in range(0, 400, 10):  # every tenth row is another one's
        same[1, position] = same[1, position + 1]
    errors = errors_of(reference, same)
    assert 0.09 < rounding.share_beyond(errors) < 0.12
    assert not rounding.accepts(errors)


def test_no_number_is_the_largest_error_and_other_requests_are_not_compared():
    reference = {(1, 5): [np.array([1.0, 2.0, 4.0])]}
    wrong = {(1, 5): [np.array([1.0, np.nan, 4.0])], (2, 5): [np.zeros(3)]}
    assert errors_of(reference, wrong).tolist() == [LARGEST_ERROR]
    assert not Rounding(0.1, 0.3).accepts(errors_of(reference, wrong))


def test_a_reference_that_says_nothing_is_refused():
    once = {(1, 5): [np.array([1.0, 2.0])]}
    with pytest.raises(ValueError, match="several sizes"):
        rounding_of(once)
    with pytest.raises(ValueError, match="equal logits"):
        rounding_of({(1, 5): [np.ones(3)] * 2})


def test_text_is_a_function_of_seed_and_position_within_the_vocabulary():
    seeds = torch.arange(40).repeat_interleave(50) * 977 + (1 << 30)
    positions = torch.arange(50, dtype=torch.int32).repeat(40)
    tokens = text_tokens(seeds, positions, 96)
    assert tokens.dtype == torch.int64
    assert tokens.min() == 16 and tokens.max() == 79
    assert torch.equal(tokens, text_tokens(seeds, positions, 96))
    shares = torch.bincount(tokens, minlength=96)[16:80] / len(tokens)
    assert shares.max() < 0.03, "about one in 64 each"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--acceptance", "rates"], "coupled"),
        (["--waves", "4"], "two sizes"),
        (["--waves", "4,999"], "--max-num-seqs"),
        (["--prompt-len", "4000"], "--max-model-len"),
        (["--tensor-parallel-size", "2"], "rank 0"),
    ],
)
def test_usage_errors(options, named, capsys):
    with pytest.raises(SystemExit):
        check_logits.parse_args(options)
    assert named in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.timeout(TIMEOUT_S)
def test_trimming_leaves_the_logits_alone_and_the_control_does_not(
    tiny_target, tiny_draft, tmp_path, monkeypatch
):
    for name, value in REHEARSAL_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "logits.jsonl"
    command = (
        f"--target {tiny_target} --draft {tiny_draft} --dtype float32 "
        "--arms fixed5,half5 "
        "--rates .82,.66,.53,.42,.33 --waves 4,1 --prompt-len 6-20 --output-len 6-16 "
        "--max-num-seqs 4 --max-model-len 64 --max-num-batched-tokens 128 "
        "--max-cudagraph-capture-size 24 --kv-cache-gib 0.05 "
        f"--gpu-memory-utilization 0.1 --out {out}"
    )
    assert check_logits.main(command.split()) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    found = {r["arm"]: r["case"] for r in rows if r["bench"] == check_logits.BENCH}
    half, control = found["half5"], found["control: half5 with a fault"]
    assert half["near"] and half["same_text"]
    assert half["num_trimmed"] > 5 and half["num_rows"] > 50, "premise"
    assert half["draft_num_rows"] > 50 and half["draft_depths"] == [5], "premise"
    assert not control["near"] and control["share_beyond_rounding"] > 0.2
    assert control["draft_share_beyond_rounding"] > 0.2
