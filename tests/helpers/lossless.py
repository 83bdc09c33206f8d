# SPDX-License-Identifier: Apache-2.0
"""Synthetic speculation with the real admission and rejection kernels.

A target and a draft model that are first-order Markov chains over a few tokens: the
law of every output token is then known exactly, so frequencies can be tested against
it. Only the two models are made up; admission, the compact layout's row counts and
the rejection sampler are what the engine runs (compiled on a GPU, else interpreted).

The confidence of draft k is the true acceptance rate after draft k - 1, so that it
depends on the drafts before k, as a confidence head's does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats

from tests.helpers.admission import DEVICE
from vllm.v1.worker.gpu.spec_decode.dspark.capacity import admit_drafts
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

VOCAB_SIZE = 5
MAX_DEPTH = 7
TEMPERATURE = 0.8


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits.double() / TEMPERATURE, dim=-1)


@dataclass
class Models:
    """A target and a draft chain.

    Attributes:
        target_logits: Row = previous token. Shape [V, V], float32.
        draft_logits: Likewise.
    """

    target_logits: torch.Tensor
    draft_logits: torch.Tensor

    @classmethod
    def make(cls, seed: int) -> "Models":
        """Draw a target and a draft whose agreement differs much between tokens."""
        rng = np.random.default_rng(seed)
        target = rng.normal(0.0, 1.0, (VOCAB_SIZE, VOCAB_SIZE))
        # Per previous token: from nearly perfect drafts to nearly independent ones.
        error = np.linspace(0.1, 1.4, VOCAB_SIZE)[:, None]
        draft = target + error * rng.normal(0.0, 1.0, target.shape)
        return cls(*(torch.from_numpy(x.astype(np.float32)) for x in (target, draft)))

    @property
    def target_probs(self) -> torch.Tensor:
        """Law of the next token by previous token. Shape [V, V], float64."""
        return _softmax(self.target_logits)

    @property
    def draft_probs(self) -> torch.Tensor:
        """The same for the draft. Shape [V, V], float64."""
        return _softmax(self.draft_logits)

    @property
    def acceptance(self) -> torch.Tensor:
        """Chance that a draft after a token is accepted. Shape [V], float32."""
        return torch.minimum(self.target_probs, self.draft_probs).sum(-1).float()


Admit = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def admit(confidences: torch.Tensor, scheduled: torch.Tensor, budget: int):
    """Return the capacities that the engine would use. Shape [R], int32, CPU."""
    num_reqs = len(scheduled)
    rows = torch.arange(num_reqs, dtype=torch.int64, device=DEVICE)
    capacities, *offsets = (
        torch.zeros(num_reqs + extra, dtype=torch.int32, device=DEVICE)
        for extra in (0, 1, 1)
    )
    admit_drafts(
        confidences.to(DEVICE),
        rows,
        scheduled.to(DEVICE),
        torch.ones_like(capacities),
        budget,
        num_bonus_tokens=1,
        fill_budget=True,
        capacities_out=capacities,
        cu_num_logits_out=offsets[0],
        query_start_loc_out=offsets[1],
    )
    return capacities.cpu()


def admit_anticipating(confidences, scheduled, budget):
    """Broken rule: draft k is ranked by confidence k + 1, which knows its value."""
    seen = confidences.roll(-1, dims=1)
    seen[:, -1] = confidences[:, -1]
    return admit(seen, scheduled, budget)


@dataclass
class Chains:
    """Independent requests that are decoded round by round.

    Attributes:
        models: The two models.
        num_chains: Requests.
        seed: Of every draw.
        admit_rule: How capacities follow from current confidences.
    """

    models: Models
    num_chains: int
    seed: int
    admit_rule: Admit = admit
    tokens: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(self.seed)
        self.tokens = [[i % VOCAB_SIZE] for i in range(self.num_chains)]
        self.survival = np.ones((self.num_chains, MAX_DEPTH), dtype=np.float32)
        self.num_drafts, self.num_verified, self.num_accepted = 0, 0, 0
        seeds = torch.randint(2**62, (self.num_chains,), generator=self.rng)
        self.seeds = seeds.to(DEVICE)
        self.temperature = torch.full((self.num_chains,), TEMPERATURE, device=DEVICE)

    def round(self, depth: int, budget: int | None) -> None:
        """Draft, admit, verify and append.

        Args:
            depth: Drafts per request.
            budget: Drafts to verify over the batch; None for all.
        """
        drafts, confidences = self._draft(depth)
        capacities = torch.full((self.num_chains,), depth, dtype=torch.int32)
        if budget is not None and budget < depth * self.num_chains:
            capacities = self.admit_rule(confidences, capacities, budget)
        sampled, num_sampled = self._verify(drafts, capacities)
        self.num_drafts += depth * self.num_chains
        self.num_verified += int(capacities.sum())
        self.num_accepted += int(num_sampled.sum()) - self.num_chains
        rows = zip(self.tokens, sampled.tolist(), num_sampled.tolist(), strict=True)
        for tokens, new, count in rows:
            tokens.extend(new[:count])
        self.survival = np.cumprod(confidences.numpy(), axis=1)

    def _draft(self, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last token and the drafts [R, depth + 1], and confidences."""
        drafts = torch.empty(self.num_chains, depth + 1, dtype=torch.int64)
        drafts[:, 0] = torch.tensor([tokens[-1] for tokens in self.tokens])
        probs = self.models.draft_probs
        for k in range(depth):
            row = probs[drafts[:, k]]
            drafts[:, k + 1] = torch.multinomial(row, 1, generator=self.rng)[:, 0]
        # The column after the last draft knows that draft, as one that a deeper round
        # left behind could; nothing may read it.
        confidences = torch.ones(self.num_chains, MAX_DEPTH)
        known = min(depth + 1, MAX_DEPTH)
        confidences[:, :known] = self.models.acceptance[drafts[:, :known]]
        return drafts, confidences

    def _verify(
        self, drafts: torch.Tensor, capacities: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        depth, rows = drafts.shape[1] - 1, torch.arange(self.num_chains)
        widths = capacities.long() + 1
        request = rows.repeat_interleave(widths)
        ends = widths.cumsum(0)
        local = torch.arange(len(request)) - (ends - widths)[request]
        at = drafts[request, local]
        start = torch.tensor([len(tokens) for tokens in self.tokens])
        draft_logits = torch.zeros(self.num_chains, MAX_DEPTH, VOCAB_SIZE)
        draft_logits[:, :depth] = self.models.draft_logits[drafts[:, :depth]]
        cu_num_logits = torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int()
        return rejection_sample(
            (self.models.target_logits[at] / TEMPERATURE).to(DEVICE),
            draft_logits.to(DEVICE),
            at.int().to(DEVICE),
            cu_num_logits.to(DEVICE),
            (start[request] + local).to(DEVICE),
            rows.to(DEVICE),
            request.to(DEVICE),
            local.int().to(DEVICE),
            self.temperature,
            self.seeds,
            MAX_DEPTH,
        )

    def transitions(self, length: int) -> np.ndarray:
        """Count (previous, next) over exactly ``length`` tokens of every chain.

        A fixed length: where the last round happened to end is no part of the law.

        Returns:
            Shape [V, V], int64.
        """
        counts = np.zeros((VOCAB_SIZE, VOCAB_SIZE), dtype=np.int64)
        for tokens in self.tokens:
            kept = tokens[: length + 1]
            np.add.at(counts, (kept[:-1], kept[1:]), 1)
        return counts


def chi_square_p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Return the p-value of transition counts under a chain's law.

    Given its previous token each token is an independent draw, so the sum of squares
    over the cells has V * (V - 1) degrees of freedom.

    Args:
        counts: Shape [V, V].
        probs: Rows sum to 1. Shape [V, V].
    """
    expected = counts.sum(axis=1, keepdims=True) * probs
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, VOCAB_SIZE * (VOCAB_SIZE - 1)))
