"""Copies between host and device, several arrays in one transfer: each transfer makes one of the two wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16  # of every array in the packed bytes


def to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays to a device; on a GPU in one transfer, for which the host does not wait.

    Returns tensors of the arrays' types and shapes. On a CPU they share the arrays' memory.
    """
    if device.type != "cuda":
        return [torch.from_numpy(each).to(device) for each in arrays]
    packed, starts = _packed(arrays)
    there = packed.to(device, non_blocking=True)
    return _unpacked(there, starts, _types(arrays), [each.shape for each in arrays])


class StaticTensors:
    """Tensors of a GPU that stay where they are, as captured graphs read them. The host writes all in one transfer.

    Args:
        arrays: what they hold first.

    Attributes:
        tensors: of the arrays' types and shapes.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> None:
        packed, starts = _packed(arrays)
        self._bytes = packed.to(device)
        self.tensors = _unpacked(self._bytes, starts, _types(arrays), [each.shape for each in arrays])

    def write(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Write all tensors, or the first ones; arrays have their types and shapes. The host does not wait."""
        packed, _ = _packed(arrays)
        self._bytes[: len(packed)].copy_(packed, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of one device to the host, in one transfer."""
    if not tensors or not tensors[0].is_cuda:
        return [each.cpu() for each in tensors]
    starts = _starts([each.nbytes for each in tensors])
    gaps = [end - start - each.nbytes for start, end, each in zip(starts, starts[1:], tensors, strict=False)]
    parts = [
        torch.nn.functional.pad(each.contiguous().view(-1).view(torch.uint8), (0, gap))
        for each, gap in zip(tensors, gaps, strict=True)
    ]
    here = torch.cat(parts).cpu()
    return _unpacked(here, starts, [each.dtype for each in tensors], [each.shape for each in tensors])


def _starts(sizes: Sequence[int]) -> list[int]:
    """Offsets of arrays of these sizes in the packed bytes, and their end."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return starts


def _packed(arrays: Sequence[npt.NDArray[Any]]) -> tuple[Tensor, list[int]]:
    """The arrays' bytes in pinned memory, and where each one starts."""
    starts = _starts([each.nbytes for each in arrays])
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    view = packed.numpy()
    for start, each in zip(starts, arrays, strict=False):
        view[start : start + each.nbytes] = np.ascontiguousarray(each).reshape(-1).view(np.uint8)
    return packed, starts


def _types(arrays: Sequence[npt.NDArray[Any]]) -> list[torch.dtype]:
    return [torch.from_numpy(np.empty(0, each.dtype)).dtype for each in arrays]


def _unpacked(
    packed: Tensor, starts: Sequence[int], types: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    found = []
    for start, dtype, shape in zip(starts, types, shapes, strict=False):
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        found.append(packed[start : start + size].view(dtype).view(tuple(shape)))
    return found
