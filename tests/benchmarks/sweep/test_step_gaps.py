# SPDX-License-Identifier: Apache-2.0
"""Step times of a load."""

import pytest

from benchmarks.sweep.step_gaps import decode_step_ms, prompt_step_ms


def steps(*sizes_and_ms):
    """Return steps from (requests, tokens, ms until the next one starts)."""
    start, found = 0.0, []
    for num_reqs, num_tokens, ms in sizes_and_ms:
        found.append((start, num_reqs, num_tokens))
        start += ms / 1e3
    return [*found, (start, 1, 1)]


LOAD = steps(
    (2, 130, 30.0),  # prompts
    (2, 66, 20.0),
    *[(2, 16, ms) for ms in (7.0, 8.0, 12.0)],
    (2, 8, 5.0),  # too few of this width
    *[(1, 8, 1.0)] * 3,  # the drain
)


def test_decode_steps_are_those_of_the_largest_batch_without_prompts():
    assert decode_step_ms(LOAD, 50) == {"8.00": pytest.approx(8.0)}
    assert decode_step_ms(LOAD, 100) == {"8.00": pytest.approx(12.0)}


def test_prompt_steps_are_apart():
    assert prompt_step_ms(LOAD) == pytest.approx(25.0)
    assert prompt_step_ms(LOAD[2:]) is None


def test_no_steps():
    assert decode_step_ms([], 50) == {} and prompt_step_ms([]) is None
