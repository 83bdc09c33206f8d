# SPDX-License-Identifier: Apache-2.0
"""The ``VLLM_DSPARK_*`` environment variables, checked.

Pure: standard library only (plus the readers beside it). The variables operate
and debug the feature; what it does is configured by keys
(:mod:`vllm.config.dspark_capacity`).

Invariants (pinned by tests/config/test_dspark_environ.py):
  * An unset or empty variable means its default.
  * A misspelt ``VLLM_DSPARK_*`` name is an error, never ignored.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config.dspark_values import (
    DSparkCapacityConfigError,
    bad_value,
    read_number,
    unknown_name,
)

# No underscore behind it: VLLM_DSPARK alone is a mistake too.
PREFIX = "VLLM_DSPARK"
_BOOLS = {"1": True, "true": True, "0": False, "false": False}


def _read_bool(name: str, text: str) -> bool:
    value = _BOOLS.get(text.lower())
    if value is None:
        raise _bad_variable(name, text, "0, 1, true or false")
    return value


def _read_int(low: int, high: int | None = None) -> Callable[[str, str], int]:
    def read(name: str, text: str) -> int:
        # int() alone would accept 1_0 and other scripts' digits.
        if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            value = int(text)
            if value >= low and (high is None or value <= high):
                return value
        bound = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise _bad_variable(name, text, f"an integer {bound}")

    return read


def _read_seconds(name: str, text: str) -> float:
    try:
        # float() alone would accept 1_0 and other scripts' digits.
        if not re.fullmatch(r"[0-9.eE+-]+", text):
            raise ValueError(text)
        return read_number(name, float(text), low=0)
    except ValueError:
        raise _bad_variable(
            name, text, "a finite number of seconds >= 0 (0 = off)"
        ) from None


def _read_choice(*allowed: str) -> Callable[[str, str], str]:
    def read(name: str, text: str) -> str:
        if text not in allowed:
            raise _bad_variable(name, text, " or ".join(map(repr, allowed)))
        return text

    return read


def _read_sizes(name: str, text: str) -> tuple[int, ...]:
    read = _read_int(1)
    try:
        return tuple(sorted({read(name, part.strip()) for part in text.split(",")}))
    except DSparkCapacityConfigError:
        # The whole value: a part may be empty, and a user looks for what was set.
        raise _bad_variable(name, text, "integers >= 1, comma-separated") from None


def _bad_variable(name: str, text: str, allowed: str) -> DSparkCapacityConfigError:
    return bad_value(
        name, text, allowed=allowed, way_out=f"Correct the variable or unset {name}"
    )


@dataclass(frozen=True)
class DSparkCapacityEnv:
    """Checked environment variables. Build it with :meth:`from_environ`."""

    activation_batch_size: int = 0
    """VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE, requests >= 0. Capacity acts from
    this many running requests; 0: the knee found from the cost curves."""
    dynamic_draft_depth: bool = True
    """VLLM_DSPARK_DYNAMIC_DRAFT_DEPTH. Off: always draft K tokens."""
    draft_depth_window: int = 8
    """VLLM_DSPARK_DYNAMIC_DRAFT_DEPTH_WINDOW, steps >= 1 that a depth change looks
    back on."""
    min_draft_depth: int = 1
    """VLLM_DSPARK_DYNAMIC_DRAFT_MIN_DEPTH in [0, K]. 0 allows steps without
    drafts."""
    log_interval_s: float = 0.0
    """VLLM_DSPARK_CAPACITY_LOG_INTERVAL, seconds >= 0 between log lines. 0: off."""
    sts_log_interval_s: float = 0.0
    """VLLM_DSPARK_STS_LOG_INTERVAL, seconds >= 0 between calibration lines. 0:
    off."""
    tp_check: int = 0
    """VLLM_DSPARK_TP_CHECK. 0: off; 1: check that ranks agree; 2: and dump."""
    cpu_rehearsal: bool = False
    """VLLM_DSPARK_CPU_REHEARSAL. Run the GPU model runner on a CPU, to test."""
    profile_repeats: int = 3
    """VLLM_DSPARK_PROFILE_REPEATS >= 1. Times that each batch is timed at start."""
    profile_warmup: int = 0
    """VLLM_DSPARK_PROFILE_WARMUP >= 0. Runs of each batch before it is timed."""
    profile_sizes: tuple[int, ...] = ()
    """VLLM_DSPARK_PROFILE_SIZES, comma-separated requests >= 1 at which every depth
    is timed. Empty: spread over the captured sizes."""
    admission_op: str = "auto"
    """VLLM_DSPARK_ADMISSION_OP: what ranks drafts, ``triton``, ``native`` (the library
    that setup.py builds where there is a compiler) or ``auto``: native on a GPU if it
    is there, else triton."""
    given: frozenset[str] = frozenset()
    """Names of the fields whose variable was set."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "DSparkCapacityEnv":
        """Check the ``VLLM_DSPARK_*`` variables of ``environ``.

        Args:
            environ: Usually ``os.environ``; other variables are ignored.

        Raises:
            DSparkCapacityConfigError: Unknown name or unusable value.
        """
        values: dict[str, Any] = {}
        for name in sorted(n for n in environ if n.startswith(PREFIX)):
            if name not in VARIABLES:
                raise unknown_name(name, VARIABLES, what="environment variable")
            field, reader = VARIABLES[name]
            if text := environ[name].strip():
                values[field] = reader(name, text)
        return cls(**values, given=frozenset(values))

    def check_min_depth(self, num_speculative_tokens: int) -> None:
        """Check the smallest depth against K.

        Raises:
            DSparkCapacityConfigError: It exceeds K.
        """
        if self.min_draft_depth > num_speculative_tokens:
            raise _bad_variable(
                MIN_DEPTH_VARIABLE,
                str(self.min_draft_depth),
                f"at most num_speculative_tokens = {num_speculative_tokens}",
            )

    def check_agrees_with(self, draft_depths: tuple[int, ...]) -> None:
        """Check that no variable contradicts an explicit list of depths.

        Only variables that were set can: a list may hold 0 although the default
        smallest depth is 1.

        Args:
            draft_depths: Increasing depths, K last.

        Raises:
            DSparkCapacityConfigError: Dynamic depth is off but several depths are
                listed, or a listed depth lies below the smallest one.
        """
        if not self.dynamic_draft_depth and len(draft_depths) > 1:
            raise _bad_variable(
                DYNAMIC_DEPTH_VARIABLE,
                "0",
                f"on while dspark_draft_depths={list(draft_depths)} lists several "
                "depths",
            )
        if "min_draft_depth" in self.given and draft_depths[0] < self.min_draft_depth:
            raise _bad_variable(
                MIN_DEPTH_VARIABLE,
                str(self.min_draft_depth),
                f"at most the smallest of dspark_draft_depths={list(draft_depths)}",
            )


