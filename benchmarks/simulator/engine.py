# SPDX-License-Identifier: Apache-2.0
"""One engine's loop in simulated time: schedule, plan, verify, draft.

A closed loop: all requests arrive at once, and the batch drains or, with
``refills``, a new request takes the place of each that ended. Requests are scheduled
as under asynchronous scheduling: what the step before last produced is known, so a
request that ended by luck takes part in one step more.

Invariants (pinned by tests/benchmarks/simulator/test_engine.py):
  * Every request yields exactly its output tokens, whatever the policy.
  * Policies of equal depth accept the same drafts.
  * A step costs what the tables say of the batch that it served.
"""

from dataclasses import dataclass, replace

import numpy as np

from benchmarks.acceptance.draws import request_seed
from benchmarks.acceptance.world import World
from benchmarks.simulator.policies import Batch, Drafting, Policy
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts


@dataclass(frozen=True)
class SimulatedLoad:
    """A closed loop of ``concurrency`` requests.

    Attributes:
        concurrency: Requests.
        prompt_len: Prompt tokens.
        output_len: Output tokens.
        seed: Request i has the seed ``request_seed(seed, i)``.
        refills: Requests that take the place of others; 0 drains. Above 0, the
            first requests have staggered output lengths, and the load ends when
            the last refill would be due: the drain is left out.
    """

    concurrency: int
    prompt_len: int
    output_len: int
    seed: int
    refills: int = 0

    def first_output_lens(self) -> np.ndarray:
        """Output length of the first requests. Shape [R], int64."""
        phase = np.arange(1, self.concurrency + 1) if self.refills else 1
        share = phase / (self.concurrency if self.refills else 1)
        lengths = np.ceil(self.output_len * share).astype(np.int64)
        return np.broadcast_to(lengths, (self.concurrency,)).copy()


@dataclass(frozen=True)
class Engine:
    """What all policies share: prices and limits.

    Attributes:
        costs: True step costs.
        max_num_batched_tokens: Most target tokens of a step.
        host_ms_per_request: Host time to submit a request, before the first step.
        start_ms: What a load takes besides its steps.
    """

    costs: StepCosts
    max_num_batched_tokens: int = 8192
    host_ms_per_request: float = 0.0
    start_ms: float = 0.0


@dataclass
class LoadResult:
    """What one load came to.

    Attributes:
        num_tokens: Output tokens.
        ms: Simulated time.
        num_steps: Steps.
        num_drafted: Drafts made.
        num_verified: Drafts judged by the target.
        num_accepted: Drafts accepted, within the output length or not.
        num_trimmed_steps: Steps that verified fewer drafts than were in hand.
    """

    num_tokens: int = 0
    ms: float = 0.0
    num_steps: int = 0
    num_drafted: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_trimmed_steps: int = 0

    @property
    def tok_s(self) -> float:
        """Output tokens per second."""
        return 1000.0 * self.num_tokens / self.ms


@dataclass
class _State:
    """Per request. All shape [R], int64."""

    prompt_left: np.ndarray
    emitted: np.ndarray
    emitted_before: np.ndarray  # a step earlier: what the scheduler knows
    drafts: np.ndarray
    output_len: np.ndarray
    seeds: np.ndarray


def admit(rank: np.ndarray, drafts: np.ndarray, budget: int) -> np.ndarray:
    """Return the drafts admitted per request: the ``budget`` best of the batch.

    Ties: earlier position, then lower row, as the admission kernel.

    Args:
        rank: Survivals, not rising along positions. Shape [R, K].
        drafts: Drafts in hand. Shape [R], 0..K.
        budget: At most the drafts in hand.
    """
    if budget >= drafts.sum():
        return drafts.copy()
    valid = np.arange(rank.shape[1]) < drafts[:, None]
    scores = np.where(valid, rank, -1.0).T.ravel()
    best = np.argsort(-scores, kind="stable")[:budget]
    return np.bincount(best % len(drafts), minlength=len(drafts))


