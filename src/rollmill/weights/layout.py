"""Layout of a set of tensors in one block of bytes, and checksums of such blocks.

Two threads copy and hash a block in chunks.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rollmill.errors import WeightSyncError

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor of a block: name of its type, shape, and offset in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.type.itemsize

    @property
    def type(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found


@dataclass(frozen=True)
class BlockLayout:
    """Slots of tensors by name, in order, each aligned to 64 bytes."""

    places: Mapping[str, TensorSlot]
    size: int = field(init=False)  #: bytes of the whole block

    def __post_init__(self) -> None:
        last = list(self.places.values())[-1:]
        object.__setattr__(self, "size", align_size(last[0].start + last[0].bytes) if last else 0)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> BlockLayout:
        """Returns the layout of these tensors, with floating-point ones as `dtype` if given."""
        places, start = {}, 0
        for name, tensor in tensors.items():
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            places[name] = TensorSlot(str(kind).removeprefix("torch."), tuple(tensor.shape), start)
            start = align_size(start + places[name].bytes)
        return cls(places)

    def tensors(self, block: Tensor) -> dict[str, Tensor]:
        """Returns views of the tensors in a block (uint8, at least `size` long)."""
        return {
            name: block[place.start : place.start + place.bytes].view(place.type).view(place.shape)
            for name, place in self.places.items()
        }

    @property
    def float_type(self) -> torch.dtype | None:
        """The type of all floating-point tensors; None if they have several."""
        kinds = {place.type for place in self.places.values() if place.type.is_floating_point}
        return kinds.pop() if len(kinds) == 1 else None

    def buckets(self, limit: int) -> list[Bucket]:
        """Splits the tensors, in order, into buckets of at most `limit` bytes; a larger tensor has one of its own."""
        groups: list[dict[str, TensorSlot]] = []
        start = 0
        for name, place in self.places.items():
            if not groups or place.start + place.bytes - start > limit:
                groups.append({})
                start = place.start
            groups[-1][name] = replace(place, start=place.start - start)
        return [Bucket(self.places[next(iter(group))].start, BlockLayout(group)) for group in groups]

    def require(self, tensors: Mapping[str, Tensor], whose: str) -> None:
        """Checks that `tensors` have these names and shapes; types may differ.

        Raises:
            WeightSyncError: they do not.
        """
        for name, place in self.places.items():
            if name not in tensors:
                raise WeightSyncError(f"{whose} has no tensor {name}, but the sent weights have it")
            if tuple(tensors[name].shape) != place.shape:
                shapes = f"{tuple(tensors[name].shape)}; the sent one is {place.shape}"
                raise WeightSyncError(f"{name} of {whose} has shape {shapes}")
        for name in tensors:
            if name not in self.places:
                raise WeightSyncError(f"{name} of {whose} is not among the sent weights")

    def to_json(self) -> str:
        """Serializes the layout; see `from_json`."""
        return json.dumps({name: [place.dtype, place.shape, place.start] for name, place in self.places.items()})

    @classmethod
    def from_json(cls, text: str) -> BlockLayout:
        """Parses the output of `to_json`."""
        rows = json.loads(text).items()
        return cls({name: TensorSlot(dtype, tuple(shape), start) for name, (dtype, shape, start) in rows})


class Bucket(NamedTuple):
    """Tensors that follow each other in a block."""

    start: int  #: offset of the first one in the block
    layout: BlockLayout  #: of the bucket alone

    def of(self, block: Tensor) -> Tensor:
        """Returns the bucket's bytes in the whole block."""
        return block[self.start : self.start + self.layout.size]


def align_size(size: int) -> int:
    """Rounds up to a multiple of 64."""
    return -(-size // ALIGNMENT) * ALIGNMENT


XXH3, CRC32 = "xxh3", "crc32"
"""Checksums: the fast one, and the one in the standard library."""
CHUNK_BYTES = 8 << 20
"""Bytes of one thread's unit of work."""
PIECE_BYTES = 1 << 21
"""Bytes hashed and copied together: a piece is copied while it is still in the CPU's cache."""
THREADS = min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
"""Copying and hashing release the GIL; more than two threads are limited by memory bandwidth."""


class Hasher(Protocol):
    """Interface of xxhash's hashers."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Adds bytes."""

    def intdigest(self) -> int:
        """Returns the hash of all bytes so far; at most 64 bits."""


class _CRC32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def intdigest(self) -> int:
        return self._value


CopyChunk = tuple[Tensor, Tensor | None]
"""(bytes of the block, bytes to copy there or None): uint8 [N] each."""


def compute_checksum(layout: BlockLayout, block: Tensor, checksum: str = XXH3) -> int:
    """Returns the checksum of a block, of which gaps between tensors are no part."""
    places = layout.places.values()
    parts = [p for each in places for p in split_chunks(block[each.start : each.start + each.bytes], None)]
    return combine_checksums(hash_chunks(parts, checksum), checksum)


def combine_checksums(sums: Sequence[int], kind: str) -> int:
    """Returns the checksum of a block from those of all its chunks, in order."""
    whole = get_hasher(kind)()
    whole.update(struct.pack(f"<{len(sums)}Q", *sums))
    return whole.intdigest()


def hash_chunks(parts: Sequence[CopyChunk], kind: str) -> list[int]:
    """Returns the checksums of chunks, and copies those that have a source."""
    one = partial(_hash_and_copy, get_hasher(kind))
    if THREADS == 1 or len(parts) < 2:
        return list(map(one, parts))
    with ThreadPoolExecutor(THREADS, thread_name_prefix="rollmill-weights") as threads:
        return list(threads.map(one, parts))


def _hash_and_copy(new: Callable[[], Hasher], part: CopyChunk) -> int:
    """Hashes a part, and copies it if it has a source."""
    target = part[0].numpy()
    source = None if part[1] is None else part[1].numpy()
    found = new()
    for start in range(0, len(target), PIECE_BYTES):
        piece = slice(start, start + PIECE_BYTES)
        found.update((target if source is None else source)[piece].data)
        if source is not None:
            np.copyto(target[piece], source[piece])
    return found.intdigest()


def get_hasher(kind: str) -> Callable[[], Hasher]:
    """Returns the constructor of hashers of this kind."""
    if kind == CRC32:
        return _CRC32
    import xxhash  # an engine's own environment may lack it

    return xxhash.xxh3_64


def split_chunks(target: Tensor, source: Tensor | None) -> Iterator[CopyChunk]:
    """Splits the bytes of a tensor, and those to copy there, into units of work."""
    for start in range(0, len(target), CHUNK_BYTES):
        part = slice(start, start + CHUNK_BYTES)
        yield target[part], None if source is None else source[part]
