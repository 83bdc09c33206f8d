# SPDX-License-Identifier: Apache-2.0
"""Timing of logits and sampling: which sizes, and what a figure means."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.capacity_cases import DEVICE
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.spec_decode import capacity_profile as module
from vllm.v1.worker.gpu.spec_decode.capacity_profile import (
    NUM_REPEATS,
    NUM_SIZES,
    dummy_verify_batch,
    measure_sample_ms,
)

WIDTH, MAX_NUM_REQS = 5, 8
ROW_MS, SAMPLE_MS = 0.5, 0.25


@pytest.fixture
def clock(monkeypatch):
    """Return a settable clock that the events read."""
    now = SimpleNamespace(ms=0.0, waits=0)

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing
            self.ms = None

        def record(self):
            self.ms = now.ms

        def synchronize(self):
            now.waits += 1

        def elapsed_time(self, end):
            return end.ms - self.ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return now


def make_runner(clock=None, *, rows=64, slow_first=0.0):
    """Return a runner whose every logits row costs ROW_MS plus SAMPLE_MS."""
    calls = []

    def compute_logits(hidden):
        first = not calls or calls[-1] != len(hidden)
        calls.append(len(hidden))
        clock.ms += ROW_MS * len(hidden) + (slow_first if first else 0.0)
        return torch.zeros(len(hidden), 3, device=DEVICE)

    def reject(logits, batch, draft_logits):
        assert draft_logits == "draft logits"
        clock.ms += SAMPLE_MS * len(logits)

    return SimpleNamespace(
        cudagraph_manager=SimpleNamespace(
            hidden_states=torch.zeros(rows, 2, device=DEVICE)
        ),
        max_num_reqs=MAX_NUM_REQS,
        decode_query_len=WIDTH,
        device=DEVICE,
        vocab_size=1000,
        input_buffers=InputBuffers(MAX_NUM_REQS, MAX_NUM_REQS * WIDTH, DEVICE),
        model=SimpleNamespace(compute_logits=compute_logits),
        rejection_sampler=reject,
        speculator=SimpleNamespace(draft_logits="draft logits"),
        calls=calls,
    )


def test_points_are_ascending_and_price_logits_and_sampling(clock):
    points = measure_sample_ms(make_runner(clock))
    sizes = [size for size, _ in points]
    assert sizes == sorted(set(sizes)) and sizes[0] == WIDTH
    assert len(sizes) <= NUM_SIZES
    for size, ms in points:
        assert ms == pytest.approx((ROW_MS + SAMPLE_MS) * size)


@pytest.mark.parametrize("rows, largest", [(64, 40), (16, 15), (5, 5)])
def test_largest_size_is_a_full_decode_batch_that_fits_the_buffer(clock, rows, largest):
    assert measure_sample_ms(make_runner(clock, rows=rows))[-1][0] == largest


def test_batch_that_needs_chunks_is_not_timed(clock, monkeypatch):
    monkeypatch.setattr(module, "get_max_chunk_logits", lambda vocab_size: 12)
    assert measure_sample_ms(make_runner(clock))[-1][0] == 10


def test_first_repeat_of_a_size_is_a_warm_up(clock):
    runner = make_runner(clock, slow_first=100.0)
    points = measure_sample_ms(runner)
    assert len(runner.calls) == NUM_REPEATS * len(points)
    for size, ms in points:
        assert ms == pytest.approx((ROW_MS + SAMPLE_MS) * size)


def test_times_are_read_after_waiting_for_the_device(clock):
    points = measure_sample_ms(make_runner(clock))
    assert clock.waits == NUM_REPEATS * len(points)


@pytest.mark.parametrize("rows", [None, WIDTH - 1])
def test_without_a_graph_for_one_request_nothing_is_measured(clock, rows):
    runner = make_runner(clock, rows=rows or 64)
    if rows is None:
        runner.cudagraph_manager.hidden_states = None
    assert measure_sample_ms(runner) == []
    assert not runner.calls


@pytest.mark.parametrize("num_reqs", [1, 3, MAX_NUM_REQS])
def test_dummy_batch_verifies_k_drafts_a_request(num_reqs):
    batch = dummy_verify_batch(make_runner(), num_reqs)
    num_logits = num_reqs * WIDTH
    slots, places = divmod(np.arange(num_logits), WIDTH)
    np.testing.assert_array_equal(batch.logits_indices.cpu(), np.arange(num_logits))
    np.testing.assert_array_equal(batch.expanded_idx_mapping.cpu(), slots)
    np.testing.assert_array_equal(batch.expanded_local_pos.cpu(), places)
    np.testing.assert_array_equal(batch.cu_num_logits.cpu(), batch.cu_num_logits_np)
    assert np.diff(batch.cu_num_logits_np).tolist() == [WIDTH] * num_reqs
    assert batch.num_draft_tokens == num_reqs * (WIDTH - 1)