class Simulation:
    """Runs one load on one policy. Lifecycle: built, then ``run`` once.

    Args:
        engine: Prices and limits.
        world: True acceptance.
        policy: The arm.
        load: The requests.
    """

    def __init__(
        self, engine: Engine, world: World, policy: Policy, load: SimulatedLoad
    ):
        self.engine, self.world, self.policy, self.load = engine, world, policy, load
        num_reqs = load.concurrency
        zeros = np.zeros(num_reqs, dtype=np.int64)
        self._state = _State(
            np.full(num_reqs, load.prompt_len),
            zeros,
            zeros.copy(),
            zeros.copy(),
            load.first_output_lens(),
            request_seed(load.seed, np.arange(num_reqs)),
        )
        self._num_started = num_reqs
        self._num_ended_tokens = 0
        self.result = LoadResult(
            ms=engine.start_ms + num_reqs * engine.host_ms_per_request
        )

    def run(self) -> LoadResult:
        """Serve until every request has its output, or a refill is missing."""
        self.policy.start(self.load.concurrency)
        state, last = self._state, self.load.concurrency + self.load.refills
        while (state.emitted < state.output_len).any():
            if self.load.refills and not self._refill(last):
                break
            self._step()
        self.result.num_tokens = self._num_ended_tokens + int(state.emitted.sum())
        return self.result

    def _refill(self, last: int) -> bool:
        """Start requests in the place of those known to have ended.

        Returns:
            False when more are due than remain of ``last``.
        """
        state = self._state
        due = np.flatnonzero(state.emitted_before >= state.output_len)
        if self._num_started + len(due) > last:
            return False
        if len(due):
            self._num_ended_tokens += int(state.emitted[due].sum())
            state.prompt_left[due] = self.load.prompt_len
            state.output_len[due] = self.load.output_len
            state.emitted[due] = state.emitted_before[due] = state.drafts[due] = 0
            numbers = self._num_started + np.arange(len(due))
            state.seeds[due] = request_seed(self.load.seed, numbers)
            self._num_started += len(due)
            self.policy.replaced(due)
        return True

    def _first_positions(self, slots: np.ndarray) -> np.ndarray:
        """Token position of the first draft after what was emitted."""
        return self.load.prompt_len + self._state.emitted[slots]

    def _schedule(self) -> Batch:
        state = self._state
        decoding = (state.prompt_left == 0) & (state.emitted > 0)
        # The step before yields one token at least.
        in_flight = state.emitted > state.emitted_before
        sure = state.emitted_before + in_flight
        alive = np.flatnonzero(decoding & (sure < state.output_len))
        # Drafts first: a request that only just left its prompt has some as well.
        alive = alive[np.argsort(state.drafts[alive] == 0, kind="stable")]
        drafts = state.drafts[alive].astype(np.int32)
        room = self.engine.max_num_batched_tokens - int(drafts.sum()) - len(alive)
        waiting = np.flatnonzero(state.prompt_left > 0)
        before = np.cumsum(state.prompt_left[waiting]) - state.prompt_left[waiting]
        chunk = np.clip(room - before, 0, state.prompt_left[waiting])
        waiting, chunk = waiting[chunk > 0], chunk[chunk > 0]
        slots = np.concatenate((alive, waiting))
        sampling = np.concatenate(
            (np.ones(len(alive), dtype=bool), chunk == state.prompt_left[waiting])
        )
        true_logits = self.world.true_logits(
            self._state.seeds[slots], self._first_positions(slots)
        )
        return Batch(
            slots=slots,
            drafts=np.concatenate((drafts, np.zeros(len(waiting), dtype=np.int32))),
            non_drafts=np.concatenate(
                (np.ones(len(alive), dtype=np.int32), chunk.astype(np.int32))
            ),
            sampling=sampling,
            prefilling=np.arange(len(slots)) >= len(alive),
            true_logits=true_logits,
        )

    def _verify_ms(self, batch: Batch, budget: int) -> float:
        """Target time of what the step serves, logits and sampling included."""
        costs, num_reqs = self.engine.costs, len(batch.slots)
        width = int(batch.drafts.max(initial=0))
        num_tokens = int(batch.non_drafts.sum()) + budget
        uniform = num_tokens == num_reqs * (width + 1) and budget == num_reqs * width
        if uniform and self.policy.uniform_graphs and width in costs.verify_uniform_ms:
            return float(costs.verify_uniform_ms[width][num_reqs])
        if not batch.prefilling.any():
            return float(costs.decode_varlen_ms(num_reqs)[num_tokens - num_reqs])
        return float(costs.verify_varlen_ms[num_tokens])

    def _step(self) -> None:
        state, world, result = self._state, self.world, self.result
        batch = self._schedule()
        num_reqs = len(batch.slots)
        depth = self.policy.schedule(num_reqs)
        budget = self.policy.budget(batch)
        capacities = admit(self.policy.rank(batch), batch.drafts, budget)
        accepted = world.accepted_prefix(
            batch.true_logits,
            state.seeds[batch.slots],
            self._first_positions(batch.slots),
            capacities,
        )
        self.policy.judged(batch, capacities, accepted)
        self._advance(batch, accepted)
        drafting = self._draft(batch.slots[batch.sampling])
        depth = self.policy.next_depth(depth, drafting, num_reqs)
        state.drafts[drafting.slots] = depth
        self.policy.drafted(replace(drafting, depth=depth))

        draft_ms = self.engine.costs.draft_ms[depth][num_reqs] if depth else 0.0
        overhead_ms = self.engine.costs.overhead_ms
        step_ms = self._verify_ms(batch, budget) + float(draft_ms) + overhead_ms
        self.policy.took(step_ms)
        result.ms += step_ms
        result.num_steps += 1
        result.num_drafted += depth * len(drafting.slots)
        result.num_verified += budget
        result.num_accepted += int(accepted.sum())
        result.num_trimmed_steps += int(budget < batch.num_drafts)

    def _advance(self, batch: Batch, accepted: np.ndarray) -> None:
        state, slots = self._state, batch.slots
        state.emitted_before = state.emitted.copy()
        prompt = np.where(batch.drafts == 0, batch.non_drafts, 0)
        state.prompt_left[slots] -= np.minimum(prompt, state.prompt_left[slots])
        emitted = state.emitted[slots] + batch.sampling * (accepted + 1)
        state.emitted[slots] = np.minimum(emitted, state.output_len[slots])

    def _draft(self, slots: np.ndarray) -> Drafting:
        logits = self.world.true_logits(
            self._state.seeds[slots], self._first_positions(slots)
        )
        return Drafting(slots, logits, self.world.reported(logits), depth=0)
