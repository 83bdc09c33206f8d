# SPDX-License-Identifier: Apache-2.0
"""Every kernel launcher has an oracle, and equals it."""

import pytest
import torch

from tests.helpers.kernel_registry import DSPARK_DIR, PAIRS, find_launchers
from tests.helpers.sts_cases import tensors_of, to_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_every_launcher_has_a_pair():
    found = set(find_launchers(DSPARK_DIR))
    assert "capacity.admit_drafts" in found, "the search must find launchers"
    assert found == {pair.name for pair in PAIRS}


def test_the_search_finds_launchers_in_functions_and_methods(tmp_path):
    (tmp_path / "new.py").write_text(
        "def launch(x):\n    _scale_kernel[(1,)](x)\n"
        "def other(x):\n    return table[0](x)\n"
        "class Op:\n    def go(self, x):\n        _scale_kernel[(1,)](x)\n"
    )
    assert list(find_launchers(tmp_path)) == ["new.launch", "new.go"]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_launcher_equals_its_reference(pair, seed):
    results = []
    for function in (pair.launcher, pair.reference):
        arguments = {
            name: to_device(value, DEVICE)
            for name, value in pair.make_inputs(seed).items()
        }
        function(**arguments)
        written = [v for name, v in arguments.items() if name.endswith("_out")]
        results.append([t.cpu() for value in written for t in tensors_of(value)])
    assert results[0], "a pair must write something"
    limits = {"atol": pair.tolerance, "rtol": pair.tolerance, "equal_nan": True}
    torch.testing.assert_close(results[0], results[1], **limits)
