# SPDX-License-Identifier: Apache-2.0
"""Step times: rank 0's, in the same step on every rank."""

import torch

from tests.helpers.capacity_cases import DEVICE, FakeGroup
from vllm.v1.worker.gpu.spec_decode.dspark.step_times import (
    EXCHANGE_INTERVAL,
    StepTimes,
)


class Link:
    """Two ranks in one process: what rank 0 broadcasts, rank 1 receives."""

    def __init__(self):
        self.sent = []

    def group(self, rank):
        def broadcast(tensor, src):
            assert src == 0
            if rank == 0:
                self.sent.append(tensor.clone())
            else:
                tensor.copy_(self.sent.pop(0))

        group = FakeGroup(world_size=2)
        group.broadcast = broadcast
        return group


def test_one_rank_reads_its_own_times_at_once_and_broadcasts_nothing():
    group = FakeGroup()
    times = StepTimes(group, DEVICE)
    times.add(2, 5.0)
    times.exchange(EXCHANGE_INTERVAL)
    assert times.take() == [(2, 5.0)]
    assert times.take() == []
    assert group.broadcasts == []


def test_ranks_take_equal_times_in_equal_steps():
    link = Link()
    ranks = [StepTimes(link.group(rank), DEVICE) for rank in range(2)]
    taken = [[], []]
    num_steps = 5 * EXCHANGE_INTERVAL
    for serial in range(1, num_steps + 1):
        for rank, times in enumerate(ranks):
            taken[rank].append(times.take())
            if serial > 2:
                times.add(serial - 2, (serial - 2) * (1.0 + rank))
            times.exchange(serial)
    assert taken[0] == taken[1]
    flat = [row for step in taken[0] for row in step]
    # Rank 0's times, each serial once and in order, but for those still on their way.
    assert [s for s, _ in flat] == list(range(1, flat[-1][0] + 1))
    assert all(ms == float(serial) for serial, ms in flat)
    assert flat[-1][0] > num_steps - 3 * EXCHANGE_INTERVAL
    assert sum(map(bool, taken[0])) <= num_steps // EXCHANGE_INTERVAL


def test_a_broadcast_is_small_and_rare():
    group = FakeGroup(world_size=2)
    times = StepTimes(group, DEVICE)
    for serial in range(1, 10 * EXCHANGE_INTERVAL + 1):
        times.add(serial, 1.0)
        times.exchange(serial)
    assert len(group.broadcasts) == 10
    assert all(t.shape == (EXCHANGE_INTERVAL,) for t in group.broadcasts)
    assert group.broadcasts[0].dtype == torch.float32


def test_an_interval_without_times_broadcasts_nothing():
    group = FakeGroup(world_size=2)
    times = StepTimes(group, DEVICE)
    times.exchange(EXCHANGE_INTERVAL)
    times.exchange(2 * EXCHANGE_INTERVAL)
    assert group.broadcasts == [] and times.take() == []
