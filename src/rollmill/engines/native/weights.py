"""The parameters the engine decodes with: the trainer's own, or a copy in another type or with merged adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rollmill.models.cpu.int8 import Int8Linear, int8_linears, require_int8_products
from rollmill.models.fused_layers import allocate_side_by_side
from rollmill.models.lora import adapted_layers, copy_without_adapters, merged_weight, merges_adapters
from rollmill.models.recurrent import recurrent_layers


class EngineWeights:
    """The engine's weights; `model` computes in `dtype`.

    If the trainer's model already has that type and no adapters, `model` is the trainer's model itself. Otherwise it is
    a copy whose parameters are cast, or merged, once after each update; buffers and parameters that need neither are
    shared, but for saved buffers of recurrent layers, which are cast. With adapters that are not merged the copy has
    adapters of its own, since the trainer puts others in their place while it computes a reference.

    With `int8` the copy's linear layers multiply in 8 bits, and are rounded again after each update.

    Raises:
        ModelError: `int8` without exact products in 8 bits on this device, or without a layer for it.
    """

    def __init__(self, trained: nn.Module, dtype: torch.dtype, *, int8: bool = False) -> None:
        self._int8: list[Int8Linear] = []
        self._in_8_bits: set[int] = set()  # ids of parameters that are rounded
        if int8:
            require_int8_products(next(trained.parameters()).device)
            self._in_8_bits = {id(layer.weight) for layer in int8_linears(trained).values()}
        merges = bool(adapted_layers(trained)) and merges_adapters(trained)
        own = not int8 and not adapted_layers(trained) and all(p.dtype == dtype for p in trained.parameters())
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}  # of the copy, with their sizes
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._merged: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self.model = trained if own else self._twin(trained, dtype, merges)
        self._stale = not own
        for twin in (*(twin for twin, _ in self._copies), *(twin for twin, _ in self._merged)):
            storage = twin.untyped_storage()
            self._storages[storage.data_ptr()] = storage, storage.nbytes()

    def updated(self) -> None:
        """Report that the trained parameters changed."""
        self._stale = bool(self._copies or self._merged or self._int8)

    def bytes(self) -> int:
        """Bytes of the copy, besides the trained parameters."""
        cast = sum(storage.nbytes() for storage, _ in self._storages.values())
        return cast + sum(each.nbytes for each in self._int8)

    def destroy(self) -> None:
        """Free the copy's memory; `refresh` allocates it again."""
        for storage, _ in self._storages.values():
            storage.resize_(0)
        for layer in self._int8:
            layer.unload()
        self.updated()

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the copy, if there is one and it is stale."""
        if self._stale:
            for storage, size in self._storages.values():
                if storage.nbytes() != size:  # a GPU would move it in any case
                    storage.resize_(size)
            if self._copies:
                torch._foreach_copy_([twin for twin, _ in self._copies], [own for _, own in self._copies])
            for twin, merge in self._merged:
                twin.copy_(merge())
            for layer in self._int8:
                layer.load()
            self._stale = False

    def _twin(self, model: nn.Module, dtype: torch.dtype, merges: bool) -> nn.Module:
        """Copy the modules, without adapters if these are merged; tied parameters stay tied."""
        layers = {id(layer.base_layer.weight): layer for layer in adapted_layers(model).values() if merges}
        memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
        saved = {id(each) for each in model.state_dict(keep_vars=True).values()}
        for recurrent in recurrent_layers(model):  # decay rates, which meet activations in one product (MiniMax)
            own = [each for each in recurrent.buffers() if id(each) in saved and each.is_floating_point()]
            memo |= {id(buffer): buffer.to(dtype) for buffer in own}
        sources: dict[int, Callable[[], Tensor]] = {}  # of the twins that are rounded to 8 bits
        together = allocate_side_by_side(model, dtype)
        for name, parameter in model.named_parameters():
            layer = layers.get(id(parameter))
            if id(parameter) in self._in_8_bits:
                twin = nn.Parameter(torch.empty_like(parameter, dtype=dtype, device="meta"), requires_grad=False)
                memo[id(parameter)] = twin
                sources[id(twin)] = _data_of(parameter) if layer is None else _merge_of(layer)
                continue
            same = parameter.dtype == dtype or not parameter.is_floating_point()
            if merges if ".lora_" in name else layer is None and same:
                memo[id(parameter)] = parameter
                continue
            place = together.get(id(parameter))
            place = torch.empty_like(parameter, dtype=dtype) if place is None else place
            twin = nn.Parameter(place, requires_grad=False)
            memo[id(parameter)] = twin
            if layer is None:
                self._copies.append((twin.data, parameter))
            else:
                self._merged.append((twin.data, _merge_of(layer)))
        memo[id(model.config)] = copy.deepcopy(model.config, memo)
        twin_model: nn.Module = copy_without_adapters(model, memo) if merges else copy.deepcopy(model, memo)
        for name, module in list(twin_model.named_modules()):
            if type(module) is nn.Linear and id(module.weight) in sources:
                parent, _, child = name.rpartition(".")
                rounded = Int8Linear(module, sources[id(module.weight)])
                setattr(twin_model.get_submodule(parent), child, rounded)
                self._int8.append(rounded)
        return twin_model.eval()


def _data_of(parameter: Tensor) -> Callable[[], Tensor]:
    return lambda: parameter.data


def _merge_of(layer: nn.Module) -> Callable[[], Tensor]:
    return lambda: merged_weight(layer)
