# SPDX-License-Identifier: Apache-2.0
"""Strict readers for single configuration values of the DSpark capacity feature.

Pure: standard library only. vLLM's dotted command line form decodes every value
as JSON before it arrives here (``true``, ``0.5``, ``[1,3,7]``; only text that is
not JSON stays a string), so nothing is converted from strings.

Invariants (pinned by tests/config/test_dspark_values.py):
  * A bool is never a number and a string is never a number.
  * Every error names the key, the value, what is allowed and the way out.
  * A steps-per-second curve that leaves this module is finite, positive and
    strictly increasing in tokens.
"""

import difflib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

CURVE_SCHEMA = "vllm-dspark-sps-curve"
CURVE_VERSION = 1
# Full cost tables for 4096 requests and 65536 tokens are about 3 MiB.
MAX_CURVE_FILE_BYTES = 1 << 23
# Enough to recognise a value; a pasted curve must not fill the terminal.
_MAX_SHOWN_CHARS = 120
# Of one name in a path, on the file systems that Linux hosts have.
_MAX_NAME_BYTES = 255


class DSparkCapacityConfigError(ValueError):
    """A key or variable of the DSpark capacity feature has an unusable value."""


def bad_value(
    name: str, value: Any, *, allowed: str, way_out: str
) -> DSparkCapacityConfigError:
    """Return the error for one value; the caller raises it.

    Args:
        name: Key or environment variable.
        value: What was given; long values are shortened.
        allowed: What the key accepts, completing "must be ...".
        way_out: Imperative sentence without the full stop.
    """
    try:
        shown = repr(value)
    except ValueError:  # Python shows no integer of more than 4300 digits.
        shown = f"<{type(value).__name__} too long to show>"
    if len(shown) > _MAX_SHOWN_CHARS:
        shown = shown[:_MAX_SHOWN_CHARS] + "..."
    return DSparkCapacityConfigError(f"{name}={shown}: must be {allowed}. {way_out}.")


def unknown_name(
    name: str, known: Iterable[str], *, what: str
) -> DSparkCapacityConfigError:
    """Return the error for a name that nothing reads, with the nearest known one.

    Args:
        name: The unknown name.
        known: All names that are accepted in this place.
        what: Kind of name, such as ``speculative_config key``.
    """
    known = sorted(known)
    # What all begin with says nothing about which of them was meant.
    start = os.path.commonprefix(known) if len(known) > 1 else ""
    if not name.lower().startswith(start.lower()):
        start = ""
    endings = {k[len(start) :].lower(): k for k in known}
    ending = name[len(start) :].lower()
    near = difflib.get_close_matches(ending, endings, n=1, cutoff=0.6)
    hint = f" Did you mean {endings[near[0]]!r}?" if near else ""
    return DSparkCapacityConfigError(
        f"Unknown {what} {name!r}.{hint} Known: {', '.join(known)}. Correct the "
        "name or remove it."
    )


def read_number(name: str, value: Any, *, low: float, high: float = math.inf) -> float:
    """Return a finite real number within ``[low, high]`` as a float.

    Raises:
        DSparkCapacityConfigError: Not an int or float, NaN, infinite, or outside.
    """
    allowed = f"a number in [{low:g}, {high:g}]"
    if math.isinf(high):
        allowed = f"a finite number >= {low:g}"
    way_out = f"Correct {name} or leave it out for its default"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        allowed += f", not {type(value).__name__}"
    else:
        try:
            number = float(value)
        except OverflowError:  # an integer beyond the range of a double
            number = math.inf
        if math.isfinite(number) and low <= number <= high:
            return number
    raise bad_value(name, value, allowed=allowed, way_out=way_out)


def is_int(value: Any) -> bool:
    """Return whether ``value`` is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def read_choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Return ``value`` if it is one of ``choices``, of the same type.

    Raises:
        DSparkCapacityConfigError: It is none of them (1 is not true).
    """
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return value
    allowed = "one of " + ", ".join(json.dumps(c) for c in choices)
    raise bad_value(
        name,
        value,
        allowed=allowed,
        way_out=f"Correct {name} or leave it out for its default",
    )


