"""A group's arrays end to end as bytes, bit for bit, flags and versions as run lengths. Little-endian."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmill.types import BoolArray, FloatArray, IntArray

_INT, _FLOAT, _FLAG = np.dtype("<i4"), np.dtype("<f4"), np.dtype("?")
_NONE = -1


def pack_lengths(columns: Iterable[Sequence[Any]]) -> bytes:
    """Each array's length as int32, column by column; -1 where there is None."""
    return np.array([[_NONE if one is None else len(one) for one in column] for column in columns], _INT).tobytes()


def unpack_lengths(data: bytes, columns: int) -> list[list[int]]:
    """What `pack_lengths` made `data` from: a list per column."""
    found: list[list[int]] = np.frombuffer(data, _INT).reshape(columns, -1).tolist()
    return found


def pack_ints(arrays: Sequence[IntArray]) -> bytes:
    """int32 as 4 bytes each."""
    return _joined(arrays, _INT).tobytes()


def unpack_ints(data: bytes, lengths: Sequence[int]) -> list[Any]:
    """What `pack_ints` made `data` from. Raises ValueError where the lengths do not fit, like all below."""
    return _split(np.frombuffer(data, _INT).astype(np.int32), lengths)


def pack_floats(arrays: Sequence[FloatArray | None]) -> bytes:
    """float32 as 4 bytes each; NaN keeps its payload, and zero its sign."""
    return _joined([one for one in arrays if one is not None], _FLOAT).tobytes()


def unpack_floats(data: bytes, lengths: Sequence[int]) -> list[Any]:
    """What `pack_floats` made `data` from."""
    return _split(np.frombuffer(data, _FLOAT).astype(np.float32), lengths)


def pack_versions(arrays: Sequence[IntArray]) -> bytes:
    """int32 as pairs of int32: a value, and the length of its stretch."""
    return _runs(_joined(arrays, _INT))


def unpack_versions(data: bytes, lengths: Sequence[int]) -> list[Any]:
    """What `pack_versions` made `data` from."""
    return _split(_stretched(data).astype(np.int32, copy=False), lengths)


def pack_flags(arrays: Sequence[BoolArray]) -> bytes:
    """Flags as pairs of int32: 0 or 1, and the length of its stretch."""
    return _runs(_joined(arrays, _FLAG))


def unpack_flags(data: bytes, lengths: Sequence[int]) -> list[Any]:
    """What `pack_flags` made `data` from."""
    return _split(_stretched(data).astype(_FLAG), lengths)


def _joined(arrays: Sequence[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else np.empty(0, dtype)


def _split(values: npt.NDArray[Any], lengths: Sequence[int]) -> list[Any]:
    bounds = list(accumulate((max(length, 0) for length in lengths), initial=0))
    if bounds[-1] != len(values):
        raise ValueError(f"{len(values)} values where {bounds[-1]} belong")
    return [
        None if length == _NONE else values[start:end]
        for length, (start, end) in zip(lengths, pairwise(bounds), strict=True)
    ]


def _runs(values: npt.NDArray[Any]) -> bytes:
    if not len(values):
        return b""
    last = np.flatnonzero(values[1:] != values[:-1])
    pairs = np.empty((len(last) + 1, 2), _INT)
    pairs[:-1, 0], pairs[-1, 0] = values[last], values[-1]
    pairs[:-1, 1], pairs[-1, 1] = last + 1, len(values)
    pairs[1:, 1] -= pairs[:-1, 1].copy()
    return pairs.tobytes()


def _stretched(data: bytes) -> npt.NDArray[Any]:
    pairs = np.frombuffer(data, _INT).reshape(-1, 2)
    return pairs[:, 0].repeat(pairs[:, 1])
