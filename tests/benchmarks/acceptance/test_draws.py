# SPDX-License-Identifier: Apache-2.0
"""Draws are a pure function of seed, counter and stream, and look random."""

import numpy as np
from scipy import stats

from benchmarks.acceptance.draws import (
    ACCEPT,
    POSITION,
    REQUEST,
    hash32,
    normals,
    uniforms,
)

SEEDS = np.arange(200)[:, None] + 65536 * 3
COUNTERS = np.arange(500)


def plain_hash(seed, counter, stream):
    """The same integers with Python's own, one at a time."""

    def mix(x):
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    spread = (seed * 0x9E3779B1 + stream * 0xC2B2AE3D) % 2**32
    return mix((mix(spread) + counter * 0x85EBCA77) % 2**32)


def test_bits_equal_plain_integer_arithmetic():
    found = hash32(SEEDS, COUNTERS, POSITION)
    for i, j in [(0, 0), (3, 7), (199, 499)]:
        assert found[i, j] == plain_hash(int(SEEDS[i, 0]), j, POSITION)


def test_draw_does_not_depend_on_what_else_is_drawn():
    whole = uniforms(SEEDS, COUNTERS, ACCEPT)
    assert uniforms(SEEDS[5:6], COUNTERS[7], ACCEPT) == whole[5, 7]


def test_uniforms_are_uniform_inside_and_exact_in_float32():
    found = uniforms(SEEDS, COUNTERS, ACCEPT)
    assert found.min() > 0.0 and found.max() < 1.0
    assert (found.astype(np.float32) == found).all()
    assert stats.kstest(found.ravel()[::7], "uniform").pvalue > 1e-3


def test_neighbours_and_streams_are_independent():
    found = uniforms(SEEDS, COUNTERS, ACCEPT)
    pairs = [
        (found[:-1], found[1:]),  # seeds
        (found[:, :-1], found[:, 1:]),  # counters
        (found, uniforms(SEEDS, COUNTERS, POSITION)),
        (found, uniforms(SEEDS, COUNTERS, POSITION + 16)),
    ]
    for a, b in pairs:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.012


def test_normals_are_standard_normal():
    found = normals(np.arange(100_000), 0, REQUEST)
    assert stats.kstest(found, "norm").pvalue > 1e-3
