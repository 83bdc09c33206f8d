# SPDX-License-Identifier: Apache-2.0
"""vLLM's API server with the fast interpreter: python -m tests.helpers.fast_server ...

The engine core is a process of its own. Forked, it inherits the swap below; spawned,
it imports this module again under another name and makes the swap itself.
"""

import runpy

from tests.helpers.fast_interpreter import fast_interpreter

_swap = fast_interpreter()
_swap.__enter__()  # for as long as the process lives

if __name__ == "__main__":
    # Without alter_sys this module stays the main one, which a spawned child imports.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