# What a user may mean by them is not to make a directory of that name.
_SWITCH_WORDS = ("off", "on", "auto", "true", "false", "none", "null", "0", "1")


def _directory_problem(path: str) -> str:
    """Return why no directory of this path exists or could be made, else nothing."""
    if path.startswith("~"):
        return f"there is no user {path.split('/')[0][1:]!r}"
    try:
        names = os.fsencode(path).split(b"/")
    except UnicodeEncodeError:
        return "no file system can hold this text"
    if max(map(len, names)) > _MAX_NAME_BYTES:
        return f"a name in it is longer than {_MAX_NAME_BYTES} bytes"
    nearest = os.path.abspath(path)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    if not os.path.isdir(nearest):
        return f"{nearest} is not a directory"
    try:
        # Permission bits say nothing to root, nor of a file system that is read-only.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as e:
        return f"{nearest} cannot be written to ({e.strerror})"
    return ""


def read_directory(name: str, value: Any, *, off: str) -> str:
    """Return a directory that exists or could be made, or ``off``. Makes nothing.

    Raises:
        DSparkCapacityConfigError: Not a path, a file in its way, or no permission.
    """
    way_out = f'Give a directory that can be written to, or "{off}"'
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        allowed = f'"{off}" or a directory'
        raise bad_value(name, value, allowed=allowed, way_out=way_out)
    if value == off:
        return value
    if value.strip().lower() in _SWITCH_WORDS:
        allowed = f'"{off}" or a directory (a switch, misspelt, is no directory)'
        way_out = f'Give "{off}", or "./{value.strip()}" for a directory of that name'
        raise bad_value(name, value, allowed=allowed, way_out=way_out)
    problem = _directory_problem(os.path.expanduser(value))
    if problem:
        allowed = f'"{off}" or a directory, and {problem}'
        raise bad_value(name, value, allowed=allowed, way_out=way_out)
    return value


@dataclass(frozen=True, slots=True)
class SpsCurveInput:
    """A steps-per-second curve as the user gave it, checked.

    Attributes:
        points: ``(target tokens, engine steps per second)``, tokens increasing.
        document: The whole versioned object, or None for a bare list. Its extra
            keys (full cost tables) are for whoever builds costs from it.
        origin: File path, or ``inline``, for messages.
    """

    points: tuple[tuple[int, float], ...]
    document: Mapping[str, Any] | None = field(default=None, compare=False)
    origin: str = field(default="inline", compare=False)

    def to_json_value(self) -> Any:
        """Return the value that gives this curve again when read inline.

        It is stored in the engine configuration in place of a path, so that no
        other process or host has to read the file.
        """
        if self.document is not None:
            return dict(self.document)
        return [list(point) for point in self.points]


def _curve_error(origin: str, value: Any, problem: str) -> DSparkCapacityConfigError:
    name = "dspark_sps_curve"
    if origin != "inline":
        name += f" (file {origin})"
    return bad_value(
        name,
        value,
        allowed=(
            '"auto", a JSON file, or [[tokens, steps_per_s], ...] with at least two '
            "points, tokens strictly increasing integers >= 1 and finite rates > 0; "
            f"{problem}"
        ),
        way_out='Correct the curve, or use "auto" to measure one at start',
    )


# What a curve file may hold: its points, the full cost tables, a calibration, and
# where it comes from.
CURVE_KEYS = (
    *("schema", "version", "sps_curve"),
    *("draft_ms", "verify_uniform_ms", "verify_varlen_ms"),
    *("verify_context_ms", "draft_context_ms"),
    *("overhead_ms", "whole_step", "num_stalled_samples"),
    *("confidence_calibration", "measured", "env", "repro"),
)
# Bounds that no engine reaches, so that sums of step times stay finite.
MAX_CURVE_TOKENS = 1_000_000_000
MIN_CURVE_RATE = 1e-6


