# SPDX-License-Identifier: Apache-2.0
"""The driver half of the backend: describes the CPU to Triton's runtime."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from vllm_dspark_triton_cpu import BACKEND_NAME, rehearsal_requested
from vllm_dspark_triton_cpu.compiler import refuse_to_compile

BENCHMARK_RUNS = 5  # interpreted kernels take milliseconds; more tells no more
# The quantiles that triton.testing.do_bench's callers ask for by default.
DEFAULT_QUANTILES = (0.5, 0.2, 0.8)


class InterpreterDriver(DriverBase):
    """The CPU as a Triton device; active in the rehearsal only, never by a GPU."""

    @classmethod
    def is_active(cls) -> bool:
        """Tell whether the rehearsal is asked for and no GPU driver is active."""
        if not rehearsal_requested():
            return False
        from triton.backends import backends

        return not any(
            backend.driver.is_active()
            for name, backend in backends.items()
            if name != BACKEND_NAME
        )

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Refuse: C++ types belong to a compilation."""
        refuse_to_compile()

    def get_current_target(self) -> GPUTarget:
        """Return the target; architecture and warp size mean nothing here."""
        return GPUTarget(BACKEND_NAME, 0, 0)

    def get_current_device(self) -> int:
        """Return the index of the only device."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """Return the index of the only stream."""
        return 0

    def get_active_torch_device(self) -> Any:
        """Return ``torch.device("cpu")``."""
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Sequence[float]]:
        """Return a wall-clock benchmarker: call, quantiles -> milliseconds."""

        def benchmark(
            kernel_call: Callable[[], Any],
            *,
            quantiles: Sequence[float] = DEFAULT_QUANTILES,
            **_: Any,
        ) -> list[float]:
            samples_ms = []
            for _run in range(BENCHMARK_RUNS):
                start = time.perf_counter()
                kernel_call()
                samples_ms.append((time.perf_counter() - start) * 1e3)
            return np.quantile(samples_ms, list(quantiles)).tolist()

        return benchmark
