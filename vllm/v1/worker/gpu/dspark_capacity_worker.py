# SPDX-License-Identifier: Apache-2.0
"""Worker class of the capacity feature: installs the worker seams, swaps the runner.

Named as ``parallel_config.worker_cls`` by the speculative config when a capacity key
is set, so stock deployments never import it.
"""

import os
from typing import TYPE_CHECKING

import torch

from vllm.config.dspark_capacity import DSparkCapacityConfig
from vllm.config.dspark_environ import DSparkCapacityEnv
from vllm.logger import init_logger
from vllm.plugins.dspark_capacity.seam import Scope
from vllm.v1.worker.gpu_worker import Worker

logger = init_logger(__name__)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.dspark_capacity_model_runner import (
        DSparkCapacityModelRunner,
    )


def warn_not_built(config: DSparkCapacityConfig, env: DSparkCapacityEnv) -> None:
    """Log each setting that is understood but that this release does not act on.

    Args:
        config: The capacity keys.
        env: The operational switches.
    """
    for name, value, given in (
        ("dspark_online_sts", config.dspark_online_sts, config.dspark_online_sts),
        (
            "dspark_sps_cache",
            config.dspark_sps_cache,
            config.dspark_sps_cache != "off",
        ),
        (
            "VLLM_DSPARK_STS_LOG_INTERVAL",
            env.sts_log_interval_s,
            env.sts_log_interval_s,
        ),
        ("VLLM_DSPARK_CAPACITY_LOG_INTERVAL", env.log_interval_s, env.log_interval_s),
    ):
        if given:
            logger.warning_once(
                "%s=%s has no effect in this release: confidences are used as the "
                "draft reports them, costs are measured at every start, and the "
                "statistics line of vLLM carries the capacity figures.",
                name,
                value,
            )


def make_capacity_model_runner(
    vllm_config: "VllmConfig", device: torch.device
) -> "DSparkCapacityModelRunner":
    """Install the worker seams in this process and build the capacity runner.

    Args:
        vllm_config: Config whose ``speculative_config`` has capacity keys.
        device: Device of this rank.

    Raises:
        SeamError: This vLLM does not fit the seam table; nothing was changed.
    """
    from vllm.plugins.dspark_capacity.seams import install

    install(Scope.WORKER)
    warn_not_built(
        vllm_config.speculative_config.capacity_config,
        DSparkCapacityEnv.from_environ(os.environ),
    )
    from vllm.v1.worker.gpu.dspark_capacity_model_runner import (
        DSparkCapacityModelRunner,
    )

    return DSparkCapacityModelRunner(vllm_config, device)


class DSparkCapacityWorker(Worker):
    """GPU worker whose model runner has load-aware DSpark capacity."""

    def _make_model_runner(self) -> "DSparkCapacityModelRunner":
        return make_capacity_model_runner(self.vllm_config, self.device)
