"""Operations among ranks on many tensors at once: each operation waits for the slowest rank, so few are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

ALLREDUCE_BUCKET_BYTES = 1 << 25  #: bytes, as many as DistributedDataParallel takes


def apply_in_buckets(tensors: Sequence[Tensor], operation: Callable[[Tensor], object]) -> None:
    """Apply an elementwise operation that changes its argument to all tensors, in place. They have one type."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        operation(flat)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > ALLREDUCE_BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
