# SPDX-License-Identifier: Apache-2.0
"""A Triton backend named ``cpu`` for the rehearsal: it interprets, never compiles.

vLLM decides at import whether Triton is usable, and on its CPU build it asks only
whether a backend of this name is *present*. A ``triton.backends`` entry point is
present always, so it would change stock vLLM-CPU too. Hence the entry is made by
a platform plugin, which vLLM calls just before it looks, and only if
``VLLM_DSPARK_CPU_REHEARSAL`` is set.

This package lies outside ``vllm`` and imports neither vLLM nor torch on import:
vLLM is half imported when the plugin runs.

Invariants (pinned by tests/vllm_dspark_triton_cpu/test_triton_cpu.py):
  * Without the variable the plugin imports nothing and changes nothing.
  * With it and TRITON_INTERPRET, HAS_TRITON is true on a CPU build and kernels
    are interpreted.
"""

import logging
import os

BACKEND_NAME = "cpu"  # the name that vLLM looks for; Triton has none such
REHEARSAL_VARIABLE = "VLLM_DSPARK_CPU_REHEARSAL"
INTERPRET_VARIABLE = "TRITON_INTERPRET"
_TRUE = ("1", "true")

logger = logging.getLogger(__name__)


def rehearsal_requested() -> bool:
    """Tell whether the environment asks for the CPU rehearsal."""
    return os.environ.get(REHEARSAL_VARIABLE, "").strip().lower() in _TRUE


def interpreter_requested() -> bool:
    """Tell whether the environment makes Triton interpret its kernels."""
    return os.environ.get(INTERPRET_VARIABLE, "").strip().lower() in _TRUE


def register_triton_backend() -> None:
    """Add the backend to Triton's registry if the rehearsal is asked for.

    A ``vllm.platform_plugins`` entry point. The answer None leaves the choice of
    the platform to vLLM. ``TRITON_INTERPRET`` must come from outside: importing
    vLLM imports torch and Triton before any plugin runs, and Triton reads the
    variable when its own library is imported. Without it nothing is registered,
    which leaves vLLM's HAS_TRITON false.
    """
    if not rehearsal_requested():
        return
    if not interpreter_requested():
        # vLLM drops what a platform plugin raises, so this cannot be an error.
        logger.error(
            "%s is set without %s. Set both before Python starts: export %s=1",
            REHEARSAL_VARIABLE,
            INTERPRET_VARIABLE,
            INTERPRET_VARIABLE,
        )
        return
    from triton.backends import Backend, backends

    from vllm_dspark_triton_cpu.compiler import InterpreterBackend
    from vllm_dspark_triton_cpu.driver import InterpreterDriver

    backends.setdefault(BACKEND_NAME, Backend(InterpreterBackend, InterpreterDriver))
