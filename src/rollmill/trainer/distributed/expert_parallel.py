"""Expert parallelism: the experts of mixture-of-experts layers dealt out over the ranks (GShard, arXiv:2006.16668).

Every rank works on its own rows and holds E / R experts of each layer, with their gradients and optimizer states;
everything else is whole on every rank. Each (token, expert) pair travels to the rank of its expert, is computed by the
layer's own code there, and the result travels back. Experts see the tokens of all ranks, so their gradients
are whole there; all other gradients are summed.

transformers keeps the experts of a layer in tensors [E, ...], which become distributed tensors split along E, so
checkpoints and published weights are gathered as those of other shards. Every rank must make equally many passes.

Shapes: R ranks, E experts, T tokens of this rank, k experts per token, S = T k pairs, N pairs received, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rollmill.errors import ConfigError
from rollmill.trainer.distributed.fsdp import place_weights


def find_experts(model: nn.Module) -> list[Any]:
    """Returns the modules that hold all experts of a layer and are called with (hidden states [T, d], experts [T, k],
    their weights [T, k]).
    """
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def check_expert_parallel(model: Any, ranks: int) -> None:
    """Checks that a model's experts can be dealt out over this number of ranks.

    Raises:
        ConfigError: it has no experts that transformers can distribute, or the ranks do not divide their number.
    """
    kind, found = model.config.model_type, find_experts(model)
    if not found:
        text = f"{kind} has no layers of experts that can be dealt out (`expert`)"
        raise ConfigError(f"trainer.sharding: {text}; use sharding: fsdp or none")
    for count in {module.num_experts for module in found}:
        if count % ranks:
            raise ConfigError(
                f"trainer.ranks: {ranks} cannot share the {count} experts of {kind}; use sharding: fsdp or none"
            )


def distribute_experts(model: nn.Module, device: torch.device) -> None:
    """Keeps this rank's experts of each layer, in place. Every rank calls this with the same model."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in find_experts(model):
        names = [name for name, each in module.named_parameters(recurse=False) if each.shape[0] == module.num_experts]
        place_weights(module, device)
        for name in names:
            whole = getattr(module, name)
            local = distribute_tensor(whole.data, mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(local, whole.requires_grad))
        module.num_experts //= dist.get_world_size()
        module.forward = _DistributedForward(module, names)
    place_weights(model, device)


class _DistributedForward:
    """Forward pass of a layer's experts for the tokens of all ranks."""

    def __init__(self, module: Any, names: list[str]) -> None:
        self._module, self._names, self._own = module, names, module.forward

    def __call__(self, hidden_Td: Tensor, experts_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        local, ranks = self._module.num_experts, dist.get_world_size()
        k, experts_S = experts_Tk.shape[1], experts_Tk.flatten()
        order_S = torch.argsort(experts_S, stable=True)  # by expert, so by rank
        sent = torch.bincount(experts_S // local, minlength=ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        splits = sent.tolist(), received.tolist()
        experts_N = _exchange(experts_S[order_S] % local, *splits)
        hidden_Nd = _exchange(hidden_Td[order_S // k], *splits)
        weights_N = _exchange(weights_Tk.flatten()[order_S], *splits)[:, None]
        if len(hidden_Nd):
            with self._local_parameters():
                output_Nd = self._own(hidden_Nd, experts_N[:, None], weights_N)
        else:  # the backward pass has to reach both exchanges, as on the other ranks
            output_Nd = (hidden_Nd * weights_N).to(hidden_Nd.dtype)
        output_Sd = _exchange(output_Nd, *reversed(splits))
        place_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
        summed_Td: Tensor = output_Sd[place_S].unflatten(0, (-1, k)).sum(1)
        return summed_Td.to(hidden_Td.dtype)

    @contextmanager
    def _local_parameters(self) -> Iterator[None]:
        """Replaces the distributed parameters by this rank's parts, which the layer's own code computes with."""
        own = self._module._parameters
        whole: dict[str, DTensor] = {name: own[name] for name in self._names}
        own.update({name: each.to_local() for name, each in whole.items()})
        try:
            yield
        finally:
            own.update(whole)


def _exchange(values: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Sends the first `sent[0]` rows to rank 0 and so on; returns what the ranks sent here, in their order."""
    found: Tensor = _UnevenAllToAll.apply(values, sent, received)  # type: ignore[no-untyped-call]
    return found


class _UnevenAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.splits = sent, received
        return _all_to_all(values, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.splits
        return _all_to_all(grads[0], received, sent), None, None


def _all_to_all(values: Tensor, sent: list[int], received: list[int]) -> Tensor:
    found = values.new_empty(sum(received), *values.shape[1:])
    dist.all_to_all_single(found, values.contiguous(), received, sent)
    return found
