# SPDX-License-Identifier: Apache-2.0
"""Build the overlay wheel; everything declarative is in pyproject.toml.

The wheel's files land inside the ``vllm`` package of another distribution, so two
things need code: no file may replace one of upstream's, and an editable install,
which cannot put a file inside that package, must say what to use instead.
"""

import shutil
import sys
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
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
        check_additive(
            {Path(o).relative_to(self.build_lib).as_posix() for o in outputs}
        )
        # A file deleted from the tree must not live on in the next wheel.
        shutil.rmtree(self.build_lib, ignore_errors=True)
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
    cmdclass={
        "build_py": BuildOverlay,
        "editable_wheel": RefuseEditable,
        "develop": RefuseEditable,
    }
)
