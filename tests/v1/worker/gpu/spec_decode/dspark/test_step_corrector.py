# SPDX-License-Identifier: Apache-2.0
"""Which steps are compared with their times, and what with."""

import numpy as np
import pytest

from tests.helpers.capacity_cases import DEVICE, FakeGroup
from vllm.v1.worker.gpu.spec_decode.dspark import step_corrector as module
from vllm.v1.worker.gpu.spec_decode.dspark.step_corrector import (
    PlannedBatch,
    StepCorrector,
)
from vllm.v1.worker.gpu.spec_decode.dspark.step_costs import StepCosts
from vllm.v1.worker.gpu.spec_decode.dspark.step_times import StepTimes

DEPTHS, MAX_REQS = (0, 2, 4), 8
WHOLE = PlannedBatch(
    num_reqs=4,
    num_tokens=20,
    width=4,
    trims=False,
    decode_only=True,
    context_tokens=100.0,
)
NO_DRAFTS = WHOLE._replace(num_tokens=4, width=0)
TRIMMED = WHOLE._replace(num_tokens=12, trims=True)


def make_corrector(learn_batch=1):
    reqs = np.arange(MAX_REQS + 1)
    costs = StepCosts(
        {d: 0.1 * d * reqs for d in DEPTHS},
        {d: 3.0 + reqs * (d + 1) for d in DEPTHS},
        2.0 + np.arange(MAX_REQS * 5 + 1),
        overhead_ms=0.5,
        verify_context_ms={d: 1e-3 * reqs for d in DEPTHS},
    )
    times = StepTimes(FakeGroup(), DEVICE)
    return StepCorrector(costs, times, learn_batch=learn_batch)


def serve(corrector, batch, depth, ms, times=3):
    for serial in range(1, times + 1):
        corrector.note(serial, batch, depth)
        corrector.times.add(serial, ms)
        corrector.learn()


def moved(corrector):
    rows = (corrector.correction.uniform, corrector.correction.varlen)
    return {
        (name, depth)
        for name, tables in zip(("uniform", "varlen"), rows, strict=True)
        for depth, row in tables.items()
        if (row != 1.0).any()
    }


@pytest.mark.parametrize(
    ("batch", "depth", "tabled", "bucket"),
    [
        # 3 + 20 of the uniform graph, 1.6 drafting, 0.4 context, 0.5 overhead.
        (WHOLE, 4, 23.0 + 1.6 + 0.4 + 0.5, ("uniform", 4)),
        # At depth 0: 3 + 4, no drafting.
        (NO_DRAFTS, 0, 7.0 + 0.4 + 0.5, ("uniform", 0)),
        # 2 + 12 of the varlen graph, drafting at the depth of the step.
        (TRIMMED, 2, 14.0 + 0.8 + 0.4 + 0.5, ("varlen", 2)),
    ],
)
def test_a_step_is_compared_with_what_its_tables_say(batch, depth, tabled, bucket):
    exact, slow = make_corrector(), make_corrector()
    serve(exact, batch, depth, tabled)
    assert moved(exact) == set()
    assert exact.last_ratio == pytest.approx(1.0)
    serve(slow, batch, depth, 1.5 * tabled)
    assert moved(slow) == {bucket}
    assert slow.correction.common_ratio > 1.0


def test_prediction_that_was_corrected_is_what_the_ratio_compares_with():
    corrector = make_corrector()
    serve(corrector, WHOLE, 4, 1.5 * 25.5)
    assert corrector.last_ratio == pytest.approx(1.5), "noted before it was learned"
    serve(corrector, WHOLE, 4, 1.5 * 25.5, times=1)
    assert corrector.last_ratio == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "depth"),
    [
        ({"decode_only": False}, 4),
        ({"width": -1}, 4),
        ({}, 2),  # the depth changes: drafts in hand of 4, drafting 2
        ({"trims": True}, 3),  # not an enabled depth
    ],
)
def test_steps_that_no_entry_describes_teach_nothing(changes, depth):
    corrector = make_corrector()
    serve(corrector, WHOLE._replace(**changes), depth, 1e3)
    assert moved(corrector) == set()


def test_times_of_unknown_steps_are_dropped_and_pending_ones_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "_MAX_PENDING", 5)
    corrector = make_corrector()
    corrector.times.add(99, 1e3)
    corrector.learn()
    for serial in range(100):
        corrector.note(serial, WHOLE, 4)
    assert len(corrector._pending) == 5
    assert moved(corrector) == set()


def test_times_are_taken_in_by_the_batch():
    corrector = make_corrector(learn_batch=4)
    serve(corrector, WHOLE, 4, 1.5 * 25.5, times=3)
    assert corrector.last_ratio == 1.0 and moved(corrector) == set()
    corrector.note(4, WHOLE, 4)
    corrector.times.add(4, 1.5 * 25.5)
    corrector.learn()
    assert moved(corrector) == {("uniform", 4)}
    assert corrector.times.num_ready == 0
