# SPDX-License-Identifier: Apache-2.0
"""The driver against an engine and a clock that are both made up."""

import pytest

from benchmarks.sweep.driver import Driver, Progress
from benchmarks.sweep.figures import (
    after_changes,
    churn,
    figures_of,
    latency,
    throughput,
)
from benchmarks.sweep.traffic import LengthRange, Traffic

STEP_S = 0.1


class FakeEngine:
    """One token a request and step, which takes what ``step_s`` says."""

    def __init__(self, step_s=lambda now, n: STEP_S):
        self.now, self.left, self.step_s = 0.0, {}, step_s
        self.sizes, self.aborted, self.sent_at = [], [], {}

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def submit(self, request):
        self.left[request.number] = request.output_len
        self.sent_at[request.number] = self.now

    def abort(self, number):
        del self.left[number]
        self.aborted.append(number)

    def step(self):
        self.sizes.append((self.now, len(self.left)))
        self.now += self.step_s(self.now, len(self.left))
        progress = []
        for number in list(self.left):
            self.left[number] -= 1
            done = self.left[number] == 0
            progress.append(Progress(number, 1, done))
            if done:
                del self.left[number]
        return progress

    @property
    def num_unfinished(self):
        return len(self.left)


def drive(traffic, engine=None):
    engine = engine or FakeEngine()
    driver = Driver(
        engine,
        traffic,
        LengthRange(4, 4),
        LengthRange(20, 20),
        seed=1,
        clock=engine.clock,
        sleep=engine.sleep,
    )
    return engine, driver.run()


def test_steady_keeps_the_number_in_flight_and_measures_from_the_first_tokens():
    engine, timeline = drive(Traffic("steady", 30, (5,)))
    assert {n for _, n in engine.sizes} == {5}
    assert timeline.start_s == pytest.approx(STEP_S)
    figures = figures_of(timeline, Traffic("steady", 30, (5,)))
    assert figures["throughput"][0] == pytest.approx(5 / STEP_S, rel=0.01)
    assert figures["step p99"][0] == pytest.approx(1e3 * STEP_S)
    assert not engine.left  # nothing is left behind


def test_a_limit_of_requests_ends_a_load():
    engine, timeline = drive(Traffic("steady", 1e6, (5,), max_requests=12))
    assert 12 <= len(timeline.requests) <= 17
    assert timeline.end_s < 10


def test_open_loop_counts_latency_from_the_arrival_and_waits_for_nobody():
    traffic = Traffic("open", 60, arrival_rate=2.0)
    engine, timeline = drive(traffic)
    arrivals = traffic.arrivals_s(1)
    assert len(timeline.requests) == len(arrivals) > 80
    for number, arrival in enumerate(arrivals):
        times = timeline.requests[number]
        assert times.arrival_s == arrival and times.finished
        assert 0 <= engine.sent_at[number] - arrival <= STEP_S + 1e-9
    figures = latency(timeline)
    assert figures["tpot p50"] == (pytest.approx(1e3 * STEP_S), "ms")
    assert 1e3 * STEP_S <= figures["ttft p50"][0] <= 2e3 * STEP_S
    low = figures["ttft p50"][0] + 19e3 * STEP_S
    assert figures["e2e p50"][0] == pytest.approx(low, rel=0.02)
    assert figures["ttft p50"][0] <= figures["ttft p90"][0] <= figures["ttft p99"][0]


def test_step_change_moves_at_once_and_shows_a_stall_and_an_outlier():
    def slow_start(now, num_reqs):
        if 10 <= now < 11.5 and num_reqs == 16:
            return 0.5  # the first steps of the new load
        return STEP_S

    traffic = Traffic("change", 10, (4, 16, 4))
    engine, timeline = drive(traffic, engine=FakeEngine(slow_start))
    assert {n for t, n in engine.sizes if 10 <= t < 19.9} == {16}
    assert {n for t, n in engine.sizes if t < 9.9 or t >= 20} == {4}
    assert len(engine.aborted) >= 12
    figures = after_changes(timeline, traffic)
    assert figures["phase 1 (C=16) steady"][0] == pytest.approx(160, rel=0.02)
    assert figures["phase 1 (C=16) recovery"][0] == pytest.approx(0.4, abs=0.1)
    assert figures["phase 1 (C=16) outlier"][0] == pytest.approx(5.0, rel=0.01)
    # The step in flight at the change counts where it ends: 16 tokens, not 4.
    assert 1.0 < figures["phase 2 (C=4) recovery"][0] < 1.2
    assert figures["phase 2 (C=4) outlier"][0] < 1.5


def test_churn_aborts_and_compares_like_windows():
    traffic = Traffic("churn", 180, (32,))
    engine, timeline = drive(traffic)
    assert len({n for _, n in engine.sizes}) > 8
    memory = [(float(t), 100.0 + 0.5 * t, 7.0) for t in range(181)]
    figures = churn(timeline, traffic.window_s, memory)
    assert figures["window"][0] == 60
    assert figures["last window"][0] == pytest.approx(
        figures["first window"][0], rel=0.03
    )
    assert figures["aborted"][0] > 20
    assert figures["host growth"][0] == pytest.approx(60.0)
    assert figures["device growth"][0] == 0.0


def test_throughput_counts_the_steps_that_ended_in_the_window():
    _, timeline = drive(Traffic("steady", 30, (5,)))
    assert throughput(timeline, 10, 20) == pytest.approx(50, rel=0.03)
    assert throughput(timeline, 20, 20) == 0.0