DYNAMIC_DEPTH_VARIABLE = "VLLM_DSPARK_DYNAMIC_DRAFT_DEPTH"
MIN_DEPTH_VARIABLE = "VLLM_DSPARK_DYNAMIC_DRAFT_MIN_DEPTH"
ADMISSION_OP_VARIABLE = "VLLM_DSPARK_ADMISSION_OP"
REHEARSAL_VARIABLE = "VLLM_DSPARK_CPU_REHEARSAL"
# Variable -> (field, reader).
VARIABLES: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "VLLM_DSPARK_CAPACITY_ACTIVATION_BATCH_SIZE": (
        "activation_batch_size",
        _read_int(0),
    ),
    DYNAMIC_DEPTH_VARIABLE: ("dynamic_draft_depth", _read_bool),
    "VLLM_DSPARK_DYNAMIC_DRAFT_DEPTH_WINDOW": ("draft_depth_window", _read_int(1)),
    MIN_DEPTH_VARIABLE: ("min_draft_depth", _read_int(0)),
    "VLLM_DSPARK_CAPACITY_LOG_INTERVAL": ("log_interval_s", _read_seconds),
    "VLLM_DSPARK_STS_LOG_INTERVAL": ("sts_log_interval_s", _read_seconds),
    "VLLM_DSPARK_TP_CHECK": ("tp_check", _read_int(0, 2)),
    "VLLM_DSPARK_PROFILE_REPEATS": ("profile_repeats", _read_int(1, 10_000)),
    "VLLM_DSPARK_PROFILE_WARMUP": ("profile_warmup", _read_int(0, 10_000)),
    "VLLM_DSPARK_PROFILE_SIZES": ("profile_sizes", _read_sizes),
    ADMISSION_OP_VARIABLE: ("admission_op", _read_choice("auto", "triton", "native")),
    REHEARSAL_VARIABLE: ("cpu_rehearsal", _read_bool),
}
