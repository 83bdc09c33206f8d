# SPDX-License-Identifier: Apache-2.0
"""Less bookkeeping in Triton's interpreter, for tests with very many programs.

The interpreter swaps the language's functions at every call of a device function,
although the launch has done so already; that is a third of its time. Here each
module's functions are swapped once a launch. What a program computes is unchanged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime import interpreter


class _Scope:
    """What the interpreter restores at the end of a launch, and our memory with it."""

    def __init__(self, scope: Any, patched: set[int]) -> None:
        self._scope, self._patched = scope, patched

    def restore(self) -> None:
        self._scope.restore()
        self._patched.clear()


@contextmanager
def fast_interpreter() -> Iterator[None]:
    """Swap each module's language functions once a launch."""
    original, patched = interpreter._patch_lang, set()

    def patch_once(fn: Any) -> _Scope | None:
        key = id(fn.__globals__)
        if key in patched:
            return None  # a device function: nobody restores its scope
        patched.add(key)
        return _Scope(original(fn), patched)

    interpreter._patch_lang = patch_once
    try:
        yield
    finally:
        interpreter._patch_lang = original
