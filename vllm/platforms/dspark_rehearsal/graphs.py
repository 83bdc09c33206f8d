# SPDX-License-Identifier: Apache-2.0
"""Imitated CUDA graphs and events for the CPU rehearsal.

A graph is the closure that was captured. Its replay calls the closure again: inputs
come from the same static buffers, so padding, dispatch and buffer aliasing behave
as on a GPU. Python attributes are read anew, which a CUDA graph would not do.

Invariants (pinned by tests/platforms/test_dspark_cpu_rehearsal.py):
  * A replay runs the closure captured under the same descriptor, once.
  * ``replay_serial()`` changes with every replay and is 0 outside one.
  * Events read the wall clock, so profiled costs are real milliseconds.
"""

import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from vllm.config.compilation import CUDAGraphMode

# Enough for every test run; a long-lived server must not grow.
_MAX_REPLAY_LOG = 4096


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a replay ran: the manager's class name and the descriptor's shape."""

    manager: str
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None
    max_query_len: int | None


@dataclass(slots=True)
class _State:
    """Per-process state: the closure being captured and the replays so far."""

    pending: tuple[GraphKey, Callable[[CUDAGraphMode], None]] | None = None
    serial: int = 0
    current: int = 0


_state = _State()
replay_log: deque[GraphKey] = deque(maxlen=_MAX_REPLAY_LOG)
captured: Counter[GraphKey] = Counter()


def replay_serial() -> int:
    """Return the number of the replay in progress, 0 outside a replay."""
    return _state.current


class RehearsalGraph:
    """Stands in for ``torch.cuda.CUDAGraph``: created, recorded once, replayed."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._key: GraphKey | None = None
        self._forward: Callable[[CUDAGraphMode], None] | None = None

    def record_pending(self) -> None:
        """Take over the closure of the capture in progress.

        Raises:
            RuntimeError: No capture is in progress, or it was recorded already.
        """
        if _state.pending is None:
            raise RuntimeError(
                "torch.cuda.graph was entered outside CudaGraphManager.capture; the "
                "CPU rehearsal knows no closure to record. Capture through "
                "CudaGraphManager.capture, or unset VLLM_DSPARK_CPU_REHEARSAL."
            )
        (self._key, self._forward), _state.pending = _state.pending, None
        captured[self._key] += 1

    def replay(self) -> None:
        """Run the recorded closure on its static buffers."""
        if self._forward is None or self._key is None:
            raise RuntimeError("replay of a graph that was never captured")
        _state.serial += 1
        outer, _state.current = _state.current, _state.serial
        try:
            self._forward(CUDAGraphMode.NONE)
        finally:
            _state.current = outer
        replay_log.append(self._key)

    def reset(self) -> None:
        """Forget the closure, as destroying a CUDA graph frees its kernels."""
        self._forward = None


class RecordGraph:
    """Stands in for the context manager ``torch.cuda.graph``."""

    def __init__(
        self, cuda_graph: RehearsalGraph, pool: Any = None, stream: Any = None, **_: Any
    ) -> None:
        self._graph = cuda_graph

    def __enter__(self) -> None:
        self._graph.record_pending()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass


class RehearsalEvent:
    """Stands in for ``torch.cuda.Event``; everything is synchronous here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the wall-clock time."""
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Do nothing: earlier work is finished."""

    def synchronize(self) -> None:
        """Do nothing: earlier work is finished."""

    def query(self) -> bool:
        """Return True: earlier work is finished."""
        return True

    def elapsed_time(self, end_event: "RehearsalEvent") -> float:
        """Return the milliseconds from this event to ``end_event``."""
        return (end_event._recorded_s - self._recorded_s) * 1e3


def wrap_capture(original: Callable[..., None]) -> Callable[..., None]:
    """Let imitated graphs see the closures that a capture creates.

    Args:
        original: ``CudaGraphManager.capture``.

    Returns:
        The replacement; it notes each closure just before it is captured.
    """

    @functools.wraps(original)
    def capture(
        self: Any, create_forward_fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        def create_and_note(desc: Any, warmup: bool) -> Callable[..., None]:
            forward = create_forward_fn(desc, warmup=warmup)
            key = GraphKey(
                type(self).__name__,
                desc.num_tokens,
                desc.num_reqs,
                desc.uniform_token_count,
                desc.max_query_len,
            )
            _state.pending = (key, forward)
            return forward

        try:
            original(self, create_and_note, *args, **kwargs)
        finally:
            _state.pending = None

    return capture


@contextmanager
def graph_capture(device: Any) -> Iterator[None]:
    """Stand in for vLLM's ``graph_capture``: no stream or communicator to prepare."""
    yield


def wrap_get_global_graph_pool(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hand out one made-up memory pool: there is no graph memory to share."""

    @functools.wraps(original)
    def get_global_graph_pool(self: Any) -> tuple[int, int]:
        return (0, 0)

    return get_global_graph_pool
