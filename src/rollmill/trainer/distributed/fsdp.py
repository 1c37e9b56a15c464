"""Sharded weights, gradients and optimizer states, one shard per rank (FSDP2; ZeRO stage 3, arXiv:1910.02054).

A sharded model holds its part of every parameter as a DTensor. Layers are unsharded while they compute. Embeddings, the
last norm and the output layer are unsharded within `call_unsharded`. Before, rank 0 has the model in its files
(`StoredParameter`), and the others have it without weights. These come to the devices layer by layer (`place_weights`),
so that none ever holds them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rollmill.models.storage import StoredParameter

Result = TypeVar("Result")


@torch.no_grad()
def place_weights(module: nn.Module, device: torch.device) -> None:
    """Brings a module to the device on every rank, with rank 0's weights; shards stay as they are.

    Every rank calls this. Tied weights of the module stay tied.
    """
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                continue
            if parameter not in placed:
                stored = isinstance(parameter, StoredParameter) and parameter.source is not None
                if isinstance(parameter, StoredParameter) and stored:
                    whole = parameter.read(device)
                else:
                    whole = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.to(device)
                dist.broadcast(whole.data, 0)
                if parameter.is_meta or stored:
                    placed[parameter] = nn.Parameter(whole, parameter.requires_grad)
                else:
                    parameter.data, placed[parameter] = whole.data, parameter
            part._parameters[name] = placed[parameter]
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = buffer.to(device)


def apply_fsdp(model: nn.Module, device: torch.device) -> None:
    """Shards a model in place: each transformer layer, and the rest as the root.

    Every rank calls this with the same model. Gradients are summed over the ranks, not averaged; those
    of bf16 weights in fp32.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    narrow = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        place_weights(layer, device)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    place_weights(model, device)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    model.inside = _call  # type: ignore[assignment]
    register_fsdp_forward_method(model, "inside")


def _call(function: Callable[[], Result]) -> Result:
    return function()


def call_unsharded(model: Any, function: Callable[[], Result]) -> Result:
    """Calls `function`, which returns a structure of tensors.

    A sharded model's root weights are whole during the call and again in the backward pass of the result. Every rank
    must call this equally often.
    """
    if not isinstance(model, FSDPModule):
        return function()
    sharded: Any = model
    found: Result = sharded.inside(function)
    return found


def local_shards(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns this rank's part of each tensor, sharing memory."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def is_sharded(tensor: Tensor) -> bool:
    """True if this rank holds only a part of the tensor."""
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def global_norm(norm: float) -> float:
    """Euclidean norm over all ranks, from the norm of this rank's part."""
    norms: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(norms, norm)
    return math.hypot(*norms)


@torch.no_grad()
def gather_weights(sharded: nn.Module, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields a model's weights by name, whole and one at a time, floating-point ones as `dtype` (None: their own).

    Every rank makes this iteration to its end.
    """
    for name, parameter in sharded.named_parameters():
        own = parameter.detach()
        yield name, _full(own if dtype is None or not own.is_floating_point() else own.to(dtype))


def gather_state_dict(state: Any, keep: Callable[[Tensor], Tensor] = Tensor.cpu) -> Any:
    """Replaces shards in a state dict with whole tensors on rank 0, None on other ranks.

    Every rank calls this. Values without shards are unchanged.

    Args:
        keep: brings a whole tensor to a CPU.
    """
    if isinstance(state, dict):
        return {key: gather_state_dict(value, keep) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(gather_state_dict(value, keep) for value in state)
    if not isinstance(state, DTensor):
        return state
    full = _full(state)
    return keep(full) if dist.get_rank() == 0 else None


@torch.no_grad()
def load_full_weights(model: nn.Module, state: dict[str, Any]) -> None:
    """Loads a state dict of whole tensors into a model that may be sharded."""
    own = model.state_dict()
    model.load_state_dict({name: shard_like(value, own.get(name)) for name, value in state.items()})


def shard_like(value: Any, target: Tensor | None) -> Any:
    """Shards a whole tensor like `target`, if that is a DTensor of the same shape; otherwise returns it unchanged."""
    if not isinstance(target, DTensor) or not isinstance(value, Tensor) or value.shape != target.shape:
        return value
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)


def _full(tensor: Tensor) -> Tensor:
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full
