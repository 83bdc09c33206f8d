# SPDX-License-Identifier: Apache-2.0
"""Write docs/SEAMS.md from the seam table, or check that it is up to date.

    python tools/make_seams_doc.py            # write
    python tools/make_seams_doc.py --check    # exit code 1 if the file differs

The overlay must be linked (tools/link_overlay.py): the table is imported, not
parsed, so that the document says what is installed.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from vllm.plugins.dspark_capacity.checks import SUPPORTED_VLLM
from vllm.plugins.dspark_capacity.seam import (
    TABLE_FILE,
    Scope,
    Seam,
    expected_parameters,
)
from vllm.plugins.dspark_capacity.seams import SEAMS

DOCUMENT = Path(__file__).resolve().parent.parent / "docs/SEAMS.md"
HEADER = f"""# Seams: every upstream object that the overlay changes

Generated from `{TABLE_FILE}` by `tools/make_seams_doc.py`; do not edit.
"""
SCOPE_NOTES = {
    Scope.CONFIG: "In every process that loads vLLM's plugins, feature on or off: "
    "reading our keys.",
    Scope.ENVIRON: "In the same processes, only with a `VLLM_DSPARK_*` variable set.",
    Scope.FRONTEND: "Where the configuration is built, only with the feature on.",
    Scope.WORKER: "In the workers, only with the feature on.",
    Scope.REHEARSAL: "In every process, only with `VLLM_DSPARK_CPU_REHEARSAL=1`.",
    Scope.REHEARSAL_WORKER: "In the workers, only with `VLLM_DSPARK_CPU_REHEARSAL=1`.",
}


def code(text: str) -> str:
    """Return ``text`` as inline code that may stand in a table cell."""
    return f"`{text}`".replace("|", "\\|")


def signature_text(seam: Seam) -> str:
    """Return the parameters that the target must have, per version if they vary."""
    by_version = {
        version: expected_parameters(seam, version) for version in SUPPORTED_VLLM
    }
    texts = {
        version: "not checked" if names is None else code(f"({', '.join(names)})")
        for version, names in by_version.items()
    }
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{version}: {text}" for version, text in texts.items())


def render_seam(seam: Seam) -> str:
    """Return the section of one row."""
    importers = ", ".join(map(code, seam.importers)) or "none"
    fields = {
        "Target": code(seam.target),
        "Kind": seam.kind,
        "Replacement": code(seam.replacement),
        "Also rebound in": importers,
        "Signature": signature_text(seam),
        "Why no public hook": seam.reason,
        "Remove when": seam.remove_when,
        "Test": code(seam.test),
    }
    lines = "\n".join(f"- {name}: {value}" for name, value in fields.items())
    return f"### {seam.id}\n\n{lines}\n"


def render_scope(scope: Scope, seams: list[Seam]) -> str:
    """Return the section of one scope: an overview table, then its rows."""
    head = f"## Scope {code(scope.value)}\n\n{SCOPE_NOTES[scope]}\n"
    if not seams:
        return f"{head}\nNo rows.\n"
    rows = "".join(f"| {s.id} | {s.kind} | {code(s.target)} |\n" for s in seams)
    table = f"| id | kind | target |\n|---|---|---|\n{rows}"
    return "\n".join([head, table, *map(render_seam, seams)])


def render(seams: Iterable[Seam] = SEAMS) -> str:
    """Return the whole document.

    Args:
        seams: Rows of the table; each scope keeps their order.
    """
    seams = tuple(seams)
    sections = (
        render_scope(scope, [s for s in seams if s.scope is scope]) for scope in Scope
    )
    return "\n".join([HEADER, *sections])


def main(argv: list[str] | None = None, document: Path = DOCUMENT) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    text = render()
    if parser.parse_args(argv).check:
        if document.is_file() and document.read_text() == text:
            return 0
        print(
            f"{document} differs from {TABLE_FILE}. "
            "Run: python tools/make_seams_doc.py",
            file=sys.stderr,
        )
        return 1
    document.parent.mkdir(exist_ok=True)
    document.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
