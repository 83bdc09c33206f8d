# SPDX-License-Identifier: Apache-2.0
"""The compiler half of the backend: present because Triton wants one, never used."""

from types import ModuleType
from typing import NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget

from vllm_dspark_triton_cpu import BACKEND_NAME, INTERPRET_VARIABLE


def refuse_to_compile() -> NoReturn:
    """Say why a kernel got here and what to do.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(
        "The rehearsal's Triton backend interprets kernels and cannot compile one. "
        f"Set {INTERPRET_VARIABLE}=1 before Python starts."
    )


class InterpreterBackend(BaseBackend):
    """A backend for the target ``cpu`` that refuses every compilation."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Tell whether ``target`` is the one of our driver."""
        return target.backend == BACKEND_NAME

    def hash(self) -> str:
        """Return the identifier for Triton's compilation cache."""
        return f"{BACKEND_NAME}-interpreter"

    def parse_options(self, options: dict) -> object:
        """Refuse: options belong to a compilation."""
        refuse_to_compile()

    def add_stages(self, stages: dict, options: object, *args: object) -> None:
        """Refuse: there are no stages."""
        refuse_to_compile()

    def load_dialects(self, context: object) -> None:
        """Do nothing; the interpreter uses no dialect."""

    def get_module_map(self) -> dict[str, ModuleType]:
        """Return no device modules."""
        return {}
