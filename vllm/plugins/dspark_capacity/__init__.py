# SPDX-License-Identifier: Apache-2.0
"""General plugin of the overlay: ``register()`` only."""

import os


def register() -> None:
    """Teach vLLM the ``dspark_*`` keys; called by vLLM once per process.

    Runs in API servers, engine cores, workers and the model inspection child,
    before any configuration is known, hence installs CONFIG seams only (and ENVIRON
    ones where one of our variables is set). What the feature needs beyond is
    installed by the configuration that switches it on.

    Raises:
        UnsupportedVllmVersionError: vLLM is not a supported release.
        DSparkCapacityConfigError: A ``VLLM_DSPARK_*`` variable is unusable.
        SeamError: The running vLLM does not fit a CONFIG row.
    """
    import vllm
    from vllm.config.dspark_environ import DSparkCapacityEnv
    from vllm.plugins.dspark_capacity.checks import check_vllm_version
    from vllm.plugins.dspark_capacity.seam import Scope
    from vllm.plugins.dspark_capacity.seams import install

    check_vllm_version(vllm.__version__)
    env = DSparkCapacityEnv.from_environ(os.environ)
    install(Scope.CONFIG)
    if env.given:
        install(Scope.ENVIRON)
    if env.cpu_rehearsal:
        from vllm.platforms import dspark_cpu_rehearsal

        dspark_cpu_rehearsal.install()
