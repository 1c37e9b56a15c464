"""Frees and refills the memory of tensors in place.

A tensor is a view of a storage; tied parameters, views, gradients' owners and an engine that decodes with the trainer's
parameters all share one. So the storage's memory is freed and filled again: every tensor remains the same object, and
shared memory stays shared (FSDP frees its parameters this way, arXiv:2304.11277).
"""

from __future__ import annotations

import copy
import ctypes
import mmap
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

_SMALL = 1 << 20  # bytes
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


class StoredParameter(nn.Parameter):
    """A parameter without memory, whose values are read from a checkpoint's file when they are needed.

    Copies are read from the same file.
    """

    source: Tensor | None  #: mapped; None once they have been read, and may have changed

    def __new__(cls, source: Tensor, dtype: torch.dtype, requires_grad: bool = True) -> StoredParameter:
        empty = torch.empty(source.shape, dtype=dtype)
        empty.untyped_storage().resize_(0)
        made: StoredParameter = super().__new__(cls, empty, requires_grad)
        made.source = source
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            is_read = self.source is None or self.untyped_storage().nbytes() > 0
            memo[id(self)] = (
                nn.Parameter(self.data.clone(), self.requires_grad)
                if is_read or self.source is None
                else StoredParameter(self.source, self.dtype, self.requires_grad)
            )
        found: nn.Parameter = memo[id(self)]
        return found

    def read(self, device: torch.device) -> Tensor:
        """Returns the values in memory of their own."""
        assert self.source is not None
        found = self.source.to(device, self.dtype, copy=True)
        page_out(self.source.untyped_storage())
        return found


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


def leave_in_files(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces matrices in the memory of files, or of another type than `dtype`, by StoredParameters of that type.

    Vectors come to memory: norms are tried out before they are used.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                made[parameter] = parameter
                if parameter.ndim < 2:
                    parameter.data = parameter.data.to(dtype, copy=True)
                elif parameter.dtype != dtype or not parameter.untyped_storage().resizable():
                    made[parameter] = StoredParameter(parameter.data, dtype, parameter.requires_grad)
            module._parameters[name] = made[parameter]


def is_stored(model: nn.Module) -> bool:
    """True if parameters are still in files."""
    return any(isinstance(each, StoredParameter) and each.source is not None for each in model.parameters())


@contextmanager
def zeros_for_stored(model: nn.Module) -> Iterator[None]:
    """Context in which parameters that are still in files are zeros without memory, to see what a model calls."""
    stored = [
        (each, each.data)
        for each in model.parameters()
        if isinstance(each, StoredParameter) and each.source is not None
    ]
    for each, empty in stored:
        each.data = torch.zeros((), dtype=empty.dtype).expand(empty.shape)
    try:
        yield
    finally:
        for each, empty in stored:
            each.data = empty


def take_copy(model: nn.Module) -> nn.Module:
    """Returns a copy to train. The model's own parameters are not read from files any more, since those get old."""
    copied = copy.deepcopy(model)
    for parameter in model.parameters():
        if isinstance(parameter, StoredParameter):
            parameter.source = None
    return copied


@torch.no_grad()
def read_stored(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yields a model's parameters by name, one after the other, floating-point ones as `dtype` (None: their own)."""
    for name, parameter in model.named_parameters():
        here = torch.device("cpu")
        whole = parameter.read(here) if isinstance(parameter, StoredParameter) else parameter.detach()
        yield name, whole if dtype is None or not whole.is_floating_point() else whole.to(dtype)


def copy_to_file(tensor: Tensor, folder: Path) -> Tensor:
    """Returns a copy in the memory of a file without a name, which the system writes to the folder's disk when it needs
    the memory; of a small tensor, in memory."""
    if tensor.nbytes < _SMALL:
        return tensor.cpu()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(tensor.nbytes)
        memory = mmap.mmap(file.fileno(), tensor.nbytes)
    found = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    found.copy_(tensor)
    return found


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
