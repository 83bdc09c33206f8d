# SPDX-License-Identifier: Apache-2.0
"""A DFlash draft made of the bundled DSpark one, without its Markov and other heads.

It was trained for another layout, so it is right about one token in ten. Outputs do
not depend on that; how deep it pays to draft does.
"""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

_HEADS = ("markov_head", "confidence_head")
_HEAD_KEYS = {
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
}


def write_dflash_draft(
    dspark_draft: str, path: Path, *, causal: bool, architecture: str | None = None
) -> str:
    """Write a DFlash checkpoint; return its directory.

    Args:
        dspark_draft: Directory of the bundled DSpark draft.
        path: Directory to make.
        causal: Whether a drafted position sees only those before it, so that drafts
            do not depend on how many follow.
        architecture: Instead of DFlashDraftModel.
    """
    source = Path(dspark_draft)
    path.mkdir(parents=True)
    weights = load_file(source / "model.safetensors")
    body = {k: v for k, v in weights.items() if not k.startswith(_HEADS)}
    save_file(body, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config = {k: v for k, v in config.items() if k not in _HEAD_KEYS}
    config["architectures"] = [architecture or "DFlashDraftModel"]
    config["dflash_config"] = config["dflash_config"] | {"causal": causal}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)
