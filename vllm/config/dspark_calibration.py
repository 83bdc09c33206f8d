# SPDX-License-Identifier: Apache-2.0
"""The calibration of draft confidences as a value: start, saved form, checks.

Pure: standard library only (plus the readers beside it). The calibrated confidence
of draft k is a sigmoid of ``u + bend * 2 log cosh(u / 2)`` with ``u = scale * logit +
bias`` and scale = 1 / temperature; greedy and sampled requests have their own, because
the head is trained for the acceptance of *sampled* drafts. What is fitted, and how:
``.../dspark/sts_fit.py``. Version 1 of the saved form has no bends, which then are 0.

Invariants (pinned by tests/config/test_dspark_calibration.py):
  * ``from_json(to_json(c)) == c``, and the JSON holds plain numbers only.
  * Every scale is finite and positive and every bend within (-1, 1), so the order
    within a position is kept.
  * A key that nothing reads is an error that names it.
  * A calibration for more positions serves fewer (earlier positions never depend on
    later ones); one for fewer is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.config.dspark_values import (
    DSparkCapacityConfigError,
    bad_value,
    is_int,
    read_number,
    unknown_name,
)

CALIBRATION_KEY = "confidence_calibration"
CALIBRATION_SCHEMA = "vllm-dspark-confidence-calibration"
CALIBRATION_VERSION = 2
# Keys of a class by version of the saved form, all required but num_rows.
CLASS_KEYS = {
    1: ("temperature", "bias", "num_rows"),
    2: ("temperature", "bias", "bend", "num_rows"),
}
# Request classes, in the order of the device buffers.
CLASSES = ("greedy", "sampled")
# Bounds of what a file may hold: those of dspark_confidence_temperature, and biases
# beyond which every confidence is 0 or 1.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
MAX_FILE_BIAS = 20.0
# Within 1, where a slope would vanish.
MAX_FILE_BEND = 0.95

Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ConfidenceCalibration:
    """Scale, bias and bend of every class and position.

    Attributes:
        scales: 1 / temperature. Shape [2, K], by ``CLASSES``.
        biases: Added after scaling. Shape [2, K].
        bends: By how much the slope grows above probability 1/2 and falls below it,
            relative to the scale. Shape [2, K].
        num_rows: Graded rows behind each class so far. Shape [2].
    """

    scales: Table
    biases: Table
    bends: Table
    num_rows: tuple[int, ...] = (0, 0)

    @classmethod
    def uniform(
        cls, num_speculative_tokens: int, temperature: float = 1.0
    ) -> "ConfidenceCalibration":
        """Return one temperature for all positions and classes, nothing else."""
        scales = ((1.0 / temperature,) * num_speculative_tokens,) * len(CLASSES)
        zeros = ((0.0,) * num_speculative_tokens,) * len(CLASSES)
        return cls(scales, zeros, zeros)

    @property
    def num_positions(self) -> int:
        """Number of draft positions K."""
        return len(self.scales[0])

    def first(self, num_speculative_tokens: int) -> "ConfidenceCalibration":
        """Return the calibration of the first positions.

        Raises:
            DSparkCapacityConfigError: It has fewer.
        """
        if num_speculative_tokens > self.num_positions:
            raise bad_value(
                CALIBRATION_KEY,
                f"{self.num_positions} positions",
                allowed=(
                    "for at least num_speculative_tokens = "
                    f"{num_speculative_tokens} positions"
                ),
                way_out="Record it anew at this K, or remove the section",
            )
        return ConfidenceCalibration(
            tuple(row[:num_speculative_tokens] for row in self.scales),
            tuple(row[:num_speculative_tokens] for row in self.biases),
            tuple(row[:num_speculative_tokens] for row in self.bends),
            self.num_rows,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the versioned section of a curve file."""
        return {
            "schema": CALIBRATION_SCHEMA,
            "version": CALIBRATION_VERSION,
            "classes": {
                name: {
                    "temperature": [1.0 / scale for scale in self.scales[i]],
                    "bias": list(self.biases[i]),
                    "bend": list(self.bends[i]),
                    "num_rows": self.num_rows[i],
                }
                for i, name in enumerate(CLASSES)
            },
        }

    @classmethod
    def from_json(cls, value: Any) -> "ConfidenceCalibration":
        """Check a section that is already decoded JSON.

        Raises:
            DSparkCapacityConfigError: Wrong schema, version, class, length or value,
                or a key that nothing reads.
        """
        allowed = (
            f"an object with schema {CALIBRATION_SCHEMA!r} and a version of "
            f"{list(CLASS_KEYS)}"
        )
        if not isinstance(value, Mapping):
            raise _error(value, allowed)
        schema, version = value.get("schema"), value.get("version")
        keys = CLASS_KEYS.get(version) if is_int(version) else None
        if schema != CALIBRATION_SCHEMA or keys is None:
            raise _error({"schema": schema, "version": version}, allowed)
        _refuse_unknown(CALIBRATION_KEY, value, ("schema", "version", "classes"))
        classes = value.get("classes")
        if not isinstance(classes, Mapping) or set(classes) != set(CLASSES):
            raise _error(classes, f"an object with the classes {list(CLASSES)}")
        read = [_read_class(name, classes[name], keys) for name in CLASSES]
        if len({len(scales) for scales, *_ in read}) != 1:
            raise _error(classes, "of one length K in all classes")
        return cls(*zip(*read, strict=True))


def _error(value: Any, allowed: str) -> DSparkCapacityConfigError:
    return bad_value(
        CALIBRATION_KEY,
        value,
        allowed=allowed,
        way_out="Correct the section, or remove it to calibrate from the start",
    )


def _refuse_unknown(where: str, value: Mapping, known: tuple[str, ...]) -> None:
    for key in value:
        if key not in known:
            raise unknown_name(str(key), known, what=f"key of {where}")


def _read_class(
    name: str, value: Any, keys: tuple[str, ...]
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], int]:
    """Return scales, biases, bends and the number of rows."""
    lists = " and ".join(keys[:-1])
    if not isinstance(value, Mapping):
        raise _error({name: value}, f"an object with lists {lists}")
    where = f"{CALIBRATION_KEY}.{name}"
    _refuse_unknown(where, value, keys)

    def read(key: str, low: float, high: float) -> tuple[float, ...]:
        return _read_list(f"{where}.{key}", value.get(key), low, high)

    temperatures = read("temperature", MIN_TEMPERATURE, MAX_TEMPERATURE)
    biases = read("bias", -MAX_FILE_BIAS, MAX_FILE_BIAS)
    bends = (0.0,) * len(biases)
    if "bend" in keys:
        bends = read("bend", -MAX_FILE_BEND, MAX_FILE_BEND)
    num_rows = value.get("num_rows", 0)
    if not len(temperatures) == len(biases) == len(bends):
        raise _error(value, f"an object whose lists {lists} are of one length")
    if not is_int(num_rows) or num_rows < 0:
        raise _error({"num_rows": num_rows}, "an object with an integer num_rows >= 0")
    return tuple(1.0 / t for t in temperatures), biases, bends, num_rows


def _read_list(name: str, value: Any, low: float, high: float) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise _error(value, f"an object whose {name} is a non-empty list of numbers")
    return tuple(read_number(name, v, low=low, high=high) for v in value)
