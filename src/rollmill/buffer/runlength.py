"""Arrays as bytes, bit for bit; those that hold long stretches of one value as run lengths. Little-endian."""

from __future__ import annotations

import numpy as np

from rollmill.core.types import BoolArray, FloatArray, IntArray

_INT, _FLOAT, _FLAG = np.dtype("<i4"), np.dtype("<f4"), np.dtype("?")


def pack_ints(values: IntArray) -> bytes:
    """[T] int32 as 4T bytes."""
    return np.ascontiguousarray(values, _INT).tobytes()


def unpack_ints(data: bytes) -> IntArray:
    """What `pack_ints` made `data` from."""
    return np.frombuffer(data, _INT).astype(np.int32)


def pack_floats(values: FloatArray) -> bytes:
    """[T] float32 as 4T bytes; NaN keeps its payload, and zero its sign."""
    return np.ascontiguousarray(values, _FLOAT).tobytes()


def unpack_floats(data: bytes) -> FloatArray:
    """What `pack_floats` made `data` from."""
    return np.frombuffer(data, _FLOAT).astype(np.float32)


def pack_runs(values: IntArray | BoolArray) -> bytes:
    """[T] int32 or bool as pairs of int32: a value, and the length of its stretch."""
    if not len(values):
        return b""
    last = np.flatnonzero(values[1:] != values[:-1])
    pairs = np.empty((len(last) + 1, 2), _INT)
    pairs[:-1, 0], pairs[-1, 0] = values[last], values[-1]
    pairs[:-1, 1], pairs[-1, 1] = last + 1, len(values)
    pairs[1:, 1] -= pairs[:-1, 1].copy()
    return pairs.tobytes()


def unpack_runs(data: bytes) -> IntArray:
    """The values that `pack_runs` made `data` from, as int32."""
    pairs = np.frombuffer(data, _INT).reshape(-1, 2)
    return pairs[:, 0].repeat(pairs[:, 1]).astype(np.int32, copy=False)


def unpack_flags(data: bytes) -> BoolArray:
    """The flags that `pack_runs` made `data` from."""
    return unpack_runs(data).astype(_FLAG)
