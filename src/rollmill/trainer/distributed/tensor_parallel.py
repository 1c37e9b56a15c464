"""Tensor parallelism: attention heads and inner dimensions split over the ranks (Megatron-LM, arXiv:1909.08053).

Uses PyTorch's parallel styles and transformers' plan for the model. Every rank works on the same rows with its share of
each layer's matrices. Activations between these, embeddings, norms and the output layer are whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rollmill.errors import ConfigError
from rollmill.trainer.distributed.fsdp import is_sharded, local_shards, place_weights

ALLREDUCE_BUCKET_BYTES = 1 << 25  #: as in DistributedDataParallel


def apply_in_buckets(tensors: Sequence[Tensor], operation: Callable[[Tensor], object]) -> None:
    """Applies an elementwise in-place collective to all tensors, which have one dtype.

    Tensors are flattened into buckets, since each collective waits for the slowest rank.
    """
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        operation(flat)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > ALLREDUCE_BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


_STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_OF_OWN_HEADS = "replicated_with_grad_allreduce"
"""Style of a per-head norm: whole on every rank, but applied to the rank's own heads only, so gradients must be summed.

transformers' hook is not used: it sums in every backward pass, also what earlier passes accumulated.
"""


def tensor_parallel_plan(model: Any, ranks: int) -> dict[str, str]:
    """Returns the style of each module of a causal LM's network named in transformers' plan.

    Raises:
        ConfigError: there is no plan, it has unsupported styles, or the number of ranks does not divide a size.
    """
    kind, plan = model.config.model_type, getattr(model.config, "base_model_tp_plan", None)
    instead = "use sharding: fsdp or none"
    if not plan:
        raise ConfigError(f"trainer.sharding: transformers has no plan for tensor parallelism of {kind}; {instead}")
    found = {
        name: plan[pattern]
        for name, _ in model.base_model.named_modules()
        if (pattern := re.sub(r"\d+", "*", name)) in plan
    }
    if other := sorted({*plan.values()} - {*_STYLES, _OF_OWN_HEADS}):
        text = f"the plan of {kind} for tensor parallelism has parts that rollmill cannot cut ({', '.join(other)})"
        raise ConfigError(f"trainer.sharding: {text}; {instead}")
    sizes = {key: getattr(model.config, key) for key in ("num_attention_heads", "num_key_value_heads")}
    for name, style in found.items():
        layer = model.base_model.get_submodule(name)
        if style in _STYLES and not isinstance(layer, nn.Linear):
            raise ConfigError(f"trainer.sharding: {name} of {kind} is no plain linear layer; {instead}")
        if style in _STYLES:
            key = "out_features" if style == "colwise" else "in_features"
            sizes[f"{key} of {name}"] = getattr(layer, key)
    for name, size in sizes.items():
        if size % ranks:
            raise ConfigError(f"trainer.ranks: {ranks} cannot share {size} ({name} of the model); {instead}")
    return found


def parallelize_network(model: nn.Module, network: Any, styles: dict[str, str], device: torch.device) -> None:
    """Splits the network of a model over the ranks, in place. Every rank calls this with the same model."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for name, style in styles.items():
        if style in _STYLES:
            place_weights(network.get_submodule(name), device)
            parallelize_module(network, mesh, {name: _STYLES[style]()}, src_data_rank=None)
    place_weights(model, device)
    for name, style in styles.items():
        if style == _OF_OWN_HEADS:
            for parameter in network.get_submodule(name).parameters():
                parameter.of_own_heads = True


def reduce_replicated_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Makes the gradients of replicated parameters equal on all ranks, bit for bit. Parameters without one
    keep none.
    """
    partial: list[Tensor] = []
    equal: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None and not is_sharded(parameter.grad):
            kind = partial if getattr(parameter, "of_own_heads", False) else equal
            kind += local_shards([parameter.grad])
    apply_in_buckets(partial, dist.all_reduce)
    apply_in_buckets(equal, lambda flat: dist.broadcast(flat, 0))
