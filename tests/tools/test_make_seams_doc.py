# SPDX-License-Identifier: Apache-2.0
"""The generated seam document: complete, up to date, and the check can fail."""

import pytest

from tools import make_seams_doc
from vllm.plugins.dspark_capacity.checks import SUPPORTED_VLLM
from vllm.plugins.dspark_capacity.seam import Scope, Seam
from vllm.plugins.dspark_capacity.seams import SEAMS

OLD, NEW = sorted(SUPPORTED_VLLM)


def make_seam(**changes) -> Seam:
    fields = {
        "id": "area.what",
        "target": "module:Class.attr",
        "kind": "wrap",
        "scope": Scope.WORKER,
        "replacement": "ours:wrap_attr",
        "parameters": ("self", "x"),
        "reason": "no hook",
        "remove_when": "there is a hook",
        "test": "tests/test_x.py::test_y",
        "importers": ("other.module",),
    }
    return Seam(**{**fields, **changes})


def test_committed_document_matches_the_table():
    assert make_seams_doc.main(["--check"]) == 0


def test_check_fails_on_a_stale_or_missing_document(tmp_path, capsys):
    document = tmp_path / "docs" / "SEAMS.md"
    assert make_seams_doc.main(["--check"], document) == 1
    assert make_seams_doc.main([], document) == 0
    assert make_seams_doc.main(["--check"], document) == 0
    document.write_text(document.read_text() + "by hand\n")
    capsys.readouterr()
    assert make_seams_doc.main(["--check"], document) == 1
    assert "make_seams_doc.py" in capsys.readouterr().err


def test_every_field_of_a_row_is_shown():
    text = make_seams_doc.render([make_seam()])
    for value in (
        "area.what",
        "module:Class.attr",
        "wrap",
        "ours:wrap_attr",
        "(self, x)",
        "no hook",
        "there is a hook",
        "tests/test_x.py::test_y",
        "other.module",
    ):
        assert value in text


def test_every_row_of_the_table_has_one_section():
    text = make_seams_doc.render()
    assert text.count("\n### ") == len(SEAMS)
    for seam in SEAMS:
        assert text.count(f"\n### {seam.id}\n") == 1


@pytest.mark.parametrize("scope", Scope)
def test_row_stands_under_its_scope(scope):
    text = make_seams_doc.render([make_seam(scope=scope)])
    _, _, section = text.partition(f"## Scope `{scope.value}`\n")
    assert "### area.what" in section.partition("\n## ")[0]
    assert text.count("No rows.") == len(Scope) - 1


@pytest.mark.parametrize(
    "parameters, expected",
    [
        (None, "not checked"),
        ((), "`()`"),
        ({OLD: ("a",), NEW: ("a",)}, "`(a)`"),
        ({OLD: ("a",), NEW: ("a", "b")}, f"{NEW}: `(a, b)`"),
        ({OLD: ("a",)}, f"{NEW}: not checked"),
    ],
)
def test_signature_is_given_per_version_only_where_it_varies(parameters, expected):
    text = make_seams_doc.signature_text(make_seam(parameters=parameters))
    assert expected in text
    assert (OLD in text) == (isinstance(parameters, dict) and OLD in expected + text)


def test_bar_in_a_target_does_not_break_the_table():
    assert make_seams_doc.code("a|b") == "`a\\|b`"
