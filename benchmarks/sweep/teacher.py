# SPDX-License-Identifier: Apache-2.0
"""Teacher forcing: every request follows a given text, and its logits are kept.

Dummy weights leave the best two tokens closer than rounding, so outputs of two arms
part after a few tokens and say nothing more. Here the token at each position is a
function of the request's seed and the position:

* drafts become the text's tokens, in the drafter's graph, so that whatever part of them
  a step verifies, its inputs are those of every other arm;
* the target's logits are kept, a few columns of each row, then replaced by the
  text's next token, which greedy sampling takes;
* the drafter's hidden states are kept likewise, from which its drafts would have come.

How many drafts are accepted is left to coupled acceptance. Rows of equal seed and
position (a drafter's of equal anchor and depth too) then have equal inputs in every
arm, and differ by rounding alone unless some K/V entry, position or index is wrong. A
wrong one of the drafter's would cost acceptance and nothing else, so only its own rows
show it.

Invariants (pinned by tests/benchmarks/sweep/test_teacher.py and
tests/benchmarks/test_check_logits.py):
  * Every output token is the text's.
  * A token that is given to another request shows in the logits.
"""

from typing import Any

import numpy as np
import torch

# Columns kept of each row, spread over its width.
NUM_COLUMNS = 48
FLOAT = torch.float32
# Attribute of the speculator: the kept hidden states of its last pass, by row.
HIDDEN_BUFFER = "_teacher_hidden"
# Ids that are kept free at both ends of the vocabulary: special tokens.
_RESERVED = 16
_MULTIPLIERS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_LOW_31 = 0x7FFFFFFF


def text_tokens(
    seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Return the text's tokens.

    Args:
        seeds: Of the requests. Shape [N], int64.
        positions: Of the tokens. Shape [N], integer.
        vocab_size: Size V of the vocabulary, > 2 * 16.

    Returns:
        Shape [N], int64, in [16, V - 16).
    """
    first, second, third = _MULTIPLIERS
    mixed = (seeds & _LOW_31) * first + positions.to(torch.int64) * second
    mixed = ((mixed >> 15) ^ mixed) & _LOW_31
    mixed = (mixed * third) & ((1 << 62) - 1)
    return _RESERVED + (mixed >> 13) % (vocab_size - 2 * _RESERVED)


def _columns(rows: torch.Tensor) -> torch.Tensor:
    """Return some columns of rows, as a copy. Shape [N, NUM_COLUMNS], float32."""
    step = max(rows.shape[1] // NUM_COLUMNS, 1)
    return rows[:, ::step][:, :NUM_COLUMNS].to(FLOAT, copy=True)


def install() -> None:
    """Make this process's drafters draft the text; before any graph is captured."""
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    original = DSparkSpeculator._sample_sequential

    def sample_sequential(self: Any, num_reqs: int, head_hidden: Any) -> None:
        original(self, num_reqs, head_hidden)
        num_rows = num_reqs * self.num_speculative_steps
        if not hasattr(self, HIDDEN_BUFFER):  # in a warm-up run, before any capture
            size = len(self.sample_pos), NUM_COLUMNS
            setattr(self, HIDDEN_BUFFER, head_hidden.new_zeros(size, dtype=FLOAT))
        hidden = head_hidden[self.sample_indices[:num_rows]]
        getattr(self, HIDDEN_BUFFER)[:num_rows] = _columns(hidden)
        slots = self.sample_idx_mapping[:num_rows].clamp(min=0).to(torch.int64)
        drafts = text_tokens(
            self.seeds[slots], self.sample_pos[:num_rows], self.vocab_size
        )
        self.draft_tokens[:num_reqs] = drafts.view(num_reqs, -1)

    DSparkSpeculator._sample_sequential = sample_sequential


class Teacher:
    """Keeps and replaces the logits of one runner. Built after the engine's start.

    Args:
        runner: The V2 model runner of this rank.

    Attributes:
        fault: While set, the last token of the first request of every step with
            several is given to the second one.
    """

    def __init__(self, runner: Any):
        self.fault = False
        self._runner = runner
        self._batch: Any = None
        self._rows: list[tuple[torch.Tensor, ...]] = []
        self._draft_rows: list[tuple[torch.Tensor, ...]] = []
        sample, prepare = runner.sample, runner.prepare_inputs
        self._compute_logits = runner.model.compute_logits

        def sample_batch(hidden_states: Any, input_batch: Any, *args: Any) -> Any:
            self._batch = input_batch
            try:
                return sample(hidden_states, input_batch, *args)
            finally:
                self._batch = None

        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            if self.fault and batch.num_reqs > 1:
                batch.query_start_loc[1] -= 1
            return batch

        runner.sample, runner.prepare_inputs = sample_batch, prepare_inputs
        runner.model.compute_logits = self.compute_logits
        if getattr(runner, "speculator", None) is not None:
            self._keep_drafts(runner.speculator)

    def _keep_drafts(self, speculator: Any) -> None:
        propose = speculator.propose

        def propose_and_keep(
            *args: Any, num_speculative_tokens: int | None = None, **kwargs: Any
        ) -> Any:
            drafts = propose(
                *args, num_speculative_tokens=num_speculative_tokens, **kwargs
            )
            depth = num_speculative_tokens
            depth = speculator.num_speculative_steps if depth is None else depth
            num_rows = drafts.shape[0] * depth
            if num_rows and not kwargs.get("dummy_run"):
                slots = speculator.sample_idx_mapping[:num_rows].to(torch.int64)
                index = torch.arange(num_rows, device=slots.device) % depth
                kept = getattr(speculator, HIDDEN_BUFFER)[:num_rows].clone()
                anchors = speculator.sample_pos[:num_rows] - index
                seeds = speculator.seeds[slots.clamp(min=0)]
                depths = torch.full_like(index, depth)
                self._draft_rows.append((seeds, anchors, index, depths, kept))
            return drafts

        speculator.propose = propose_and_keep

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Keep some columns of the logits, then leave the text's tokens alone."""
        logits = self._compute_logits(hidden_states)
        batch, (num_rows, vocab_size) = self._batch, logits.shape
        if batch is None:
            return logits  # a dummy run
        slots = batch.expanded_idx_mapping[:num_rows].to(torch.int64)
        seeds = self._runner.sampler.sampling_states.seeds.gpu[slots]
        positions = batch.positions[batch.logits_indices[:num_rows]]
        self._rows.append((seeds, positions.clone(), _columns(logits)))
        following = text_tokens(seeds, positions + 1, vocab_size)
        logits.fill_(-1e4)
        return logits.scatter_(1, following[:, None], 1e4)

    def take(self) -> dict[str, Any]:
        """Return and forget what was kept since the last call.

        Returns:
            ``logits``: (seed, position) of each row, shape [N, 2], and its values,
            shape [N, NUM_COLUMNS], float32. ``drafts``: likewise (seed, anchor's
            position, index of the draft, depth), shape [M, 4], and values.
        """
        rows, self._rows = self._rows, []
        draft_rows, self._draft_rows = self._draft_rows, []
        return {"logits": _gathered(rows), "drafts": _gathered(draft_rows)}


def _gathered(
    rows: list[tuple[torch.Tensor, ...]],
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return keys and values of all kept batches; None without any."""
    if not rows:
        return None
    *keys, values = (torch.cat(parts) for parts in zip(*rows, strict=True))
    keys = torch.stack([key.to(torch.int64) for key in keys], dim=1)
    return keys.cpu().numpy(), values.cpu().numpy()
