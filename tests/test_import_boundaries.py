# SPDX-License-Identifier: Apache-2.0
"""The three rings: pure files import the standard library, NumPy and each other.

Imports for type checkers only do not count; an import inside a function does.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
DSPARK = "vllm/v1/worker/gpu/spec_decode/dspark"
# File -> packages that it may import besides the standard library.
PURE = {
    "vllm/config/dspark_values.py": set(),
    "vllm/config/dspark_environ.py": set(),
    "vllm/config/dspark_calibration.py": set(),
    "vllm/config/dspark_capacity.py": set(),
    "vllm/plugins/dspark_capacity/seam.py": set(),
    "vllm/plugins/dspark_capacity/checks.py": set(),
    "vllm/v1/spec_decode/dspark_capacity_report.py": set(),
    f"{DSPARK}/batch_facts.py": {"numpy"},
    f"{DSPARK}/depth.py": set(),
    f"{DSPARK}/step_costs.py": {"numpy"},
    f"{DSPARK}/cost_correction.py": {"numpy"},
    f"{DSPARK}/survival_history.py": {"numpy"},
    f"{DSPARK}/knee.py": {"numpy"},
    f"{DSPARK}/sps_curve.py": {"numpy"},
    f"{DSPARK}/planner.py": {"numpy"},
    f"{DSPARK}/plan_cadence.py": set(),
    f"{DSPARK}/context_costs.py": {"numpy"},
    f"{DSPARK}/cost_cache.py": set(),
    f"{DSPARK}/capacity_log.py": set(),
    f"{DSPARK}/sts_fit.py": {"numpy"},
    f"{DSPARK}/sts_metrics.py": {"numpy"},
}
# checks.py asks a source tree without metadata for its version.
ALLOWED_MODULES = {"vllm/plugins/dspark_capacity/checks.py": {"vllm._version"}}
# Files that only read packages and classes, and are loaded before a platform is
# known: they may name vLLM, and must not draw in torch or the GPU runner.
LIGHT = ("vllm/plugins/dspark_capacity/__init__.py",)


def module_name(path):
    return path.removesuffix(".py").replace("/", ".")


PURE_MODULES = {module_name(path) for path in PURE}


def is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported_modules(source):
    """Return the modules that running a file imports, at any depth of nesting."""
    found, todo = set(), [ast.parse(source)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
        elif is_type_checking(node):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)
    return found


def forbidden(path, source):
    allowed = PURE[path] | set(sys.stdlib_module_names)
    modules = PURE_MODULES | ALLOWED_MODULES.get(path, set())
    return {
        name
        for name in imported_modules(source)
        if name.split(".")[0] not in allowed and name not in modules
    }


@pytest.mark.parametrize("path", PURE)
def test_pure_file_imports_nothing_from_outside_its_ring(path):
    assert forbidden(path, (REPOSITORY / path).read_text()) == set()


@pytest.mark.parametrize(
    "line",
    [
        "import torch",
        "from vllm.logger import init_logger",
        "from vllm.v1.worker.gpu.spec_decode.dspark.capacity import admit_drafts",
        "from . import capacity",
        "def f():\n    import triton",
        "import importlib, vllm",
    ],
)
@pytest.mark.parametrize("path", PURE)
def test_premise_forbidden_imports_are_found(path, line):
    assert forbidden(path, line)


def test_premise_type_checking_imports_do_not_count():
    source = "if TYPE_CHECKING:\n    import torch\nelse:\n    import json\n"
    assert imported_modules(source) == {"json"}


@pytest.mark.parametrize("path", PURE)
def test_stdlib_ring_does_not_import_numpy(path):
    if "numpy" not in PURE[path]:
        assert forbidden(path, "import numpy") == {"numpy"}


# Runs each file beside empty stand-ins for the packages above it, so that what is
# seen is what the file itself draws in, not what vLLM's __init__ does.
LOAD_ALONE = """
import importlib.util, sys, types
for path, name in {files!r}:
    parts = name.split(".")
    for i in range(1, len(parts)):
        package = ".".join(parts[:i])
        module = sys.modules.setdefault(package, types.ModuleType(package))
        module.__path__ = []
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
print(sorted(m for m in ("torch", "triton", "numpy") if m in sys.modules))
"""


@pytest.mark.parametrize("with_numpy", [False, True])
def test_pure_files_load_without_torch_and_without_vllm(with_numpy):
    chosen = [path for path in PURE if with_numpy or not PURE[path]]
    files = [(str(REPOSITORY / path), module_name(path)) for path in chosen]
    result = subprocess.run(
        [sys.executable, "-c", LOAD_ALONE.format(files=files)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ("['numpy']" if with_numpy else "[]")


@pytest.mark.parametrize("path", LIGHT)
def test_plugin_entry_imports_nothing_at_module_level(path):
    tree = ast.parse((REPOSITORY / path).read_text())
    imports = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in imports for alias in node.names}
    assert names <= {"os"}
