# SPDX-License-Identifier: Apache-2.0
"""Who sends what and when: a pure function of the seed, the same for every arm.

Closed loops keep ``in_flight(t)`` requests running: a constant (steady), steps (step
change), or a random staircase with bursts (churn). Where it falls, the newest
requests are aborted: their clients leave. An open loop sends at Poisson arrivals,
whatever is still running. Times are seconds since the start of the load.

Invariants (pinned by tests/benchmarks/sweep/test_traffic.py):
  * Request ``n`` has the same lengths, seed and fate in every arm.
  * Lengths cover their range; arrivals have the asked rate.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from benchmarks.acceptance.draws import request_seed, uniforms

Kind = Literal["steady", "open", "change", "churn"]
# Streams of benchmarks.acceptance.draws that the acceptance model does not use.
_PROMPT, _OUTPUT, _ABORT, _ABORT_AT, _ARRIVAL, _LEVEL = 4, 5, 6, 7, 8, 9
# Churn: seconds at one level, and the share of requests that are aborted.
CHURN_PERIOD_S = 3.0
CHURN_ABORTED = 0.1
# Churn compares its first and last minute, or the thirds of a shorter load.
MINUTE_S = 60.0


@dataclass(frozen=True)
class LengthRange:
    """Tokens, both ends included."""

    low: int
    high: int

    def draw(self, share: float) -> int:
        """Return the length at ``share`` in (0, 1) of the range."""
        return self.low + int(share * (self.high - self.low + 1))


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        number: Of the load, from 0.
        prompt_len: Prompt tokens.
        output_len: Output tokens.
        seed: ``SamplingParams.seed``.
        abort_after: Output tokens after which its client leaves; None stays.
    """

    number: int
    prompt_len: int
    output_len: int
    seed: int
    abort_after: int | None = None


@dataclass(frozen=True)
class Traffic:
    """One load.

    Attributes:
        kind: See the module.
        seconds: Length of the load; a step change has this for each phase.
        levels: Requests in flight: one entry, for a step change one a phase, for
            churn the largest. Not read by open loops.
        arrival_rate: Requests per second of an open loop.
        max_requests: Stop after so many; 0 is no limit.
    """

    kind: Kind
    seconds: float
    levels: tuple[int, ...] = ()
    arrival_rate: float = 0.0
    max_requests: int = 0

    @property
    def end_s(self) -> float:
        """When the load ends."""
        phases = len(self.levels) if self.kind == "change" else 1
        return self.seconds * phases

    @property
    def window_s(self) -> float:
        """Seconds after which churn repeats its levels, to be compared."""
        return min(MINUTE_S, self.seconds / 3)

    def in_flight(self, time_s: float, seed: int) -> int:
        """Return how many requests a closed loop runs at a time."""
        if self.kind == "change":
            phase = min(int(time_s / self.seconds), len(self.levels) - 1)
            return self.levels[phase]
        if self.kind == "churn":
            period = int(time_s % self.window_s / CHURN_PERIOD_S)
            share = float(uniforms(seed, period, _LEVEL))
            # Squared: mostly few requests, now and then a burst to the largest.
            return 1 + int(share**2 * self.levels[0])
        return self.levels[0]

    def arrivals_s(self, seed: int) -> np.ndarray:
        """Return the arrival times of an open loop, ascending, before its end."""
        count = int(self.arrival_rate * self.seconds * 2) + 64
        gaps = -np.log(uniforms(seed, np.arange(count), _ARRIVAL)) / self.arrival_rate
        times = np.cumsum(gaps)
        times = times[times < self.seconds]
        return times[: self.max_requests] if self.max_requests else times

    def request(
        self, number: int, prompt: LengthRange, output: LengthRange, seed: int
    ) -> Request:
        """Return the ``number``-th request.

        The first requests of a steady load end at staggered times, so that the
        batch does not end and begin in lockstep.
        """
        made = make_request(number, prompt, output, seed)
        if self.kind == "steady" and number < self.levels[0]:
            share = (number + 1) / self.levels[0]
            return replace(made, output_len=max(1, round(made.output_len * share)))
        if self.kind == "churn" and uniforms(made.seed, 0, _ABORT) < CHURN_ABORTED:
            share = float(uniforms(made.seed, 0, _ABORT_AT))
            return replace(made, abort_after=1 + int(share * made.output_len))
        return made


def make_request(
    number: int, prompt: LengthRange, output: LengthRange, seed: int
) -> Request:
    """Return the ``number``-th request of a load with a seed."""
    own = int(request_seed(seed, number))
    return Request(
        number,
        prompt.draw(float(uniforms(own, 0, _PROMPT))),
        output.draw(float(uniforms(own, 0, _OUTPUT))),
        own,
    )
