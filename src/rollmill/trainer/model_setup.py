"""A model made ready for training: the type of its weights, dropout, activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

Model = TypeVar("Model", bound=nn.Module)


def to_master_weights(model: Model) -> Model:
    """The model with fp32 master weights (float64 models stay float64)."""
    narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return model.float() if narrow else model


def set_gradient_checkpointing(model: Any, wanted: bool) -> None:
    """Recompute the activations of a transformers model in the backward pass, or keep them."""
    renamed = hasattr(model, "activation_checkpointing_enable")  # since transformers 5.2x
    name = "activation_checkpointing" if renamed else "gradient_checkpointing"
    if wanted:
        getattr(model, f"{name}_enable")({"use_reentrant": False})
    elif getattr(model, f"is_{name}"):  # an earlier stage wanted it
        getattr(model, f"{name}_disable")()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off; layers that checkpoint their activations stay in training mode, without which they would not."""
    before = {module: module.training for module in model.modules()}
    for module in before:
        module.training = isinstance(module, GradientCheckpointingLayer)
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
