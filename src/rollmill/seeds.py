"""Counter-based random numbers: a token's randomness depends only on (seed, position), not on the batch around it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


def _mix(x: U64) -> U64:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014), element by element."""
    x = (x ^ (x >> _S30)) * _MIX_1
    x = (x ^ (x >> _S27)) * _MIX_2
    return x ^ (x >> _S31)


def derive_seed(seed: int, *parts: int) -> int:
    """Derive a 64-bit seed from a seed and integers, for example (run seed, step, task)."""
    state = np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64)
    for part in parts:
        state = _mix(state + _GOLDEN) ^ _mix(np.array([part & 0xFFFFFFFFFFFFFFFF], np.uint64) * _GOLDEN + _MIX_1)
    return int(_mix(state + _GOLDEN)[0])


def counter_uniforms(seeds: U64, counters: U64) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, one per (seed, counter) pair; shapes are equal."""
    bits = _mix(_mix(seeds + _GOLDEN) + (counters + np.uint64(1)) * _GOLDEN)
    return (bits >> _S11).astype(np.float64) * 2.0**-53
