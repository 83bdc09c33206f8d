# SPDX-License-Identifier: Apache-2.0
"""Reading JSON that people hand to the benchmarks: a bad file is a ValueError."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_text(path: Path) -> str:
    """Return a file's text; a byte-order mark at its start is no part of it.

    Args:
        path: Gzipped if the name ends in .gz.

    Raises:
        ValueError: The file cannot be read, or is not UTF-8.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig") as file:
            return file.read()
    except (OSError, EOFError, UnicodeDecodeError) as e:
        raise ValueError(f"cannot read {path}: {e}") from e


def decode(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError("its brackets are nested too deeply") from e


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield number (from 1) and value of each line that is not empty.

    Raises:
        ValueError: The file cannot be read, or the line is not JSON.
    """
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            try:
                yield number, decode(line)
            except ValueError as e:
                raise ValueError(f"{path}:{number} is not JSON: {e}") from e
