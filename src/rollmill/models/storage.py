"""Memory of tensors, handed back and taken again in place.

A tensor looks at a storage; tied parameters, views, gradients' owners and an engine that decodes with the trainer's
parameters all look at the same one. So it is the storage whose memory is freed and filled again: every tensor stays the
object it was, and what was shared stays shared (FSDP frees its parameters in this way, arXiv:2304.11277).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage


def collect_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The storages that tensors look at, each once; those without memory are left out."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def ensure_own_memory(tensors: Iterable[Tensor]) -> None:
    """Give memory of its own to what looks at memory that cannot be handed back, such as that of a file.

    Tensors that shared a storage share the new one. Has to come before other tensors look at the storage. What was
    read from a file lies where the file has it, and kernels round otherwise there: on aligned memory, which all else
    has, a model computes the same bits before and after it was saved or moved.
    """
    made: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}  # with the old ones, whose addresses are the keys
    for tensor in tensors:
        old = tensor.untyped_storage()
        if old.resizable():
            continue
        if old._cdata not in made:
            made[old._cdata] = old, old.clone()
        tensor.data = view_storage_like(made[old._cdata][1], tensor)


def view_storage_like(storage: UntypedStorage, like: Tensor) -> Tensor:
    """A tensor of the same type and shape that looks at the same place of another storage."""
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


def storage_bytes(storage: UntypedStorage) -> Tensor:
    """The contents: uint8 [bytes], the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def free_storages(storages: Sequence[UntypedStorage]) -> None:
    """Hand their memory back. On a GPU, work that was queued before is done with it first: memory goes by stream."""
    for storage in storages:
        storage.resize_(0)
