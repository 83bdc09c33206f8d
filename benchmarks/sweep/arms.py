# SPDX-License-Identifier: Apache-2.0
"""What an arm name means: what is served, and how it trims or which depth it holds."""

import re
from dataclasses import dataclass
from typing import Any

_NAME = re.compile(
    r"(none)|(fixed|upstream|capacity|pinned|depths|half|mask|zero)"
    r"([1-9][0-9]?|(?<=pinned)0)"
)
ALLOWED = (
    "none, fixedD, upstreamK, capacityK, pinnedD, depthsK, or halfK, maskK and zeroK, "
    "which trim (numbers from 1; pinned0 too)"
)
# Trimming whatever the costs: half of the drafts in a compact batch or in one of
# fixed shape, or all of them.
_TRIMMING: dict[str, dict[str, Any]] = {
    "half": {"dspark_budget_frac": 0.5},
    "mask": {
        "dspark_budget_frac": 0.5,
        "dspark_capacity_verification_mode": "mask",
    },
    "zero": {"dspark_confidence_threshold": 1.0},
}


@dataclass(frozen=True)
class Arm:
    """One configuration of the sweep.

    Attributes:
        name: As given.
        kind: ``none``, ``fixed``, ``upstream``, ``capacity``, ``pinned`` (one depth is
            held), ``depths`` (each load says which depth 0..K is held), ``half``,
            ``mask`` or ``zero`` (see ``_TRIMMING``).
        depth: ``num_speculative_tokens``; for ``pinned`` the depth to hold.
    """

    name: str
    kind: str
    depth: int

    @classmethod
    def parse(cls, name: str) -> "Arm":
        """Read an arm name.

        Raises:
            ValueError: It is not one of the allowed forms.
        """
        match = _NAME.fullmatch(name.strip())
        if match is None:
            raise ValueError(f"unknown arm {name!r}; allowed: {ALLOWED}")
        if match[1]:
            return cls(match[0], "none", 0)
        return cls(match[0], match[2], int(match[3]))

    @property
    def holds_depth(self) -> bool:
        """Whether the engine drafts at a given depth at every load."""
        return self.kind in ("pinned", "depths")

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables of the engine: without a knee, where it must act."""
        if not self.holds_depth and self.kind not in _TRIMMING:
            return {}
        return {"VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": "1"}

    def num_speculative_tokens(self, full_depth: int) -> int:
        """Return K of the engine: ``full_depth`` where the arm pins a depth below."""
        return max(full_depth, self.depth) if self.kind == "pinned" else self.depth

    def speculative_config(
        self, draft: str | None, full_depth: int, method: str = "dspark"
    ) -> dict[str, Any] | None:
        """Return the ``--speculative-config`` of this arm, without acceptance keys.

        Args:
            draft: Draft checkpoint; None for one that is part of the target's.
            full_depth: K of ``pinned`` arms.
            method: ``dspark`` or ``dflash``.
        """
        if self.kind == "none":
            return None
        num_tokens = self.num_speculative_tokens(full_depth)
        config: dict[str, Any] = {
            "method": method,
            "num_speculative_tokens": num_tokens,
        }
        if draft is not None:
            config["model"] = draft
        if self.kind == "upstream":
            config["enable_adaptive_verification"] = True
        elif self.kind == "capacity":
            config["dspark_sps_curve"] = "auto"
        elif self.kind in _TRIMMING:
            config |= _TRIMMING[self.kind]
        elif self.holds_depth:
            # A flat curve: no plan ever leaves "verify everything". DFlash drafts are
            # never trimmed and take no curve.
            flat = [[1, 100.0], [1_000_000, 100.0]]
            config["dspark_sps_curve"] = flat if method == "dspark" else "auto"
            enabled = range(num_tokens) if self.kind == "depths" else [self.depth]
            config["dspark_draft_depths"] = sorted({*enabled, num_tokens})
        return config


def variants_of(arm: Arm) -> list[tuple[str, int | None]]:
    """Return the names and held depths under which an arm is looked at."""
    if arm.kind != "depths":
        return [(arm.name, None)]
    return [(f"depth {d} of {arm.depth}", d) for d in range(arm.depth + 1)]
