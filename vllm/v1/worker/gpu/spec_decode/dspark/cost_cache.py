# SPDX-License-Identifier: Apache-2.0
"""What was measured in one configuration, kept on disk between starts.

One JSON file per configuration, in sections that know nothing of each other:
``costs`` holds the step cost tables, others may hold more. Standard library only.

Invariants (pinned by tests/.../dspark/test_cost_cache.py):
  * An entry is read only if it was written for an equal key; anything else that is
    found in its place is ignored, with one warning that says why.
  * A reader sees an old entry or a new one, never a part: entries are renamed into
    place.
  * Saving one section keeps the others, known or not.
  * A cache that cannot be written costs a warning, never the engine.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SCHEMA = "vllm-dspark-cost-cache"
VERSION = 1
MAX_ENTRY_BYTES = 1 << 24
COSTS_SECTION = "costs"


def prepare_directory(directory: str) -> Path:
    """Create the cache directory and check that entries can be written to it.

    Raises:
        OSError: It can neither be created nor written to.
    """
    path = Path(directory).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
        pass
    return path


@dataclass(frozen=True)
class CostCache:
    """One entry of a cache directory. Load at start; save whenever there is news.

    Attributes:
        directory: An existing directory.
        key: Everything that the measurements depend on, JSON-able.
        name: Human part of the file name, such as the model's name.
    """

    directory: Path
    key: Mapping[str, Any]
    name: str = "model"

    @property
    def path(self) -> Path:
        """File of this entry; another key has another file."""
        digest = hashlib.sha256(_canonical(self.key).encode()).hexdigest()[:16]
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(self.name).name)[:60] or "model"
        return self.directory / f"{stem.lstrip('.-')}-{digest}.json"

    def load(self) -> dict[str, Any] | None:
        """Return the sections of this entry; None if there is no usable one."""
        try:
            return self._read()
        except ValueError as error:
            self.discard(str(error))
            return None

    def _read(self) -> dict[str, Any] | None:
        """Return the sections; None without an entry.

        Raises:
            ValueError: The entry is of no use; the message completes "because".
        """
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_ENTRY_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(f"it cannot be read ({error.strerror})") from error
        if len(data) > MAX_ENTRY_BYTES:
            raise ValueError(f"it is larger than {MAX_ENTRY_BYTES} bytes")
        try:
            entry = json.loads(data)
        # RecursionError: brackets nested thousands deep.
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON ({error})") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("sections"), dict):
            raise ValueError("it has no sections")
        found, expected = (entry.get("schema"), entry.get("version")), (SCHEMA, VERSION)
        if found != expected:
            raise ValueError(f"it has schema, version = {found}, expected {expected}")
        if _canonical(entry.get("key")) != _canonical(self.key):
            changed = ", ".join(_differing(entry.get("key"), self.key))
            raise ValueError(f"it was made for another {changed}")
        return entry["sections"]

    def discard(self, why: str) -> None:
        """Warn that the entry is of no use; the next save replaces it.

        Args:
            why: Completes "because".
        """
        logger.warning(
            "Ignoring the DSpark cost cache entry %s because %s; measuring again.",
            self.path,
            why,
        )

    def save(self, sections: Mapping[str, Any]) -> bool:
        """Replace some sections of the entry and keep the others.

        For one process at a time: rank 0.

        Args:
            sections: Section name to JSON-able content.

        Returns:
            Whether it was written; if not, a warning said why.
        """
        temporary = None
        try:
            entry = {
                "schema": SCHEMA,
                "version": VERSION,
                "key": self.key,
                "sections": {**self._sections_to_keep(), **sections},
            }
            text = json.dumps(entry)
            handle, temporary = tempfile.mkstemp(
                dir=self.directory, prefix=".dspark-", suffix=".tmp"
            )
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(temporary, self.path)
        except OSError as error:
            logger.warning(
                "Cannot write the DSpark cost cache entry %s (%s); check the disk and "
                'the permissions, or set "dspark_sps_cache" to another directory.',
                self.path,
                error,
            )
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            return False
        return True

    def _sections_to_keep(self) -> dict[str, Any]:
        # Whoever loaded this entry has been told what is wrong with it.
        with contextlib.suppress(ValueError):
            return self._read() or {}
        return {}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _differing(found: Any, expected: Mapping[str, Any]) -> list[str]:
    if not isinstance(found, dict):
        return ["key"]
    names = {*found, *expected}
    return sorted(
        n for n in names if _canonical(found.get(n)) != _canonical(expected.get(n))
    )
