# SPDX-License-Identifier: Apache-2.0
"""Config-only checkpoints and a restorable plugin state, for tests of configuration.

The checkpoints hold a config.json and nothing else: enough to build an engine
configuration, not to load weights.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DRAFT: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 1,
    "block_size": 7,
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "num_target_layers": 2,
    "target_layer_ids": [0, 1],
    "mask_token_id": 127,
    "dflash_config": {"mask_token_id": 127, "target_layer_ids": [0, 1]},
}


def write_checkpoint(path: Path, **config: Any) -> str:
    """Write ``config.json`` on top of the common keys; return the directory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_COMMON | config))
    return str(path)


def write_target(path: Path) -> str:
    """Write a two-layer Qwen3 target."""
    return write_checkpoint(
        path, architectures=["Qwen3ForCausalLM"], num_hidden_layers=2
    )


def write_draft(path: Path, **changes: Any) -> str:
    """Write a one-layer DSpark draft of block size 7 with a confidence head."""
    return write_checkpoint(path, **(_DRAFT | changes))


@contextlib.contextmanager
def clean_plugin_state() -> Iterator[None]:
    """Start without any seam; afterwards put back exactly what was installed.

    vLLM does not load plugins by itself within the block: the caller registers.
    """
    import vllm
    import vllm.plugins
    from vllm.plugins.dspark_capacity import seam
    from vllm.plugins.dspark_capacity.seams import SEAMS

    before, loaded = seam.applied_ids(), vllm.plugins.plugins_loaded
    seam.remove(before)
    vllm.plugins.plugins_loaded = True
    try:
        yield
    finally:
        seam.remove(seam.applied_ids())
        seam.apply((s for s in SEAMS if s.id in before), vllm.__version__)
        vllm.plugins.plugins_loaded = loaded


@contextlib.contextmanager
def registered_without_rehearsal(monkeypatch: Any) -> Iterator[None]:
    """Register as a process without the rehearsal does, from a clean state.

    On a CPU the variable is set afterwards, because the configuration asks for it;
    the platform itself is not rehearsed in this process.
    """
    from vllm.platforms import current_platform
    from vllm.plugins import dspark_capacity

    monkeypatch.delenv("VLLM_DSPARK_CPU_REHEARSAL", raising=False)
    with clean_plugin_state():
        dspark_capacity.register()
        if current_platform.is_cpu():
            monkeypatch.setenv("VLLM_DSPARK_CPU_REHEARSAL", "1")
            # For vLLM's model inspection child, which registers on its own.
            monkeypatch.setenv("TRITON_INTERPRET", "1")
        yield
