"""Prepares a model for training: master weights, gradient checkpointing, evaluation mode, compute type and threads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

Model = TypeVar("Model", bound=nn.Module)


def to_master_weights(model: Model) -> Model:
    """Returns the model with fp32 master weights (float64 models stay float64)."""
    narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return model.float() if narrow else model


def narrow_weights(model: nn.Module) -> None:
    """Casts all weights but those of adapters to bf16, in place and one after the other; buffers stay as they are."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)


def set_gradient_checkpointing(model: Any, enabled: bool) -> None:
    """Turns gradient checkpointing of a transformers model on or off."""
    renamed = hasattr(model, "activation_checkpointing_enable")  # since transformers 5.2x
    name = "activation_checkpointing" if renamed else "gradient_checkpointing"
    if enabled:
        getattr(model, f"{name}_enable")({"use_reentrant": False})
    elif getattr(model, f"is_{name}"):  # enabled by an earlier stage
        getattr(model, f"{name}_disable")()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Turns dropout off. Layers that checkpoint their activations stay in training mode, which that requires."""
    before = {module: module.training for module in model.modules()}
    for module in before:
        module.training = isinstance(module, GradientCheckpointingLayer)
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


_ROWS, _FLOP = 1024, 1.5e9
_MAX_REPEATS, _ENOUGH_S = 10, 0.8


def choose_precision(model: nn.Module, device: torch.device | str) -> Literal["fp32", "bf16"]:
    """Chooses the faster compute type over fp32 master weights.

    bf16 on a GPU. On a CPU, whichever runs a forward and backward pass of the model's largest linear layer faster (bf16
    if the CPU multiplies it in hardware, else fp32). Takes about a second; longer if the layer is very wide and the CPU
    has no bf16. Each layer shape is measured once per process: on a busy machine a second measurement may differ, and
    models to be compared would compute differently.
    """
    if torch.device(device).type != "cpu":
        return "bf16"
    return _faster(*_largest(model), torch.get_num_threads())


def choose_threads(model: nn.Module) -> int:
    """Chooses the thread count of 1, 2, 4, ... up to the available CPUs that runs the largest linear layer fastest.

    More threads are chosen only if each doubling is at least 20 % faster. The current thread count is not changed.
    """
    shape = _largest(model)
    best, best_seconds = 1, float("inf")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = 1
    while threads <= cpus:
        with _threads(threads):
            seconds = _seconds(*shape, None)[0]
        if seconds > best_seconds / 1.2:
            break
        best, best_seconds, threads = threads, seconds, threads * 2
    return best


@cache
def _faster(wide: int, narrow: int, threads: int) -> Literal["fp32", "bf16"]:
    """The faster type for a layer of this shape with the current number of threads."""
    fp32, bf16 = _seconds(wide, narrow, None, torch.bfloat16)
    return "bf16" if bf16 < 0.9 * fp32 else "fp32"


def _seconds(wide: int, narrow: int, *dtypes: torch.dtype | None) -> list[float]:
    """Best time of a forward and backward pass under autocast to each type. Types alternate, so that other load affects
    all.
    """
    rows = int(min(max(_FLOP / (6 * wide * narrow), 32), _ROWS))
    layer = nn.Linear(narrow, wide, bias=False, device="cpu")
    x = torch.randn(rows, narrow, requires_grad=True)
    best = [float("inf")] * len(dtypes)
    began = time.perf_counter()
    for repeat in range(_MAX_REPEATS):
        if repeat and time.perf_counter() - began > _ENOUGH_S:
            break
        for at, dtype in enumerate(dtypes):
            start = time.perf_counter()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                layer(x).sum().backward()
            best[at] = min(best[at], time.perf_counter() - start)
    return best


def _largest(model: nn.Module) -> tuple[int, int]:
    """Shape of the largest linear layer, ignoring the output embedding of a large vocabulary."""
    shapes = [m.weight.shape for m in model.modules() if isinstance(m, nn.Linear)]
    wide, narrow = max(shapes, key=lambda shape: shape[0] * shape[1] if shape[0] < 65536 else 0)
    return wide, narrow


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
