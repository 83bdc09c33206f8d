# SPDX-License-Identifier: Apache-2.0
"""Types of command-line options; a bad value is a usage error that names it."""

import argparse
import math
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a reader of integers from ``least`` on, up to ``most`` if given."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            bounds = f">= {least}" + ("" if most is None else f" and <= {most}")
            raise argparse.ArgumentTypeError(f"{text!r} must be an integer {bounds}")
        return value

    return read


positive_int, natural = integer(1), integer(0)
# The draws of coupled acceptance use 32 bits of a seed; repetitions add to it.
seed_number = integer(0, (1 << 31) - 1)


def number(
    low: float, high: float = math.inf, *, open_low: bool = False
) -> Callable[[str], float]:
    """Return a reader of finite numbers in ``[low, high]``, or ``(low, high]``."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = (low < value if open_low else low <= value) and value <= high
        if not (math.isfinite(value) and inside):
            bounds = f"{'>' if open_low else '>='} {low:g}"
            bounds += "" if high == math.inf else f" and <= {high:g}"
            raise argparse.ArgumentTypeError(f"{text!r} must be a number {bounds}")
        return value

    return read


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a reader of comma-separated values."""

    def read(text: str) -> list[Any]:
        found = []
        for part in text.split(","):
            try:
                found.append(kind(part.strip()))
            except ValueError:
                raise argparse.ArgumentTypeError(
                    f"{part!r} in {text!r} is not a number"
                ) from None
        return found

    return read


def one_of(allowed: Iterable[str]) -> Callable[[str], str]:
    """Return a reader of one of several words."""
    words = tuple(allowed)

    def read(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not one of {', '.join(words)}"
            )
        return text

    return read


def readable_file(text: str) -> Path:
    """Return the path of a file that exists."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file")
    return path


def output_file(text: str) -> Path:
    """Return a path that can be written, making its folder.

    A measurement takes minutes; a path that then fails would have wasted them.
    """
    path = Path(text)
    if path.is_dir() or not path.name:
        raise argparse.ArgumentTypeError(
            f"{text!r}: is a directory; give a file, such as out/result.json"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Made and removed beside the result.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: cannot be written ({error.strerror}); give a file in a "
            "directory of yours, such as out/result.json"
        ) from error
    return path


def image_file(text: str) -> Path:
    """Return a path as :func:`output_file` does, of a format that can be drawn."""
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(text).suffix[1:].lower() not in formats:
        raise argparse.ArgumentTypeError(
            f"{text!r}: not an image file; give a name that ends in one of "
            f"{', '.join('.' + name for name in formats)}"
        )
    return output_file(text)
