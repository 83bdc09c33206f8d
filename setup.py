# SPDX-License-Identifier: Apache-2.0
"""Build the overlay wheel; everything declarative is in pyproject.toml.

The wheel's files land inside the ``vllm`` package of another distribution, so two
things need code: no file may replace one of upstream's, and an editable install,
which cannot put a file inside that package, must say what to use instead.

The native operator (CMakeLists.txt) is optional: where it cannot be built, the
reason is logged and the wheel is pure Python. Asked for by name, as a checkout does
(``python setup.py build_ext --inplace``), it is an error instead.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, SetupError

ROOT = Path(__file__).resolve().parent
NATIVE = "vllm._dspark_C"
OLDEST_TORCH = (2, 11)  # as TORCH_TARGET_VERSION in CMakeLists.txt
sys.path.insert(0, str(ROOT / "tools"))

from list_upstream_paths import PATHS_DIR, read_lists  # noqa: E402


def check_additive(files: set[str]) -> None:
    """Refuse a build that would overwrite a file of a supported vLLM release.

    Args:
        files: Paths relative to site-packages.

    Raises:
        SetupError: A path exists upstream, or there is no list to compare with.
    """
    upstream = read_lists()
    if not upstream:
        raise SetupError(
            f"no lists of upstream paths in {PATHS_DIR}; make them with "
            "tools/list_upstream_paths.py."
        )
    clashes = [
        f"{path} (in {release})"
        for release, paths in upstream.items()
        for path in sorted(files.intersection(paths))
    ]
    if clashes:
        raise SetupError(
            "the overlay would overwrite upstream files: "
            f"{', '.join(clashes)}. Rename ours; change upstream objects only "
            "through vllm/plugins/dspark_capacity/seams.py."
        )


class BuildOverlay(build_py):
    """``build_py`` that starts clean and stops before it would overwrite vLLM."""

    def run(self) -> None:
        """Check every file of the wheel, then build."""
        outputs = self.get_outputs(include_bytecode=False)
        files = {Path(o).relative_to(self.build_lib).as_posix() for o in outputs}
        native = self.get_finalized_command("build_ext").get_ext_filename(NATIVE)
        check_additive(files | {Path(native).as_posix()})
        # A file deleted from the tree must not live on in the next wheel.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


def find_torch() -> Path:
    """Return the directory of the torch package whose headers are compiled against.

    A build that pip isolates cannot import the environment's packages, but torch
    need only be seen: the environment's own directory is searched as well.

    Raises:
        CompileError: There is no torch, or one without the stable ABI's headers.
    """
    spec = importlib.util.find_spec("torch")
    found = [Path(spec.origin).parent] if spec and spec.origin else []
    found.append(Path(sysconfig.get_path("platlib")) / "torch")
    for torch in found:
        version_file = torch / "version.py"
        if not version_file.is_file():
            continue
        text = version_file.read_text()
        version = re.search(r"__version__ = '(\d+)\.(\d+)", text)
        if version and tuple(map(int, version.groups())) >= OLDEST_TORCH:
            return torch
        raise CompileError(f"{torch} is older than torch 2.11; upgrade torch")
    raise CompileError(
        f"no torch in {sys.prefix} or on the path; install torch >= 2.11 first"
    )


def run_tool(*command: str | Path) -> None:
    """Run a build tool; its output is shown, and quoted if it fails.

    Raises:
        CompileError: It is not there or fails.
    """
    command = [str(part) for part in command]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as e:
        raise CompileError(f"{command[0]} cannot be run ({e}); install it") from e
    print(done.stdout, end="", flush=True)
    if done.returncode:
        words = done.stdout.strip().splitlines()[-15:]
        raise CompileError("\n".join([f"{' '.join(command)} failed:", *words]))


class BuildNative(build_ext):
    """``build_ext`` by CMake; optional unless asked for by ``--inplace``."""

    def run(self) -> None:
        """Build the library."""
        for ext in self.extensions:
            ext.optional = not self.inplace
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """Build the library and put it where the extension belongs.

        Raises:
            CompileError: Something is missing or fails. For an optional extension
                setuptools logs it and goes on.
        """
        if not sys.platform.startswith("linux"):
            raise CompileError("the native operator is for Linux")
        build = Path(self.build_temp).resolve() / "native"
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        # What an earlier build left must not pass for this one's.
        (build / target.name).unlink(missing_ok=True)
        run_tool(
            "cmake",
            *("-S", ROOT, "-B", build),
            f"-DDSPARK_TORCH={find_torch()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={build}",
        )
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        run_tool("cmake", "--build", build, "--parallel", jobs)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build / target.name, target)


class BuildWheel(bdist_wheel):
    """``bdist_wheel`` whose tag says what the wheel holds: pure, or a library."""

    def run(self) -> None:
        """Build everything, then tag and pack it."""
        self.run_command("build")
        native = self.get_finalized_command("build_ext")
        if not any(Path(path).is_file() for path in native.get_outputs()):
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()


class RefuseEditable(Command):
    """Stands in for the commands behind ``pip install -e``."""

    user_options = [("dist-info-dir=", None, ""), ("dist-dir=", None, "")]

    def initialize_options(self) -> None:
        """Accept what the build backend passes."""
        self.dist_info_dir = self.dist_dir = None

    def finalize_options(self) -> None:
        """Nothing to finalize."""

    def run(self) -> None:
        """Say what to do instead.

        Raises:
            SetupError: Always.
        """
        raise SetupError(
            "an editable install cannot place files inside the installed vllm "
            "package. Use: python tools/link_overlay.py (undo: --remove)."
        )


setup(
    ext_modules=[Extension(NATIVE, sources=[], py_limited_api=True, optional=True)],
    # The library needs no Python at all; abi3 is how vLLM names and tags its own.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    cmdclass={
        "bdist_wheel": BuildWheel,
        "build_ext": BuildNative,
        "build_py": BuildOverlay,
        "editable_wheel": RefuseEditable,
        "develop": RefuseEditable,
    },
)
