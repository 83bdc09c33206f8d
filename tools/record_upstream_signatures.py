# SPDX-License-Identifier: Apache-2.0
"""Record what the seam table meets in a vLLM source tree, without importing it.

A release that cannot run here (another platform) is read with ``ast``::

    python tools/record_upstream_signatures.py DIR --version 0.33.0

DIR is the ``vllm`` package of that release. Writes
``tests/fixtures/vllm-VERSION-signatures.json``, which the tests compare with the
seam table. The overlay must be linked (tools/link_overlay.py).
"""

import argparse
import ast
import functools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm.plugins.dspark_capacity.seams import SEAMS

FIXTURES = Path(__file__).resolve().parent.parent / "tests/fixtures"
PACKAGE = "vllm"
Definition = tuple[str, ast.AST]


class TargetNotFoundError(LookupError):
    """A seam target does not exist in the source tree."""


def fixture_path(version: str) -> Path:
    """Return the file that holds the recorded signatures of one release."""
    return FIXTURES / f"vllm-{version}-signatures.json"


class SourceTree:
    """Finds definitions in a package's sources, following imports and bases.

    Args:
        root: Directory of the package, the one with its ``__init__.py``.
    """

    def __init__(self, root: Path):
        self.root = root

    @functools.cache  # noqa: B019  (a tree lives as long as a run)
    def module(self, name: str) -> ast.Module | None:
        """Return a parsed module; None if it is not in the tree."""
        path = self.root.joinpath(*name.split(".")[1:])
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if name.split(".")[0] == PACKAGE and file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def find(self, module: str, name: str) -> Definition | None:
        """Return the module and node that define a module-level name.

        Returns:
            None if nothing binds the name; a node of ``ast.alias`` for an import
            from outside the tree.
        """
        tree = self.module(module)
        for node in _bindings(tree.body if tree else ()):
            if isinstance(node, ast.ImportFrom):
                found = self._follow(module, node, name)
                if found is not None:
                    return found
            elif isinstance(node, ast.Import):
                aliases = {a.asname or a.name.split(".")[0]: a for a in node.names}
                if name in aliases:
                    return module, aliases[name]
            elif name in _names(node):
                return module, node
        return None

    def _follow(
        self, module: str, node: ast.ImportFrom, name: str
    ) -> Definition | None:
        for alias in node.names:
            if (alias.asname or alias.name) != name:
                continue
            home = node.module or ""
            if node.level:
                parts = module.split(".")
                home = ".".join([*parts[: len(parts) - node.level], home]).rstrip(".")
            if self.module(home) is None:
                return module, alias
            return self.find(home, alias.name)
        return None

    def attribute(self, module: str, cls: ast.ClassDef, name: str) -> Definition | None:
        """Return what defines an attribute of a class, own or inherited."""
        for node in _bindings(cls.body):
            if name in _names(node):
                return module, node
        for base in cls.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if not isinstance(base, ast.Name):
                continue
            found = self.find(module, base.id)
            if found is not None and isinstance(found[1], ast.ClassDef):
                inherited = self.attribute(found[0], found[1], name)
                if inherited is not None:
                    return inherited
        return None

    def describe(self, target: str) -> dict[str, Any]:
        """Return kind and parameters of a seam target.

        Args:
            target: As in the seam table, ``module:attr.attr`` or
                ``module:attr.__annotations__[name]``.

        Raises:
            TargetNotFoundError: Nothing in the tree defines it.
        """
        module, _, path = target.partition(":")
        path = path.replace(".__annotations__[", ".").rstrip("]")
        first, *rest = path.split(".")
        found = self.find(module, first)
        for name in rest:
            if found is None or not isinstance(found[1], ast.ClassDef):
                break
            found = self.attribute(*found, name)
        if found is None:
            raise TargetNotFoundError(
                f"{target} is not defined in {self.root}. Correct the row of that "
                "target in the seam table, or name the right directory."
            )
        return self._describe_node(*found)

    def _describe_node(self, module: str, node: ast.AST) -> dict[str, Any]:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            found = self.find(module, node.value.id)
            if found is not None:
                return self._describe_node(*found)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return {"kind": "function", "parameters": _parameters(node)}
        if isinstance(node, ast.ClassDef):
            init = self.attribute(module, node, "__init__")
            names = _parameters(init[1])[1:] if init is not None else None
            return {"kind": "class", "parameters": names}
        return {"kind": "value", "parameters": None}


def _bindings(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that bind names, also those inside if and try blocks."""
    for node in body:
        if isinstance(node, (ast.If, ast.Try)):
            yield from _bindings(node.body)
            for handler in getattr(node, "handlers", ()):
                yield from _bindings(handler.body)
            yield from _bindings(node.orelse)
        else:
            yield node


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {t.id for t in node.targets if isinstance(t, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


def _parameters(node: Any) -> list[str]:
    """Return names in the order of ``inspect.signature``; classmethods drop cls."""
    a = node.args
    names = [p.arg for p in (*a.posonlyargs, *a.args)]
    names += [a.vararg.arg] if a.vararg else []
    names += [p.arg for p in a.kwonlyargs]
    names += [a.kwarg.arg] if a.kwarg else []
    decorators = {getattr(d, "id", None) for d in node.decorator_list}
    return names[1:] if "classmethod" in decorators else names


def record(root: Path) -> dict[str, dict[str, Any]]:
    """Describe the target of every row that changes vLLM itself.

    Args:
        root: The ``vllm`` package directory.

    Raises:
        TargetNotFoundError: A target is missing.
    """
    tree = SourceTree(root)
    targets = sorted({s.target for s in SEAMS if s.target.startswith(f"{PACKAGE}.")})
    return {target: tree.describe(target) for target in targets}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path, help="the vllm package directory")
    parser.add_argument("--version", required=True, help="release, such as 0.33.0")
    args = parser.parse_args(argv)
    if not (args.source / "__init__.py").is_file():
        parser.error(f"{args.source} is not a package directory (no __init__.py)")
    text = json.dumps(
        {"version": args.version, "targets": record(args.source)}, indent=1
    )
    fixture_path(args.version).write_text(f"{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
