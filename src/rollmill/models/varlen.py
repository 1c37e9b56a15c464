"""Attention of segments of different lengths laid end to end, as one call of the GPU's variable-length kernel.

Shapes: T tokens of the row, H query heads, K key heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_NEEDED = {"scale", "window_size", "enable_gqa"}  # parameters that early versions of the function lack


def varlen_available(device: torch.device) -> bool:
    """Whether this torch has the kernel for this device."""
    return device.type == "cuda" and set(inspect.signature(varlen_attn).parameters) >= _NEEDED


class VarlenAttention:
    """The same attention as one call of the GPU's variable-length kernel: keys of each segment are laid end to end."""

    def __init__(self, lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> None:
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        rows: list[int] = []
        key_starts = [0]
        for i, parent in enumerate(parents):
            if parent >= 0:
                rows.extend(range(starts[parent], starts[parent + 1]))
            rows.extend(range(starts[i], starts[i + 1]))
            key_starts.append(len(rows))
        self._query_starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self._key_starts = torch.tensor(key_starts, dtype=torch.int32, device=device)
        self._max_query = max(lengths)
        self._max_key = max(b - a for a, b in pairwise(key_starts))
        shared = any(parent >= 0 for parent in parents)
        self._rows = torch.tensor(rows, device=device) if shared else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        """[T, H, D], [T, K, D], [T, K, D] -> [T, H, D]. The kernel aligns causal masks with the last key."""
        if self._rows is not None:
            k, v = k.index_select(0, self._rows), v.index_select(0, self._rows)
        output: Any = varlen_attn(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            self._query_starts,
            self._key_starts,
            self._max_query,
            self._max_key,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        result: Tensor = output
        return result
