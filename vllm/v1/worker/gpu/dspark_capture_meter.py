# SPDX-License-Identifier: Apache-2.0
"""What graph capture costs, apart for fixed K and for what capacity adds.

Invariants (pinned by tests/v1/worker/gpu/test_dspark_capture_meter.py):
  * Every captured graph counts once, in the share of its descriptor.
  * Seconds and memory of the shares add up to those of the whole capture.
  * The free memory is asked for twice a capture, not for every graph: beside other
    processes on the GPU a query takes tens of milliseconds.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CreateForwardFn,
    CudaGraphManager,
)

FIXED = "fixed K"


@dataclass(slots=True)
class Share:
    """Cost of some graphs.

    Attributes:
        num_graphs: Graphs captured.
        seconds: Time, warm-up runs included.
        num_bytes: Its part, by number of graphs, of the GPU memory that was free
            before the capture and is not after. Graphs share a pool that the largest
            ones fill, so what remains is the graphs themselves. Negative where other
            processes gave back more meanwhile: then nothing is known of it.
    """

    num_graphs: int = 0
    seconds: float = 0.0
    num_bytes: int = 0

    def __add__(self, other: "Share") -> "Share":
        return Share(
            self.num_graphs + other.num_graphs,
            self.seconds + other.seconds,
            self.num_bytes + other.num_bytes,
        )

    def __str__(self) -> str:
        memory = f"{self.num_bytes / (1 << 30):.2f} GiB"
        if self.num_bytes < 0:
            memory = "memory unknown"
        return f"{self.num_graphs} graphs, {self.seconds:.1f} s, {memory}"


class CaptureMeter:
    """Sorts a capture's cost into shares. ``start`` before each graph; ``stop``."""

    def __init__(self) -> None:
        self.shares: dict[str, Share] = {}
        self._open: tuple[str, float] | None = None
        self._free_before = 0

    def start(self, name: str) -> None:
        """Close the running share and open another."""
        if not self.shares:
            self._free_before = _free_bytes()
        self._close()
        self.shares.setdefault(name, Share())
        self._open = (name, time.perf_counter())

    def stop(self) -> None:
        """Close the running share and deal the memory out; nothing if none is."""
        if self._open is None:
            return
        self._close()
        used = self._free_before - _free_bytes()
        num_graphs = sum(share.num_graphs for share in self.shares.values())
        for share in self.shares.values():
            share.num_bytes = used * share.num_graphs // num_graphs

    def _close(self) -> None:
        if self._open is None:
            return
        name, start = self._open
        self._open = None
        self.shares[name] += Share(1, time.perf_counter() - start)


def _free_bytes() -> int:
    return int(torch.accelerator.get_memory_info()[0])


class MeteredCapture(CudaGraphManager):
    """Meters every captured graph. Sits below a manager in its bases."""

    capture_meter: CaptureMeter | None = None

    def share_of(self, desc: BatchExecutionDescriptor) -> str:
        """Return the share of a graph: that of fixed K, a depth, or varlen."""
        if desc.cg_mode != CUDAGraphMode.FULL:
            return FIXED
        if desc.max_query_len:
            return "varlen"
        width = desc.uniform_token_count
        if width is None or width == self.decode_query_len:
            return FIXED
        full = self.vllm_config.num_speculative_tokens
        return f"depth {full - (self.decode_query_len - width)}"

    def capture(
        self, create_forward_fn: CreateForwardFn, *args: Any, **kwargs: Any
    ) -> None:
        """Capture as the base does, and meter it."""
        meter = self.capture_meter = CaptureMeter()

        def create_and_meter(
            desc: BatchExecutionDescriptor, warmup: bool
        ) -> Callable[[CUDAGraphMode], None]:
            if warmup:
                meter.start(self.share_of(desc))
            return create_forward_fn(desc, warmup=warmup)

        super().capture(create_and_meter, *args, **kwargs)
        meter.stop()


def describe_capture(
    managers: Iterable[CudaGraphManager | None], profile_s: float
) -> str:
    """Return one line: fixed K's share, and what capacity adds to it.

    Args:
        managers: Of target and drafter; those without a meter are left out.
        profile_s: Seconds of timing step costs; 0 if none were timed.
    """
    shares: dict[str, Share] = {}
    for manager in managers:
        meter = getattr(manager, "capture_meter", None)
        for name, share in (meter.shares if meter is not None else {}).items():
            shares[name] = shares.get(name, Share()) + share
    fixed = shares.pop(FIXED, Share())
    added = sum(shares.values(), Share())
    parts = "; ".join(f"{name}: {shares[name]}" for name in sorted(shares))
    line = f"fixed K needs {fixed}; capacity adds {added}"
    if parts:
        line += f" ({parts})"
    timed = f"{profile_s:.1f} s of timing" if profile_s else "no timing"
    return f"{line} and {timed} of step costs"
