# SPDX-License-Identifier: Apache-2.0
"""The mechanism behind the seam table: verify every row, then apply all or none.

A *seam* is one place where the overlay changes an upstream object. The rows live
in :mod:`vllm.plugins.dspark_capacity.seams`; this module knows how to check and
install them and nothing about what they are for.

Invariants (pinned by tests/plugins/dspark_capacity/test_seam.py):
  * No attribute is set before every row of the request has been verified.
  * A failure while setting attributes restores those that were already set.
  * Installing twice changes nothing the second time.
  * Every error names the seam, what was expected, what was found and the file
    that holds the row.
"""

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

SeamKind = Literal["hook", "subclass", "rebind", "wrap"]
TABLE_FILE = "vllm/plugins/dspark_capacity/seams.py (or seams_rehearsal.py)"
_MISSING = object()


class Scope(str, Enum):
    """The process role in which a seam is applied.

    CONFIG is the only scope that plain vLLM ever sees (it teaches vLLM to read
    our keys), ENVIRON the one that any ``VLLM_DSPARK_*`` variable adds. The other
    scopes are entered only with the feature, or the rehearsal, switched on.
    """

    CONFIG = "config"
    ENVIRON = "environ"
    FRONTEND = "frontend"
    WORKER = "worker"
    REHEARSAL = "rehearsal"
    REHEARSAL_WORKER = "rehearsal-worker"


class SeamError(RuntimeError):
    """An upstream object is not what the seam table expects."""


@dataclass(frozen=True, slots=True)
class Seam:
    """One row of the seam table.

    Attributes:
        id: Unique name, ``<area>.<what>``.
        target: ``module:attr.attr`` or ``module:attr.__annotations__[name]``.
        kind: ``hook`` (documented extension point), ``subclass`` (a name is
            rebound to a subclass of what it held), ``rebind`` (to something
            else) or ``wrap`` (the replacement receives the original and returns
            the new object).
        scope: Process role that needs it.
        replacement: ``module:attr`` of the overlay object, imported on apply.
        parameters: Parameter names the target must have, in order; for a class,
            those of ``__init__`` without ``self``. A mapping is keyed by vLLM
            version. None for targets that are not callables.
        importers: Modules that bound the target's last name at import time and
            are rebound along with it.
        reason: Why no public extension point serves.
        remove_when: The upstream change that makes the row needless.
        test: Test that fails when the row is removed.
    """

    id: str
    target: str
    kind: SeamKind
    scope: Scope
    replacement: str
    parameters: tuple[str, ...] | dict[str, tuple[str, ...]] | None
    reason: str
    remove_when: str
    test: str
    importers: tuple[str, ...] = ()


@dataclass(slots=True)
class _Applied:
    """What one installed row replaced, to make install idempotent and undoable."""

    places: list[tuple["_Place", Any]]
    original: Any
    new: Any


_applied: dict[str, _Applied] = {}


class _Place:
    """A settable location: an attribute of an object or an item of a mapping."""

    def __init__(self, owner: Any, name: str, is_item: bool = False):
        self.owner, self.name, self.is_item = owner, name, is_item

    def get_raw(self) -> Any:
        """Return the stored object without binding descriptors, or _MISSING."""
        if self.is_item:
            return self.owner.get(self.name, _MISSING)
        if inspect.isclass(self.owner):
            return inspect.getattr_static(self.owner, self.name, _MISSING)
        return getattr(self.owner, self.name, _MISSING)

    def set(self, value: Any) -> None:
        """Store ``value`` at this place; _MISSING removes what is stored there."""
        if value is _MISSING:
            delattr(self.owner, self.name)
        elif self.is_item:
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)

    def get_own(self) -> Any:
        """Return what a restore has to store: _MISSING for an inherited attribute.

        Storing an inherited object on the subclass would hide later changes of
        the base class.
        """
        if inspect.isclass(self.owner):
            return vars(self.owner).get(self.name, _MISSING)
        return self.get_raw()


def _fail(seam: Seam, expected: str, found: str) -> SeamError:
    return SeamError(
        f"dspark_capacity seam '{seam.id}' does not fit this vLLM: expected "
        f"{expected}, found {found}. Use a supported vLLM release or correct the "
        f"row '{seam.id}' in {TABLE_FILE}."
    )


