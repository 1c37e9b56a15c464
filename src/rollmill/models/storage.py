"""Frees and refills the memory of tensors in place.

A tensor is a view of a storage; tied parameters, views, gradients' owners and an engine that decodes with the trainer's
parameters all share one. So the storage's memory is freed and filled again: every tensor remains the same object, and
shared memory stays shared (FSDP frees its parameters this way, arXiv:2304.11277).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage, nn

_PAGE_OUT = 21
"""madvise(2), MADV_PAGEOUT: unlike MADV_DONTNEED it loses nothing of memory that is no file."""


def narrow_weights(model: nn.Module) -> None:
    """Casts all weights but those of adapters to bf16, in place and one after the other; buffers stay as they are."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


def collect_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Returns the distinct storages of tensors that have memory."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def ensure_own_memory(tensors: Iterable[Tensor]) -> None:
    """Copies memory that cannot be freed, such as that of a mapped file, into new storages.

    Tensors that shared a storage share the new one. Call it before other tensors share the storage. Mapped tensors may
    also be unaligned, and kernels round differently there: with aligned memory, a model computes the same bits before
    and after it was saved or moved.
    """
    made: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}  # holds the old ones too, whose addresses are the keys
    for tensor in tensors:
        old = tensor.untyped_storage()
        if old.resizable():
            continue
        if old._cdata not in made:
            made[old._cdata] = old, old.clone()
            page_out(old)
        tensor.data = view_storage_like(made[old._cdata][1], tensor)


def page_out(storage: UntypedStorage) -> None:
    """Takes a mapped file out of the resident set, and its pages are read again if they are needed; no other memory."""
    if sys.platform == "linux" and storage.device.type == "cpu" and not storage.resizable():
        start = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = storage.data_ptr() + storage.nbytes() - start
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _PAGE_OUT)  # advice: it cannot fail


def view_storage_like(storage: UntypedStorage, like: Tensor) -> Tensor:
    """Returns a tensor of the same type, shape and offset in another storage."""
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())


def storage_bytes(storage: UntypedStorage) -> Tensor:
    """Returns the contents as uint8 [bytes], sharing memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def free_storages(storages: Sequence[UntypedStorage]) -> None:
    """Frees the memory. On a GPU, work queued earlier on the stream completes first."""
    for storage in storages:
        storage.resize_(0)
