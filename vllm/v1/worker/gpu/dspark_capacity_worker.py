# SPDX-License-Identifier: Apache-2.0
"""Worker class of the capacity feature: installs the worker seams, swaps the runner.

Named as ``parallel_config.worker_cls`` by the speculative config when a capacity key
is set, so stock deployments never import it.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm.config.dspark_capacity import DSparkCapacityConfig
from vllm.config.dspark_environ import DSparkCapacityEnv
from vllm.config.dspark_values import bad_value
from vllm.logger import init_logger
from vllm.plugins.dspark_capacity.seam import Scope
from vllm.v1.worker.gpu.spec_decode.dspark.capacity_native import pick_admission
from vllm.v1.worker.gpu.spec_decode.dspark.cost_cache import prepare_directory
from vllm.v1.worker.gpu_worker import Worker

logger = init_logger(__name__)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.dspark_capacity_model_runner import (
        DSparkCapacityModelRunner,
    )


def prepare_cost_cache(config: DSparkCapacityConfig) -> Path | None:
    """Return the directory of the cost cache, ready for writing; None if it is off.

    Raises:
        DSparkCapacityConfigError: It cannot be made or written to on this machine.
    """
    if config.dspark_sps_cache == "off":
        return None
    try:
        return prepare_directory(config.dspark_sps_cache)
    except OSError as e:
        raise bad_value(
            "dspark_sps_cache",
            config.dspark_sps_cache,
            allowed=f'"off" or a directory that can be written to ({e})',
            way_out='Give another directory or "off"',
        ) from e


def make_capacity_model_runner(
    vllm_config: "VllmConfig", device: torch.device
) -> "DSparkCapacityModelRunner":
    """Install the worker seams in this process and build the capacity runner.

    Args:
        vllm_config: Config whose ``speculative_config`` has capacity keys.
        device: Device of this rank.

    Raises:
        SeamError: This vLLM does not fit the seam table; nothing was changed.
        DSparkCapacityConfigError: The cost cache cannot be written to, or the
            admission operator that is selected cannot run here.
    """
    from vllm.plugins.dspark_capacity.seams import install

    install(Scope.WORKER)
    config = vllm_config.speculative_config.capacity_config
    cache_directory = prepare_cost_cache(config)
    # Here, before any weight is loaded; the capacity manager picks it again.
    pick_admission(DSparkCapacityEnv.from_environ(os.environ).admission_op, device)
    from vllm.v1.worker.gpu.dspark_capacity_model_runner import (
        DSparkCapacityModelRunner,
    )

    runner = DSparkCapacityModelRunner(vllm_config, device)
    runner.cost_cache_directory = cache_directory
    return runner


class DSparkCapacityWorker(Worker):
    """GPU worker whose model runner has load-aware DSpark capacity."""

    def _make_model_runner(self) -> "DSparkCapacityModelRunner":
        return make_capacity_model_runner(self.vllm_config, self.device)
