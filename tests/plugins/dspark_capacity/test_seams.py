# SPDX-License-Identifier: Apache-2.0
"""The seam table against the vLLM releases it supports.

The installed release is checked by importing it, every other one against a
recording of its sources (``tools/record_upstream_signatures.py``). To compare a
recording with the sources themselves, name the ``vllm`` package directory of
0.33.0 in ``VLLM_033_SOURCE``.
"""

import ast
import dataclasses
import importlib
import json
import os
import re
from pathlib import Path

import pytest

import vllm
from tests.helpers.config_models import clean_plugin_state
from tools import record_upstream_signatures as recorder
from vllm.plugins.dspark_capacity import seam as seam_module
from vllm.plugins.dspark_capacity import seams
from vllm.plugins.dspark_capacity.checks import SUPPORTED_VLLM, public_version
from vllm.plugins.dspark_capacity.seam import (
    Scope,
    SeamError,
    expected_parameters,
    signature_of,
    verify,
)
from vllm.plugins.dspark_capacity.seams import SEAMS

REPOSITORY = Path(__file__).resolve().parents[3]
INSTALLED = public_version(vllm.__version__)
RECORDED = [v for v in SUPPORTED_VLLM if recorder.fixture_path(v).is_file()]
SOURCE_VARIABLE = "VLLM_033_SOURCE"
by_id = pytest.mark.parametrize("seam", SEAMS, ids=lambda s: s.id)


@pytest.fixture(scope="module", autouse=True)
def unseamed():
    """Look at upstream's own objects, then put back what was installed."""
    with clean_plugin_state():
        yield


def recorded(version):
    return json.loads(recorder.fixture_path(version).read_text())["targets"]


def test_premise_rows_are_checked_on_every_supported_release():
    assert {INSTALLED, *RECORDED} == set(SUPPORTED_VLLM)


@by_id
def test_row_fits_the_installed_release(seam):
    ((row, places),) = verify([seam], INSTALLED)
    assert row is seam
    assert len(places) == 1 + len(seam.importers)


@pytest.mark.parametrize("version", RECORDED)
@by_id
def test_row_fits_the_recorded_release(seam, version):
    if not seam.target.startswith("vllm."):
        pytest.skip("not an object of vLLM")
    found = recorded(version)[seam.target]
    expected = expected_parameters(seam, version)
    if expected is not None:
        assert tuple(found["parameters"]) == expected
    if seam.kind == "subclass":
        assert found["kind"] == "class"


@pytest.mark.parametrize("version", RECORDED)
def test_recording_covers_the_table_and_nothing_else(version):
    targets = {s.target for s in SEAMS if s.target.startswith("vllm.")}
    assert set(recorded(version)) == targets, (
        "run tools/record_upstream_signatures.py for this release"
    )


def test_recorder_reads_what_python_sees():
    # The same figures by importing and by reading, on the release that can do both.
    root = Path(vllm.__file__).parent
    found = recorder.record(root)
    for seam in SEAMS:
        if expected_parameters(seam, INSTALLED) is None or seam.target not in found:
            continue
        ((_, places),) = verify([seam], INSTALLED)
        names = signature_of(places[0].get_raw())
        assert tuple(found[seam.target]["parameters"]) == names, seam.id


def test_recorder_misses_no_missing_target(tmp_path):
    (tmp_path / "__init__.py").write_text("class Engine: pass\n")
    tree = recorder.SourceTree(tmp_path)
    assert tree.describe("vllm:Engine")["kind"] == "class"
    for target in ("vllm:Gone", "vllm:Engine.gone", "vllm.gone:Engine"):
        with pytest.raises(recorder.TargetNotFoundError, match=re.escape(target)):
            tree.describe(target)


@pytest.mark.skipif(
    SOURCE_VARIABLE not in os.environ,
    reason=f"{SOURCE_VARIABLE} does not name the vllm package of 0.33.0",
)
def test_recording_equals_the_sources_of_0_33():
    assert recorder.record(Path(os.environ[SOURCE_VARIABLE])) == recorded("0.33.0")


