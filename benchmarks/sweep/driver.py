# SPDX-License-Identifier: Apache-2.0
"""Drives an engine step by step under a traffic, and keeps a timeline.

Knows of the engine only ``submit``, ``abort``, ``step`` and ``num_unfinished``, and of
time only the clock that it is given.

Invariants (pinned by tests/benchmarks/sweep/test_driver.py):
  * A closed loop has exactly the asked number in flight at every step.
  * An open loop sends each request at the first step after its arrival, never
    waiting for others, and counts latency from the arrival.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from benchmarks.sweep.traffic import LengthRange, Request, Traffic


class Progress(NamedTuple):
    """What one step brought to one request."""

    number: int
    num_tokens: int
    finished: bool


class DrivenEngine(Protocol):
    """An engine that can be stepped."""

    def submit(self, request: Request) -> None:
        """Add a request."""

    def abort(self, number: int) -> None:
        """Drop a request."""

    def step(self) -> list[Progress]:
        """Run one step."""

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting or running, in the engine's own count."""


@dataclass(slots=True)
class RequestTimes:
    """One request's life, seconds since the start of the load."""

    arrival_s: float
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0
    finished: bool = False
    aborted: bool = False


@dataclass
class Timeline:
    """What happened.

    Attributes:
        requests: By number.
        steps: Per step that brought tokens: end, tokens, requests in flight.
        start_s: When the measured part begins: for a steady load when every
            first request has its first token.
        end_s: When the load ended.
    """

    requests: dict[int, RequestTimes] = field(default_factory=dict)
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    start_s: float = 0.0
    end_s: float = 0.0


class Driver:
    """Runs one load. Lifecycle: built, then ``run`` once.

    Args:
        engine: What to drive.
        traffic: Who sends what and when.
        prompt: Prompt lengths.
        output: Output lengths.
        seed: Of the load.
        clock: Seconds, rising.
        sleep: Waits some seconds.
        on_step: Called after every step with the time.
    """

    def __init__(
        self,
        engine: DrivenEngine,
        traffic: Traffic,
        prompt: LengthRange,
        output: LengthRange,
        seed: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        on_step: Callable[[float], None] | None = None,
    ):
        self._engine, self._traffic, self._seed = engine, traffic, seed
        self._prompt, self._output = prompt, output
        self._clock, self._sleep, self._on_step = clock, sleep, on_step
        self._running: dict[int, Request] = {}
        self._num_sent = 0
        self._arrivals = (
            traffic.arrivals_s(seed).tolist() if traffic.kind == "open" else []
        )
        self.timeline = Timeline()

    def run(self) -> Timeline:
        """Send, step and record until the load is over; then drop what is left."""
        self._begin_s = self._clock()
        while not self._is_over(now := self._clock() - self._begin_s):
            self._send(now)
            if not self._running:
                self._wait(now)
                continue
            self._take(self._engine.step())
        self.timeline.end_s = self._clock() - self._begin_s
        self._leave(list(self._running))
        # Steps in flight still hold the dropped requests.
        while self._engine.num_unfinished:
            self._engine.step()
        return self.timeline

    def _is_over(self, now: float) -> bool:
        if self._traffic.kind == "open":
            return self._num_sent == len(self._arrivals) and not self._running
        limit = self._traffic.max_requests
        return now >= self._traffic.end_s or bool(limit and self._num_sent > limit)

    def _send(self, now: float) -> None:
        if self._traffic.kind == "open":
            while (
                self._num_sent < len(self._arrivals)
                and self._arrivals[self._num_sent] <= now
            ):
                self._submit(self._arrivals[self._num_sent])
            return
        wanted = self._traffic.in_flight(now, self._seed)
        self._leave(list(self._running)[wanted:])
        while len(self._running) < wanted:
            self._submit(now)

    def _submit(self, arrival_s: float) -> None:
        number = self._num_sent
        request = self._traffic.request(number, self._prompt, self._output, self._seed)
        self._num_sent += 1
        self._running[number] = request
        self.timeline.requests[number] = RequestTimes(arrival_s)
        self._engine.submit(request)

    def _leave(self, numbers: list[int]) -> None:
        for number in numbers:
            del self._running[number]
            self.timeline.requests[number].aborted = True
            self._engine.abort(number)

    def _wait(self, now: float) -> None:
        """Sleep until the next arrival; only an open loop is ever idle."""
        self._sleep(max(self._arrivals[self._num_sent] - now, 0.0))

    def _take(self, progress: list[Progress]) -> None:
        now = self._clock() - self._begin_s
        in_flight, num_tokens, leaving = len(self._running), 0, []
        for number, new_tokens, finished in progress:
            request = self._running.get(number)
            if request is None:
                continue  # aborted meanwhile
            times = self.timeline.requests[number]
            num_tokens += new_tokens
            times.num_tokens += new_tokens
            if new_tokens:
                times.first_s = now if times.first_s is None else times.first_s
                times.last_s = now
            if finished:
                times.finished = True
                del self._running[number]
            elif request.abort_after and times.num_tokens >= request.abort_after:
                leaving.append(number)
        self._leave(leaving)
        if num_tokens:
            self.timeline.steps.append((now, num_tokens, in_flight))
        self._start_measuring(now)
        if self._on_step is not None:
            self._on_step(now)

    def _start_measuring(self, now: float) -> None:
        timeline = self.timeline
        if self._traffic.kind == "steady" and not timeline.start_s:
            first = range(self._traffic.levels[0])
            if all(timeline.requests[n].first_s is not None for n in first):
                timeline.start_s = now
