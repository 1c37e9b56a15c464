"""Where each tensor of a set lies in one block of bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

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
