"""AdamW over the trainable parameters, and the norm of their gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from rollmill.config.trainer import TrainerConfig
from rollmill.trainer.sharding import own_parts

Held = Callable[[], Iterable[Tensor]]
"""Tensors that lie in memory, as they are when asked."""


def build_optimizer(model: nn.Module, config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101) with decoupled weight decay on matrices only: norms and biases never decay."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients of all parameters that have one; of sharded ones what this rank holds."""
    return own_parts([p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None])


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Its state, which it makes at its first step."""
    return [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]


def gradient_norm(grads: list[Tensor]) -> float:
    """Euclidean norm over all gradients."""
    return float(torch.stack(torch._foreach_norm(grads)).norm())


def clip(grads: list[Tensor], norm: float, max_norm: float) -> None:
    """Scale the gradients in place so that their norm is at most `max_norm`."""
    if norm > max_norm:
        torch._foreach_mul_(grads, max_norm / norm)