def _import(seam: Seam, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise _fail(seam, f"importable module {module}", repr(e)) from e


def _resolve(seam: Seam) -> _Place:
    module_name, _, path = seam.target.partition(":")
    owner = _import(seam, module_name)
    path, bracket, item = path.partition("[")
    names = path.split(".")
    for name in names if bracket else names[:-1]:
        owner = getattr(owner, name, _MISSING)
        if owner is _MISSING:
            raise _fail(seam, seam.target, f"no attribute '{name}'")
    place = (
        _Place(owner, item.rstrip("]"), True) if bracket else _Place(owner, names[-1])
    )
    if place.get_raw() is _MISSING:
        raise _fail(seam, seam.target, f"no attribute '{place.name}'")
    return place


def signature_of(target: Any) -> tuple[str, ...]:
    """Return the parameter names of a callable, or of a class's ``__init__``.

    Args:
        target: Function, static or class method object, or class.

    Returns:
        Names in order, without ``self`` or ``cls`` for classes and classmethods.
    """
    if isinstance(target, (staticmethod, classmethod)):
        names = tuple(inspect.signature(target.__func__).parameters)
        return names[1:] if isinstance(target, classmethod) else names
    return tuple(inspect.signature(target).parameters)


def expected_parameters(seam: Seam, version: str) -> tuple[str, ...] | None:
    """Return the parameter names that ``seam`` expects under ``version``."""
    if isinstance(seam.parameters, dict):
        return seam.parameters.get(version)
    return seam.parameters


def _verify_signature(seam: Seam, target: Any, version: str) -> None:
    expected = expected_parameters(seam, version)
    if expected is None:
        return
    try:
        found = signature_of(target)
    except (TypeError, ValueError) as e:
        raise _fail(seam, f"a callable with parameters {expected}", repr(e)) from e
    if found != expected:
        raise _fail(seam, f"parameters {expected}", f"{found}")


def _importer_places(seam: Seam, target: Any) -> list[_Place]:
    places = []
    for module_name in seam.importers:
        module = _import(seam, module_name)
        name = seam.target.partition(":")[2].split(".")[-1]
        if getattr(module, name, _MISSING) is not target:
            raise _fail(
                seam,
                f"{module_name}.{name} to be the object at {seam.target}",
                repr(getattr(module, name, "nothing")),
            )
        places.append(_Place(module, name))
    return places


def verify(seams: Iterable[Seam], version: str) -> list[tuple[Seam, list[_Place]]]:
    """Check rows against the running vLLM without changing anything.

    Args:
        seams: Rows to check. Rows that are already applied are skipped.
        version: vLLM version, for per-version signatures.

    Returns:
        The rows still to apply, each with every place to set.

    Raises:
        SeamError: A target, its signature or an importer differs from the row.
    """
    pending = []
    for seam in seams:
        if seam.id in _applied:
            place, _ = _applied[seam.id].places[0]
            if place.get_raw() is _applied[seam.id].new:
                continue
            raise _fail(seam, "our object still in place", "it was replaced since")
        place = _resolve(seam)
        target = place.get_raw()
        _verify_signature(seam, target, version)
        pending.append((seam, [place, *_importer_places(seam, target)]))
    return pending


def _build(seam: Seam, original: Any) -> Any:
    module_name, _, name = seam.replacement.partition(":")
    ours = getattr(importlib.import_module(module_name), name)
    if seam.kind != "wrap":
        return ours
    if isinstance(original, (staticmethod, classmethod)):
        return type(original)(ours(original.__func__))
    return ours(original)


def apply(seams: Iterable[Seam], version: str) -> tuple[str, ...]:
    """Verify all rows, then install all of them or none.

    Args:
        seams: Rows to install, in order.
        version: vLLM version, for per-version signatures.

    Returns:
        Ids of the rows that this call installed (empty when all were in place).

    Raises:
        SeamError: A row does not fit; nothing has been changed.
    """
    pending = verify(seams, version)
    originals = [places[0].get_raw() for _, places in pending]
    built = [
        (seam, places, original, _build(seam, original))
        for (seam, places), original in zip(pending, originals, strict=True)
    ]
    done: list[str] = []
    try:
        for seam, places, original, new in built:
            record = _Applied([], original, new)
            _applied[seam.id] = record
            done.append(seam.id)
            for place in places:
                own = place.get_own()
                place.set(new)
                record.places.append((place, own))
    except BaseException:
        remove(done)
        raise
    return tuple(done)


def remove(ids: Iterable[str]) -> None:
    """Restore what the named rows replaced. Unknown ids are ignored.

    Args:
        ids: Row ids, in the order in which they were applied.
    """
    for seam_id in reversed(list(ids)):
        record = _applied.pop(seam_id, None)
        if record is not None:
            for place, original in reversed(record.places):
                place.set(original)


def applied_ids() -> tuple[str, ...]:
    """Return the ids of the installed rows, in installation order."""
    return tuple(_applied)


def original_of(seam_id: str) -> Any:
    """Return the upstream object that an installed row replaced.

    Raises:
        KeyError: The row is not installed in this process.
    """
    return _applied[seam_id].original