@by_id
def test_row_differs_from_a_changed_signature(seam):
    """The check of a row can fail: it is not satisfied by any signature."""
    if expected_parameters(seam, INSTALLED) is None:
        pytest.skip("the target is not a callable with a fixed signature")
    changed = dataclasses.replace(
        seam, parameters=(*expected_parameters(seam, INSTALLED), "new")
    )
    with pytest.raises(SeamError, match=re.escape(seam.id)):
        verify([changed], INSTALLED)


@by_id
def test_signature_is_given_for_every_supported_release(seam):
    if isinstance(seam.parameters, dict):
        assert set(seam.parameters) == set(SUPPORTED_VLLM)


@by_id
def test_replacement_exists_and_has_the_kind_of_its_row(seam):
    module, _, name = seam.replacement.partition(":")
    ours = getattr(importlib.import_module(module), name)
    ((_, places),) = verify([seam], INSTALLED)
    original = places[0].get_raw()
    if seam.kind == "subclass":
        assert issubclass(ours, original)
    elif seam.kind == "wrap":
        assert len(signature_of(ours)) == 1


@by_id
def test_row_names_an_existing_test(seam):
    path, _, name = seam.test.partition("::")
    file = REPOSITORY / path
    assert file.is_file(), f"{path} does not exist"
    functions = {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert name in functions


def test_ids_and_targets_are_unique():
    assert len({s.id for s in SEAMS}) == len(SEAMS)
    # Two rows on one target could not be undone in any order.
    assert len({s.target for s in SEAMS}) == len(SEAMS)


@by_id
def test_every_text_field_is_filled(seam):
    for name in ("reason", "remove_when", "test", "replacement"):
        assert getattr(seam, name).strip(), name


def assigned_imports(tree):
    """Return ``name.attribute`` for every assignment to an imported object."""
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            base = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name) and base.id in imported:
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            name = ast.unparse(node.args[0]).split(".")[0]
            found |= {ast.unparse(node)} if name in imported else set()
    return found


def test_no_file_changes_an_imported_object_by_itself():
    # Swapped for the length of one call; see its docstring.
    allowed = {"config_check.py": {"envs.environment_variables"}}
    for path in (REPOSITORY / "vllm").rglob("*.py"):
        found = assigned_imports(ast.parse(path.read_text()))
        assert found <= allowed.get(path.name, set()), path


@pytest.mark.parametrize(
    "statement", ["m.x = 1", "m.c.x = 1", "del m.x", "setattr(m.c, 'x', 1)", "m.x += 1"]
)
def test_premise_changes_of_imported_objects_are_found(statement):
    assert assigned_imports(ast.parse(f"import m\n{statement}\n"))


class TestInstall:
    """``install(scope)`` in this process, undone after each test."""

    @pytest.fixture(autouse=True)
    def restore(self):
        yield
        seam_module.remove(seam_module.applied_ids())

    def test_only_rows_of_the_scope_are_installed(self):
        ids = seams.install(Scope.FRONTEND)
        assert ids == tuple(s.id for s in SEAMS if s.scope is Scope.FRONTEND)
        assert seam_module.applied_ids() == ids

    def test_second_install_changes_nothing(self):
        assert seams.install(Scope.FRONTEND)
        assert seams.install(Scope.FRONTEND) == ()

    def test_local_version_suffix_does_not_skip_signatures(self, monkeypatch):
        wrong = dataclasses.replace(
            next(s for s in SEAMS if s.id == "frontend.log-line"),
            parameters={INSTALLED: ("renamed",)},
        )
        monkeypatch.setattr(seams, "SEAMS", (wrong,))
        monkeypatch.setattr(vllm, "__version__", f"{INSTALLED}+local")
        with pytest.raises(SeamError, match="renamed"):
            seams.install(Scope.FRONTEND)

    def test_installed_objects_are_gone_after_removal(self):
        from vllm.v1.metrics import loggers

        original = loggers.SpecDecodingLogging
        ids = seams.install(Scope.FRONTEND)
        assert loggers.SpecDecodingLogging is not original
        seam_module.remove(ids)
        assert loggers.SpecDecodingLogging is original
