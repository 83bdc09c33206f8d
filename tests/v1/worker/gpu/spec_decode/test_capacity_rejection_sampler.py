# SPDX-License-Identifier: Apache-2.0
"""The rejection sampler's mask of drafts to leave unjudged."""

import pytest
import torch

import tests.helpers.capacity_cases  # noqa: F401  (placeholders for CUDA first)
from vllm.v1.worker.gpu.spec_decode.capacity_rejection_sampler import (
    CapacityRejectionSampler,
)
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

GRAMMAR = torch.tensor([False, True, False, False])
CAPACITY = torch.tensor([False, False, False, True])


@pytest.fixture
def received(monkeypatch):
    """Return the list of arguments that upstream's sampler was called with."""
    calls = []
    monkeypatch.setattr(
        RejectionSampler, "__call__", lambda self, *args: calls.append(args) or "out"
    )
    monkeypatch.setattr(RejectionSampler, "__init__", lambda self: None)
    return calls


def test_without_a_mask_the_call_is_upstreams(received):
    assert CapacityRejectionSampler()("logits", "batch", "draft", GRAMMAR) == "out"
    assert received == [("logits", "batch", "draft", GRAMMAR)]


def test_mask_alone_is_passed_on(received):
    sampler = CapacityRejectionSampler()
    sampler.capacity_invalid_drafts = CAPACITY
    sampler("logits", "batch")
    assert received[0][3] is CAPACITY


def test_mask_is_added_to_the_grammars(received):
    sampler = CapacityRejectionSampler()
    sampler.capacity_invalid_drafts = CAPACITY
    sampler("logits", "batch", "draft", GRAMMAR)
    assert received[0][3].tolist() == [False, True, False, True]
    # Neither mask was changed in place: both belong to others.
    assert GRAMMAR.tolist() == [False, True, False, False]
    assert CAPACITY.tolist() == [False, False, False, True]


def test_mask_serves_one_call_only(received, monkeypatch):
    sampler = CapacityRejectionSampler()
    sampler.capacity_invalid_drafts = CAPACITY
    sampler("logits", "batch")
    sampler("logits", "batch")
    assert received[1][3] is None


def test_mask_is_gone_even_if_sampling_fails(received, monkeypatch):
    sampler = CapacityRejectionSampler()
    sampler.capacity_invalid_drafts = CAPACITY

    def fail(self, *args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(RejectionSampler, "__call__", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        sampler("logits", "batch")
    assert sampler.capacity_invalid_drafts is None
