"""AdamW over the trainable parameters: gradient norm and clipping, state for checkpoints, learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollmill.config.trainer import TrainerConfig
from rollmill.errors import TrainingError
from rollmill.trainer.distributed.fsdp import gather_state_dict, global_norm, is_sharded, local_shards, shard_like
from rollmill.trainer.stochastic_adamw import StochasticAdamW

_CHUNK = 1 << 22

TensorGetter = Callable[[], Iterable[Tensor]]
"""Returns the tensors of a component as they are at the time of the call."""


def build_optimizer(model: nn.Module, config: TrainerConfig) -> torch.optim.Optimizer:
    """Builds AdamW (arXiv:1711.05101) with decoupled weight decay on matrices only: norms and biases never decay.

    Trained weights in bf16, and moments in 8 bits, are rounded stochastically.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in _in_order(model):  # one fused kernel takes distributed tensors or plain ones, not both
        groups.setdefault((parameter.ndim >= 2, isinstance(parameter, DTensor)), []).append(parameter)
    decays = [
        {"params": parameters, "weight_decay": config.weight_decay if matrices else 0.0}
        for (matrices, _), parameters in groups.items()
    ]
    eight_bit = config.optimizer == "adamw_8bit"
    if eight_bit or any(parameter.dtype == torch.bfloat16 for each in groups.values() for parameter in each):
        return StochasticAdamW(decays, lr=config.lr, betas=config.betas, eps=config.eps, eight_bit=eight_bit)
    return torch.optim.AdamW(decays, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def collect_gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the gradients of all parameters that have one."""
    return [p.grad for p in _parameters(optimizer) if p.grad is not None]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the optimizer's state tensors, which exist after its first step."""
    return [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]


def compute_gradient_norm(grads: list[Tensor]) -> float:
    """Euclidean norm over all gradients. With sharded gradients, every rank must call this."""
    plain = local_shards([grad for grad in grads if not is_sharded(grad)])
    cut = local_shards([grad for grad in grads if is_sharded(grad)])
    norms = [_norm(plain)] if plain else []
    return math.hypot(*norms, *([global_norm(_norm(cut))] if cut else []))


def clip_gradients(grads: list[Tensor], norm: float, max_norm: float) -> None:
    """Scales the gradients in place so that their norm is at most `max_norm`."""
    if norm > max_norm:
        torch._foreach_mul_(local_shards(grads), max_norm / norm)


def optimizer_state_dict(
    optimizer: torch.optim.Optimizer, model: nn.Module, keep: Callable[[Tensor], Tensor] = Tensor.cpu
) -> dict[str, Any]:
    """Returns the optimizer's state, the same however the model is sharded.

    Tensors are whole, on rank 0, and parameters are numbered as on one rank. With a sharded model, every rank must call
    this; rank 0 keeps what it gathers by `keep`.
    """
    state, numbers = optimizer.state_dict(), _numbers(optimizer, model)
    parameters = _parameters(optimizer)
    groups: dict[bool, dict[str, Any]] = {}
    for group in state["param_groups"]:
        known = groups.setdefault(parameters[group["params"][0]].ndim >= 2, {**group, "params": []})
        known["params"] = sorted([*known["params"], *(numbers[i] for i in group["params"])])
    moments = {numbers[i]: each for i, each in state["state"].items()}
    found: dict[str, Any] = gather_state_dict(
        {"state": dict(sorted(moments.items())), "param_groups": [*groups.values()]}, keep
    )
    return found


def load_optimizer_state_dict(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    """Restores what `optimizer_state_dict` returned; the model may be sharded differently."""
    numbers, parameters = _numbers(optimizer, model), _parameters(optimizer)
    options = {number: group for group in state["param_groups"] for number in group["params"]}
    groups = [
        {**options[numbers[group["params"][0]]], "params": group["params"]}
        for group in optimizer.state_dict()["param_groups"]
    ]
    moments = {
        i: {key: shard_like(value, parameters[i]) for key, value in state["state"][number].items()}
        for i, number in enumerate(numbers)
        if number in state["state"]
    }
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _in_order(model: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters in the order of a single rank: matrices first."""
    return sorted((p for p in model.parameters() if p.requires_grad), key=lambda p: p.ndim < 2)


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _numbers(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[int]:
    """Number of each of the optimizer's parameters on a single rank."""
    places = {id(parameter): number for number, parameter in enumerate(_in_order(model))}
    return [places[id(parameter)] for parameter in _parameters(optimizer)]


def _norm(tensors: list[Tensor]) -> float:
    if any(tensor.dtype == torch.bfloat16 for tensor in tensors):  # summed in fp32, part by part: a copy is large
        norms = [part.float().norm() for tensor in tensors for part in tensor.flatten().split(_CHUNK)]
    else:
        norms = list(torch._foreach_norm(tensors))
    return float(torch.stack(norms).norm())


def failed_step_error(step: int, what: str, task_ids: Iterable[str]) -> TrainingError:
    """Builds the TrainingError for a failed optimizer step, naming the affected tasks."""
    tasks = sorted(set(task_ids))
    shown = ", ".join(tasks[:8]) + (f" and {len(tasks) - 8} more" if len(tasks) > 8 else "")
    return TrainingError(
        f"training step {step}: {what}, in a micro-batch with tasks {shown}. No weight was changed by this "
        "update. Lower trainer.lr, use trainer.precision: fp32, or look at the rewards of these tasks."
    )


def compute_learning_rate(config: TrainerConfig, step: int, total_steps: int) -> float:
    """Learning rate of training step `step` (0-based) of `total_steps`.

    Warm-up rises linearly to `lr`, reached at step `warmup_steps - 1`. Then linear and cosine fall from `lr` towards
    `min_lr_ratio * lr`, which they would reach at step `total_steps`; constant stays at `lr`.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min((step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), 1.0)
    share = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[config.schedule]
    if config.schedule == "constant":
        return config.lr
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
