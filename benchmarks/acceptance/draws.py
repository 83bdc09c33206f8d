# SPDX-License-Identifier: Apache-2.0
"""Counter-based random draws: a pure function of (seed, counter, stream).

Nothing is stored and nothing depends on the order of calls, so every arm sees the
same draw for the same token of the same request, whatever it drafted before. The
sweep's Triton kernel computes the same integers (``benchmarks/sweep/coupled.py``).

Invariants (pinned by tests/benchmarks/acceptance/test_draws.py):
  * Equal arguments give equal bits; streams, counters and seeds are independent.
  * Uniforms lie strictly between 0 and 1 and are exact in float32 (24 bits).
"""

import numpy as np

# Streams, one per use of a token's randomness.
ACCEPT, POSITION, REQUEST = 1, 2, 3
# Odd constants that spread seed, counter and stream over 32 bits before mixing:
# 2**32 divided by the golden ratio, and two primes near it.
SEED_STEP, COUNTER_STEP, STREAM_STEP = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
# Multipliers of a 32-bit finaliser with low bias.
# Source: C. Wellons, "Prospecting for Hash Functions" (lowbias32).
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B
_U32 = 0xFFFFFFFF


def request_seed(load_seed: int, number: np.ndarray | int) -> np.ndarray | int:
    """Return the seed of the ``number``-th request of a load."""
    return load_seed * 65536 + number


def _mix(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> 16)
    x = (x * MIX_1) & _U32
    x = x ^ (x >> 15)
    x = (x * MIX_2) & _U32
    return x ^ (x >> 16)


def hash32(seeds: np.ndarray, counters: np.ndarray | int, stream: int) -> np.ndarray:
    """Return 32 random bits per entry.

    Args:
        seeds: Of the requests, integers; the low 32 bits count.
        counters: Token positions, integers; broadcast against ``seeds``.
        stream: Which use, a small integer.

    Returns:
        uint64 values below 2**32, in the broadcast shape.
    """
    seed = np.asarray(seeds).astype(np.uint64) & _U32
    counter = np.asarray(counters).astype(np.uint64) & _U32
    spread = (seed * SEED_STEP + np.uint64(stream * STREAM_STEP & _U32)) & _U32
    # Two rounds: one alone leaves neighbouring seeds and counters correlated.
    return _mix((_mix(spread) + counter * COUNTER_STEP) & _U32)


def uniforms(seeds: np.ndarray, counters: np.ndarray | int, stream: int) -> np.ndarray:
    """Return uniforms in (0, 1), float64, exact in float32.

    Args: see :func:`hash32`.
    """
    return ((hash32(seeds, counters, stream) >> np.uint64(9)) + 0.5) / 2.0**23


def normals(seeds: np.ndarray, counters: np.ndarray | int, stream: int) -> np.ndarray:
    """Return standard normals, float64 (Box and Muller).

    Args: see :func:`hash32`; ``stream`` and ``stream + 16`` are used.
    """
    radius = np.sqrt(-2.0 * np.log(uniforms(seeds, counters, stream)))
    angle = 2.0 * np.pi * uniforms(seeds, counters, stream + 16)
    return radius * np.cos(angle)
