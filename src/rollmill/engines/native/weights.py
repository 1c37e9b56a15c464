"""The parameters the engine decodes with: the trainer's own, or a copy in another type or with merged adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rollmill.models.lora import adapted_layers, copy_without_adapters, merged_weight, merges_adapters


class EngineWeights:
    """The engine's weights; `model` computes in `dtype`.

    If the trainer's model already has that type and no adapters, `model` is the trainer's model itself. Otherwise it is
    a copy whose parameters are cast, or merged, once after each update; buffers and parameters that need neither are
    shared. With adapters that are not merged the copy has adapters of its own, since the trainer puts others in their
    place while it computes a reference.
    """

    def __init__(self, trained: nn.Module, dtype: torch.dtype) -> None:
        merges = bool(adapted_layers(trained)) and merges_adapters(trained)
        own = not adapted_layers(trained) and all(p.dtype == dtype for p in trained.parameters())
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._merged: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self.model = trained if own else self._twin(trained, dtype, merges)
        self._stale = not own

    def updated(self) -> None:
        """Report that the trained parameters changed."""
        self._stale = bool(self._copies or self._merged)

    def bytes(self) -> int:
        """Bytes of the copy, besides the trained parameters."""
        return sum(twin.untyped_storage().nbytes() for twin in self._twins())

    def destroy(self) -> None:
        """Free the copy's memory; `refresh` allocates it again."""
        for twin in self._twins():
            twin.untyped_storage().resize_(0)
        self.updated()

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the copy, if there is one and it is stale."""
        if self._stale:
            for twin in self._twins():
                twin.untyped_storage().resize_(twin.nbytes)
            if self._copies:
                torch._foreach_copy_([twin for twin, _ in self._copies], [own for _, own in self._copies])
            for twin, merge in self._merged:
                twin.copy_(merge())
            self._stale = False

    def _twins(self) -> list[Tensor]:
        return [twin for twin, _ in (*self._copies, *self._merged)]

    def _twin(self, model: nn.Module, dtype: torch.dtype, merges: bool) -> nn.Module:
        """Copy the modules, without adapters if these are merged; tied parameters stay tied."""
        layers = {id(layer.base_layer.weight): layer for layer in adapted_layers(model).values() if merges}
        memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
        for name, parameter in model.named_parameters():
            layer = layers.get(id(parameter))
            same = parameter.dtype == dtype or not parameter.is_floating_point()
            if merges if ".lora_" in name else layer is None and same:
                memo[id(parameter)] = parameter
                continue
            twin = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False)
            memo[id(parameter)] = twin
            if layer is None:
                self._copies.append((twin.data, parameter))
            else:
                self._merged.append((twin.data, _merge_of(layer)))
        memo[id(model.config)] = copy.deepcopy(model.config, memo)
        if merges:
            return copy_without_adapters(model, memo)
        twin_model: nn.Module = copy.deepcopy(model, memo)
        return twin_model.eval()


def _merge_of(layer: nn.Module) -> Callable[[], Tensor]:
    return lambda: merged_weight(layer)
