"""Short measurements that choose the compute type and the number of threads for a model on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

_ROWS, _FLOP, _REPEATS = 1024, 1.5e9, 3


def choose_precision(model: nn.Module, device: torch.device | str) -> Literal["fp32", "bf16"]:
    """The faster compute type over fp32 master weights.

    On a GPU bf16; on a CPU whichever ran a forward and backward pass of the model's largest linear layer faster
    (bf16 where the CPU multiplies it in hardware, else fp32). Takes under half a second.
    """
    if torch.device(device).type != "cpu":
        return "bf16"
    return "bf16" if _seconds(model, torch.bfloat16) < 0.9 * _seconds(model, None) else "fp32"


def choose_threads(model: nn.Module) -> int:
    """The thread count of 1, 2, 4, ... up to the available CPUs at which the model's largest linear layer is fastest.

    More threads are chosen only where they bring at least 20 % each time. The thread count in force is left as it is.
    """
    best, best_seconds = 1, float("inf")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = 1
    while threads <= cpus:
        with _threads(threads):
            seconds = _seconds(model, None)
        if seconds > best_seconds / 1.2:
            break
        best, best_seconds, threads = threads, seconds, threads * 2
    return best


def _seconds(model: nn.Module, dtype: torch.dtype | None) -> float:
    """Best time of a forward and backward pass of the largest linear layer's shape, under autocast to `dtype`."""
    shapes = [m.weight.shape for m in model.modules() if isinstance(m, nn.Linear)]
    wide, narrow = max(shapes, key=lambda shape: shape[0] * shape[1] if shape[0] < 65536 else 0)
    rows = int(min(max(_FLOP / (6 * wide * narrow), 32), _ROWS))
    layer = nn.Linear(narrow, wide, bias=False, device="cpu")
    x = torch.randn(rows, narrow, requires_grad=True)
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            layer(x).sum().backward()
        best = min(best, time.perf_counter() - start)
    return best


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
