"""Counts the bytes of tensors that are alive, on any device: also of fake tensors, which have no memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_resize = torch.UntypedStorage.resize_


class LiveBytes(TorchDispatchMode):
    """Inside of a `with`, `live` is the sum of all storages that operations have made and `hold` was told of, and
    `peak` its maximum. Each storage counts once, in blocks of 512 bytes like those of CUDA's allocator."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._resized = patch.object(torch.UntypedStorage, "resize_", lambda *resized: self._resize(*resized))

    def __enter__(self) -> Any:
        self._resized.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._resized.stop()

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made before. Those that only wrap others, such as shards, have no memory."""
        for tensor in tensors:
            if is_traceable_wrapper_subclass(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._sizes:
                weakref.finalize(storage, self._gone, storage._cdata)
                self._set(storage)

    def _set(self, storage: torch.UntypedStorage) -> None:
        size = -(-storage.nbytes() // 512) * 512
        self.live += size - self._sizes.get(storage._cdata, 0)
        self._sizes[storage._cdata] = size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def _resize(self, storage: torch.UntypedStorage, size: int) -> Any:
        result = _resize(storage, size)
        if storage._cdata in self._sizes:
            self._set(storage)
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.hold(each for each in tree_leaves(result) if isinstance(each, torch.Tensor))
        return result
