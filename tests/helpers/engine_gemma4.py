# SPDX-License-Identifier: Apache-2.0
"""Set-ups and probe for engines with the pair of ``gemma4_models``.

vLLM 0.32 and 0.33 cannot start a Gemma4 DSpark draft beside ``Gemma4ForCausalLM``: the
draft counts its layers from 0, as the target does, and no two attention layers may
have one name. In ``Gemma4ForConditionalGeneration``, which published checkpoints name,
the target's layers are those of ``language_model``. That class needs torchvision,
which the CPU environment lacks; so the class below gives the text model the same
prefix, and is otherwise the text model.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from tests.helpers import engine_depth
from tests.helpers.gemma4_models import TARGET_ARCHITECTURE
from vllm.config import VllmConfig
from vllm.model_executor.models.gemma4 import Gemma4ForCausalLM
from vllm.model_executor.models.utils import maybe_prefix


class Gemma4TextUnderPrefix(Gemma4ForCausalLM):
    """``Gemma4ForCausalLM`` whose layers are named as in the multimodal model."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        prefix = maybe_prefix(prefix, "language_model")
        super().__init__(vllm_config=vllm_config, prefix=prefix)


@contextlib.contextmanager
def target_class() -> Iterator[None]:
    """Register the target's class; for ``EngineSpec.process_setup``."""
    from vllm import ModelRegistry

    name = TARGET_ARCHITECTURE
    ModelRegistry.register_model(name, f"{__name__}:{name}")
    yield


def steady_dip_fault(worker: Any) -> None:
    """Serve three waves of PIN_LENGTH requests, the first of them at depth K.

    The second and the third wave have some steps at depth 0; in the third such a step
    stores no context K/V, which is a fault. Records get the key ``wave``.
    """
    runner = worker.model_runner
    speculator, num_steps = runner.speculator, runner.num_speculative_steps
    starts: dict[int, int] = {}

    def choose(step: int, num_requests: int) -> int:
        wave = max(num_requests - 1, 0) // engine_depth.PIN_LENGTH
        since = step - starts.setdefault(wave, step)
        dips = wave > 0 and 2 <= since < 2 + engine_depth.DIP_STEPS
        return 0 if dips else num_steps

    propose = speculator.propose

    @functools.wraps(propose)
    def note_wave_and_propose(batch: Any, *args: Any, **kwargs: Any) -> Any:
        wave = max(starts, default=0)
        if runner.depth_log:
            runner.depth_log[-1]["wave"] = wave
        if wave == 2 and kwargs.get("num_speculative_tokens") == 0:
            return speculator.draft_tokens[: batch.num_reqs]
        return propose(batch, *args, **kwargs)

    speculator.propose = note_wave_and_propose
    engine_depth._impose(worker, choose)


def log_and_classes(worker: Any) -> dict[str, Any]:
    """Return the records of the served steps and what kind of models ran."""
    runner = worker.model_runner
    draft = runner.speculator.model
    heads = ("confidence_head", "markov_head")
    attention = [
        module
        for module in runner.model.modules()
        if type(module).__name__ == "Attention"
    ]
    windows = {module.sliding_window for module in attention}
    return {
        "log": runner.depth_log,
        "target": [cls.__name__ for cls in type(runner.model).__mro__],
        "draft": [type(draft).__name__, type(draft.model).__name__],
        "heads": {name: getattr(draft.model, name) is not None for name in heads},
        "speculator": type(runner.speculator).__name__,
        "manager": type(runner.capacity).__name__,
        "head_sizes": sorted({module.head_size for module in attention}),
        "windows": sorted(windows, key=lambda window: window or 0),
    }
