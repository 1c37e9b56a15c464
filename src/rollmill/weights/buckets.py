"""Weights in buckets: some tensors of the policy at a time, whole and in the engine's type.

The policy is whole in one process, or several ranks hold parts of it. Then its tensors are gathered one after the
other, so that no device ever holds all of them. What goes to a GPU or comes from it is packed into buckets, which cross
in one transfer each, through pinned memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing

import torch
from torch import Tensor

from rollmill.errors import WeightSyncError
from rollmill.weights.cuda_ipc import IPCSender
from rollmill.weights.layout import (
    XXH3,
    BlockLayout,
    Bucket,
    CopyChunk,
    combine_checksums,
    hash_chunks,
    split_chunks,
)

BUCKET_BYTES = 256 << 20
"""Bytes of a bucket at most, unless a single tensor is larger."""

Gather = Callable[[torch.dtype | None], Iterator[tuple[str, Tensor]]]
"""Yields whole tensors one after the other, floating-point ones as a type (None: their own). All ranks take part."""


class ShardedWeights(Mapping[str, Tensor]):
    """Weights of which several ranks hold parts. Its values tell shapes and types; `gather` makes them whole."""

    def __init__(self, parts: Mapping[str, Tensor], gather: Gather) -> None:
        self._parts, self.gather = parts, gather

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


@torch.no_grad()
def copy_whole(weights: Mapping[str, Tensor], into: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Copies each of the weights into the tensor of its name, gathered as `dtype` where ranks hold parts of it."""
    with closing(_whole(weights, dtype)) as tensors:
        for name, tensor in tensors:
            into[name].copy_(tensor)


@torch.no_grad()
def fill_buckets(
    weights: Mapping[str, Tensor], layout: BlockLayout, memory: Callable[[Bucket], Tensor]
) -> Iterator[tuple[Bucket, Tensor]]:
    """Packs weights into buckets, one after the other; yields each with its bytes.

    Args:
        memory: returns the bytes to pack a bucket into, on any device; those of an earlier bucket may be used again.
    """
    with closing(_whole(weights, layout.float_type)) as tensors:
        for bucket in layout.buckets(BUCKET_BYTES):
            packed = memory(bucket)
            for name, view in bucket.layout.tensors(packed).items():
                found, tensor = next(tensors)
                if found != name:
                    raise WeightSyncError(f"the trainer's model has {found} where the sent weights have {name}")
                view.copy_(tensor)
            yield bucket, packed


def _whole(weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> Generator[tuple[str, Tensor], None, None]:
    yield from weights.gather(dtype) if isinstance(weights, ShardedWeights) else weights.items()


@torch.no_grad()
def pack_block(
    weights: Mapping[str, Tensor],
    layout: BlockLayout,
    block: Tensor,
    checksum: str = XXH3,
    readers: IPCSender | None = None,
) -> int:
    """Copies weights into a block in host memory, with the layout's types; returns the block's checksum.

    Gaps between tensors are not changed and not part of the checksum.

    Args:
        readers: get each bucket on the GPU, too; it has offered the weights.
    """
    device = next((each.device for each in weights.values()), torch.device("cpu"))
    if device.type == "cuda":
        sums = _pack_from_gpu(weights, layout, block, checksum, device, readers)
    elif isinstance(weights, ShardedWeights):
        sums = []
        for bucket, packed in fill_buckets(weights, layout, lambda bucket: bucket.of(block)):
            sums += hash_chunks(_chunks(bucket, packed), checksum)
    else:
        parts: list[CopyChunk] = []
        for name, view in layout.tensors(block).items():
            source = weights[name].detach()
            plain = source.dtype == view.dtype and source.device.type == "cpu" and source.is_contiguous()
            if not plain:
                view.copy_(source)
            parts += split_chunks(_byte_view(view), _byte_view(source) if plain else None)
        sums = hash_chunks(parts, checksum)
    return combine_checksums(sums, checksum)


def _pack_from_gpu(
    weights: Mapping[str, Tensor],
    layout: BlockLayout,
    block: Tensor,
    checksum: str,
    device: torch.device,
    readers: IPCSender | None,
) -> list[int]:
    """Packs a block bucket by bucket; while one crosses to the host, the one before is hashed and copied.

    Returns the checksums of its chunks.
    """
    size, sums = _largest(layout), list[int]()
    if readers is not None:
        readers.begin(layout, BUCKET_BYTES)
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(1 if readers is None else 2)]
    here = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    crossed = [torch.cuda.Event() for _ in range(2)]

    pieces = itertools.cycle(range(len(there)))
    piece = 0

    def memory(_: Bucket) -> Tensor:
        nonlocal piece
        piece = next(pieces)
        if readers is not None:
            readers.wait(piece)
        return there[piece]

    def finish(number: int, bucket: Bucket) -> None:
        crossed[number % 2].synchronize()
        sums.extend(hash_chunks(_chunks(bucket, bucket.of(block), here[number % 2]), checksum))

    before: tuple[int, Bucket] | None = None
    for number, (bucket, packed) in enumerate(fill_buckets(weights, layout, memory)):
        here[number % 2][: bucket.layout.size].copy_(packed[: bucket.layout.size], non_blocking=True)
        crossed[number % 2].record()
        if readers is not None:
            readers.hand(piece, packed)
        if before is not None:
            finish(*before)
        before = number, bucket
    if before is not None:
        finish(*before)
    if readers is not None:
        readers.end()
    return sums


def load_tensors(layout: BlockLayout, block: Tensor, into: Mapping[str, Tensor]) -> None:
    """Copies the tensors of a block in host memory into those of their names, on any device and of any type."""
    device = next((each.device for each in into.values()), torch.device("cpu"))
    with torch.no_grad():
        for name, tensor in block_tensors(layout, block, device):
            into[name].detach().copy_(tensor)


def block_tensors(layout: BlockLayout, block: Tensor, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a block in host memory on a device: on a CPU views, on a GPU memory of their own."""
    if device.type != "cuda":
        yield from layout.tensors(block).items()
        return
    here = [torch.empty(_largest(layout), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    crossed = [torch.cuda.Event() for _ in range(2)]
    for number, bucket in enumerate(layout.buckets(BUCKET_BYTES)):
        if number >= 2:
            crossed[number % 2].synchronize()
        source = here[number % 2][: bucket.layout.size]
        source.copy_(bucket.of(block))
        packed = source.to(device, non_blocking=True)
        crossed[number % 2].record()
        yield from bucket.layout.tensors(packed).items()
    torch.cuda.current_stream(device).synchronize()


def _largest(layout: BlockLayout) -> int:
    return max((bucket.layout.size for bucket in layout.buckets(BUCKET_BYTES)), default=0)


def _chunks(bucket: Bucket, target: Tensor, source: Tensor | None = None) -> list[CopyChunk]:
    """The chunks of a bucket's tensors, with what is to be copied there."""
    found: list[CopyChunk] = []
    for place in bucket.layout.places.values():
        part = slice(place.start, place.start + place.bytes)
        found += split_chunks(target[part], None if source is None else source[part])
    return found


def _byte_view(tensor: Tensor) -> Tensor:
    """Views a contiguous tensor as bytes."""
    return tensor.view(-1).view(torch.uint8)