def _read_points(value: Any, origin: str) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        raise _curve_error(origin, value, "it is not a list of two or more points")
    points: list[tuple[int, float]] = []
    for i, point in enumerate(value):
        if not isinstance(point, (list, tuple)) or len(point) != 2:
            raise _curve_error(origin, point, f"point {i} is not a pair")
        tokens, rate = point
        if not is_int(tokens) or not 1 <= tokens <= MAX_CURVE_TOKENS:
            raise _curve_error(
                origin,
                point,
                f"point {i} has no token count in [1, {MAX_CURVE_TOKENS}]",
            )
        try:
            rate = read_number("rate", rate, low=0.0)
        except DSparkCapacityConfigError:
            rate = 0.0
        if rate < MIN_CURVE_RATE:
            raise _curve_error(
                origin, point, f"point {i} has no finite rate >= {MIN_CURVE_RATE:g}"
            )
        if points and tokens <= points[-1][0]:
            raise _curve_error(
                origin, point, f"the tokens of point {i} do not exceed the last"
            )
        points.append((tokens, rate))
    return tuple(points)


def read_sps_curve(value: Any, origin: str = "inline") -> SpsCurveInput:
    """Check a curve that is already decoded JSON.

    Args:
        value: ``[[tokens, steps_per_s], ...]`` or the versioned object
            ``{"schema": "vllm-dspark-sps-curve", "version": 1, "sps_curve":
            [...], ...}``, with any of CURVE_KEYS.
        origin: Where it came from, for messages.

    Raises:
        DSparkCapacityConfigError: Wrong shape, schema, version or point, or a key
            that nothing reads.
    """
    if not isinstance(value, Mapping):
        return SpsCurveInput(_read_points(value, origin), None, origin)
    schema, version = value.get("schema"), value.get("version")
    if schema != CURVE_SCHEMA or not is_int(version) or version != CURVE_VERSION:
        raise _curve_error(
            origin,
            {"schema": schema, "version": version},
            f"an object must have schema {CURVE_SCHEMA!r} and version {CURVE_VERSION}",
        )
    points = _read_points(value.get("sps_curve"), origin)
    for key in value:
        if key not in CURVE_KEYS:
            where = "key of dspark_sps_curve"
            if origin != "inline":
                where += f" (file {origin})"
            raise unknown_name(str(key), CURVE_KEYS, what=where)
    return SpsCurveInput(points, dict(value), origin)


class _DuplicateKey(Exception):
    """A key that stands twice in one object; JSON readers keep only the last."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKey(repr(key))
        found[key] = value
    return found


def load_sps_curve(path: str | os.PathLike[str]) -> SpsCurveInput:
    """Read a steps-per-second curve from a JSON file of at most 8 MiB.

    Args:
        path: Regular file; a leading ``~`` is expanded.

    Raises:
        DSparkCapacityConfigError: Missing, unreadable, not a regular file, too
            large, not JSON, a key twice in an object, or not a valid curve.
    """
    shown = os.fspath(path)
    full = os.path.expanduser(shown)
    # Checked before opening: a pipe or device would block for ever.
    if not os.path.isfile(full):
        hint = ', did you mean "auto"?' if shown.strip().lower() == "auto" else ""
        problem = f"there is no file {shown!r}{hint}"
        if os.path.exists(full):
            problem = f"{shown!r} is no regular file"
        raise _curve_error("inline", shown, problem)
    try:
        with open(full, "rb") as f:
            data = f.read(MAX_CURVE_FILE_BYTES + 1)
    except OSError as e:
        raise _curve_error(shown, shown, f"it cannot be read ({e.strerror})") from e
    if len(data) > MAX_CURVE_FILE_BYTES:
        raise _curve_error(
            shown, shown, f"the file is larger than {MAX_CURVE_FILE_BYTES} bytes"
        )
    try:
        value = json.loads(data, object_pairs_hook=_unique_keys)
    except _DuplicateKey as e:
        raise _curve_error(
            shown, shown, f"the file has the key {e} more than once in an object"
        ) from e
    # RecursionError: brackets nested thousands deep.
    except (ValueError, RecursionError) as e:
        raise _curve_error(shown, shown, f"the file is not JSON ({e})") from e
    return read_sps_curve(value, shown)
