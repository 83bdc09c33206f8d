# SPDX-License-Identifier: Apache-2.0
"""The worker of the CPU rehearsal: vLLM's CPU worker around the V2 GPU runner."""

from collections import Counter
from typing import Any

# First: it replaces the torch.cuda names that vllm.v1.worker.gpu binds on import.
from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip

import torch

from vllm.config import VllmConfig
from vllm.platforms.dspark_rehearsal import graphs
from vllm.plugins.dspark_capacity import seam, seams
from vllm.v1.worker.workspace import init_workspace_manager

# Lanes that vLLM's GPU worker gives its workspace for target and DSpark drafter.
_WORKSPACE_LANES = 2

_building: "RehearsalWorker | None" = None


class RehearsalWorker(CPUWorker):
    """Start: install seams, build the runner, load, capture; then steps as usual."""

    def init_device(self) -> None:
        """Install the worker seams, then initialise as ``CPUWorker`` does."""
        global _building
        graphs.captured.clear()  # of an earlier engine in this process
        seams.install(seam.Scope.REHEARSAL_WORKER)
        # The CPU worker skips this; the V2 runner locks the workspace after capture.
        init_workspace_manager(torch.device("cpu"), num_lanes=_WORKSPACE_LANES)
        _building = self
        try:
            super().init_device()
        finally:
            _building = None

    def _make_rehearsal_runner(self) -> Any:
        """Return the model runner: the capacity feature's when it is on."""
        speculative_config = self.vllm_config.speculative_config
        if getattr(speculative_config, "capacity_enabled", False):
            from vllm.v1.worker.gpu.dspark_capacity_worker import (
                make_capacity_model_runner,
            )

            return make_capacity_model_runner(self.vllm_config, self.device)
        stock = seam.original_of("rehearsal.model-runner")
        return stock(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        """Capture the imitated graphs; ``CPUWorker`` resets the seed afterwards."""
        if self.model_runner.needs_cudagraph_capture():
            self.model_runner.capture_model()
        graphs.replay_log.clear()
        return super().compile_or_warm_up_model()

    def rehearsal_report(self) -> dict[str, Any]:
        """Return what the imitated graphs did, for tests (``collective_rpc``).

        Returns:
            ``captured`` and ``replays``: lists of ``[key, count]``, where key is
            [manager, num_tokens, num_reqs, uniform_token_count, max_query_len];
            ``order``: keys of the latest replays, oldest first.
        """

        def rows(counts: Counter[graphs.GraphKey]) -> list[list[Any]]:
            return [[_as_list(key), count] for key, count in counts.items()]

        return {
            "captured": rows(graphs.captured),
            "replays": rows(Counter(graphs.replay_log)),
            "order": [_as_list(key) for key in graphs.replay_log],
        }

    def reset_rehearsal_report(self) -> None:
        """Forget the replays so far."""
        graphs.replay_log.clear()


def _as_list(key: graphs.GraphKey) -> list[Any]:
    return [
        key.manager,
        key.num_tokens,
        key.num_reqs,
        key.uniform_token_count,
        key.max_query_len,
    ]


def build_model_runner(vllm_config: VllmConfig, device: torch.device) -> Any:
    """Build the runner of the worker being initialised.

    Stands in for the class that ``CPUWorker.init_device`` imports and calls.

    Raises:
        RuntimeError: Called by anything but :class:`RehearsalWorker`.
    """
    if _building is None:
        raise RuntimeError(
            "the CPU rehearsal's runner is built by RehearsalWorker only; leave "
            "worker_cls at auto, or unset VLLM_DSPARK_CPU_REHEARSAL"
        )
    return _building._make_rehearsal_runner()
