"""Where each tensor of a set lies in one block of bytes."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rollmill.errors import WeightSyncError

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor: its type's name, shape, and where its bytes begin."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        """How many it takes."""
        return prod(self.shape) * self.type.itemsize

    @property
    def type(self) -> torch.dtype:
        """As torch has it."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found


@dataclass(frozen=True)
class BlockLayout:
    """Tensors by name, in order, each aligned to 64 bytes."""

    places: Mapping[str, TensorSlot]
    size: int = field(init=False)  #: bytes of the whole block

    def __post_init__(self) -> None:
        last = list(self.places.values())[-1:]
        object.__setattr__(self, "size", align_size(last[0].start + last[0].bytes) if last else 0)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> BlockLayout:
        """The layout of these tensors; floating-point ones as `dtype`, where one is given."""
        places, start = {}, 0
        for name, tensor in tensors.items():
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            places[name] = TensorSlot(str(kind).removeprefix("torch."), tuple(tensor.shape), start)
            start = align_size(start + places[name].bytes)
        return cls(places)

    def tensors(self, block: Tensor) -> dict[str, Tensor]:
        """Views of a block (uint8, at least `size` long)."""
        return {
            name: block[place.start : place.start + place.bytes].view(place.type).view(place.shape)
            for name, place in self.places.items()
        }

    def require(self, tensors: Mapping[str, Tensor], whose: str) -> None:
        """Raises WeightSyncError unless `tensors` have these names and shapes; types may differ."""
        for name, place in self.places.items():
            if name not in tensors:
                raise WeightSyncError(f"{whose} has no tensor {name}, which the weights that are sent have")
            if tuple(tensors[name].shape) != place.shape:
                shapes = f"{tuple(tensors[name].shape)}; the one that is sent is {place.shape}"
                raise WeightSyncError(f"{name} of {whose} has shape {shapes}")
        for name in tensors:
            if name not in self.places:
                raise WeightSyncError(f"{name} of {whose} is not among the weights that are sent")

    def to_json(self) -> str:
        """Its text; see `from_json`."""
        return json.dumps({name: [place.dtype, place.shape, place.start] for name, place in self.places.items()})

    @classmethod
    def from_json(cls, text: str) -> BlockLayout:
        """The layout that `to_json` wrote."""
        rows = json.loads(text).items()
        return cls({name: TensorSlot(dtype, tuple(shape), start) for name, (dtype, shape, start) in rows})


def align_size(size: int) -> int:
    """The next multiple of 64."""
    return -(-size // ALIGNMENT) * ALIGNMENT


# Weights copied into a block of bytes, and what the block weighs: two threads hash and copy, part by part.

XXH3, CRC32 = "xxh3", "crc32"
"""Checksums: the fast one, and the one that every Python has."""
CHUNK_BYTES = 8 << 20
"""Bytes that one thread takes at once."""
PIECE_BYTES = 1 << 21
"""Bytes that are hashed and copied together: a piece is copied while it is still in the processor's cache."""
THREADS = min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
"""Copying and hashing leave Python's lock; more than two threads wait for memory."""


class Hasher(Protocol):
    """As xxhash has it."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Count further bytes."""

    def intdigest(self) -> int:
        """Of all bytes so far; 64 bits at most."""


class _CRC32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def intdigest(self) -> int:
        return self._value


CopyChunk = tuple[Tensor, Tensor | None]
"""Bytes of the block, and those that are to be copied there: uint8 [N] each."""


@torch.no_grad()
def pack_block(tensors: Mapping[str, Tensor], layout: BlockLayout, block: Tensor, checksum: str = XXH3) -> int:
    """Copy tensors into a block in host memory, casting where the layout says so; the block's checksum.

    The gaps between tensors are left as they are, and are not counted.
    """
    parts: list[CopyChunk] = []
    for name, view in layout.tensors(block).items():
        source = tensors[name].detach()
        plain = source.dtype == view.dtype and source.device.type == "cpu" and source.is_contiguous()
        if not plain:
            view.copy_(source)
        parts += _split_chunks(_byte_view(view), _byte_view(source) if plain else None)
    return _checksum_chunks(parts, checksum)


def compute_checksum(layout: BlockLayout, block: Tensor, checksum: str = XXH3) -> int:
    """The checksum of a block as `pack` counts it."""
    places = layout.places.values()
    return _checksum_chunks(
        [p for each in places for p in _split_chunks(block[each.start : each.start + each.bytes], None)], checksum
    )


def _checksum_chunks(parts: list[CopyChunk], kind: str) -> int:
    """The checksum of the parts' checksums, which does not depend on who computes which."""
    one = partial(_hash_and_copy, get_hasher(kind))
    if THREADS == 1 or len(parts) < 2:
        sums = list(map(one, parts))
    else:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="rollmill-weights") as threads:
            sums = list(threads.map(one, parts))
    whole = get_hasher(kind)()
    whole.update(struct.pack(f"<{len(sums)}Q", *sums))
    return whole.intdigest()


def _hash_and_copy(new: Callable[[], Hasher], part: CopyChunk) -> int:
    """Hash a part, and copy it where there is something to copy."""
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
    """What makes a new hash of this kind."""
    if kind == CRC32:
        return _CRC32
    import xxhash  # the environment of an engine in another process may lack it

    return xxhash.xxh3_64


def _split_chunks(target: Tensor, source: Tensor | None) -> Iterator[CopyChunk]:
    for start in range(0, len(target), CHUNK_BYTES):
        part = slice(start, start + CHUNK_BYTES)
        yield target[part], None if source is None else source[part]


def _byte_view(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a view."""
    return tensor.view(-1).view(torch.uint8)
