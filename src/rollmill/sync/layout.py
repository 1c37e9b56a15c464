"""Where each tensor of a set lies in one block of bytes, and what the whole weighs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from rollmill.core.errors import SyncError

ALIGNMENT = 64
PIECE = 1 << 20
"""Bytes that are copied and hashed together: a piece is hashed while it is still in the processor's cache."""
XXH3, CRC32 = "xxh3", "crc32"
"""Checksums: the fast one, and the one that every Python has."""


@dataclass(frozen=True, slots=True)
class Place:
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
class Layout:
    """Tensors by name, in order, each aligned to 64 bytes."""

    places: Mapping[str, Place]
    size: int = field(init=False)  #: bytes of the whole block

    def __post_init__(self) -> None:
        last = list(self.places.values())[-1:]
        object.__setattr__(self, "size", aligned(last[0].start + last[0].bytes) if last else 0)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Layout:
        """The layout of these tensors; floating-point ones as `dtype`, where one is given."""
        places, start = {}, 0
        for name, tensor in tensors.items():
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            places[name] = Place(str(kind).removeprefix("torch."), tuple(tensor.shape), start)
            start = aligned(start + places[name].bytes)
        return cls(places)

    def tensors(self, block: Tensor) -> dict[str, Tensor]:
        """Views of a block (uint8, at least `size` long)."""
        return {
            name: block[place.start : place.start + place.bytes].view(place.type).view(place.shape)
            for name, place in self.places.items()
        }

    def require(self, tensors: Mapping[str, Tensor], whose: str) -> None:
        """Raises SyncError unless `tensors` have these names and shapes; types may differ."""
        for name, place in self.places.items():
            if name not in tensors:
                raise SyncError(f"{whose} has no tensor {name}, which the weights that are sent have")
            if tuple(tensors[name].shape) != place.shape:
                shapes = f"{tuple(tensors[name].shape)}; the one that is sent is {place.shape}"
                raise SyncError(f"{name} of {whose} has shape {shapes}")
        for name in tensors:
            if name not in self.places:
                raise SyncError(f"{name} of {whose} is not among the weights that are sent")

    def to_json(self) -> str:
        """Its text; see `from_json`."""
        return json.dumps({name: [place.dtype, place.shape, place.start] for name, place in self.places.items()})

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout that `to_json` wrote."""
        rows = json.loads(text).items()
        return cls({name: Place(dtype, tuple(shape), start) for name, (dtype, shape, start) in rows})


def aligned(size: int) -> int:
    """The next multiple of 64."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Checksum:
    """xxh3 (or crc32) of bytes that come in pieces."""

    def __init__(self, kind: str = XXH3) -> None:
        self._crc, self._hash = 0, None
        if kind == XXH3:
            import xxhash  # the environment of an engine in another process may lack it

            self._hash = xxhash.xxh3_64()

    def add(self, data: Tensor) -> None:
        """Count a contiguous uint8 tensor in host memory."""
        if self._hash is None:
            self._crc = zlib.crc32(data.numpy().data, self._crc)
        else:
            self._hash.update(data.numpy().data)

    @property
    def value(self) -> int:
        """Of all bytes so far."""
        return self._crc if self._hash is None else self._hash.intdigest()


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as a view."""
    return tensor.detach().view(-1).view(torch.uint8)


def pieces(size: int) -> Iterator[slice]:
    """Slices that cover `size` bytes."""
    for start in range(0, size, PIECE):
        yield slice(start, min(start + PIECE, size))


@torch.no_grad()
def pack(tensors: Mapping[str, Tensor], layout: Layout, block: Tensor, checksum: str = XXH3) -> int:
    """Copy tensors into a block in host memory, casting where the layout says so; the block's checksum.

    The gaps between tensors are left as they are, and are not counted.
    """
    sum_ = Checksum(checksum)
    for name, view in layout.tensors(block).items():
        source, target = tensors[name].detach(), raw(view)
        if source.dtype == view.dtype and source.device.type == "cpu" and source.is_contiguous():
            data = raw(source)
            for piece in pieces(len(data)):
                target[piece].copy_(data[piece])
                sum_.add(target[piece])
        else:
            view.copy_(source)
            sum_.add(target)
    return sum_.value


def weigh(layout: Layout, block: Tensor, checksum: str = XXH3) -> int:
    """The checksum of a block as `pack` counts it."""
    sum_ = Checksum(checksum)
    for place in layout.places.values():
        sum_.add(block[place.start : place.start + place.bytes])
    return sum_.value
