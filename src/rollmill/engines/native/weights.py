"""The parameters the engine decodes with: the trainer's own, or a copy in another type or with merged adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from rollmill.models.cpu.int8 import Int8Linear, int8_linears, require_int8_products
from rollmill.models.fused_layers import find_weights_of_one_input
from rollmill.models.lora import adapted_layers, copy_without_adapters, merged_weight, merges_adapters
from rollmill.models.recurrent import recurrent_layers
from rollmill.weights.buckets import copy_whole


class EngineWeights:
    """The engine's weights; `model` computes in `dtype`.

    If the trainer's model already has that type and no adapters, `model` is the trainer's model itself. Otherwise it is
    a copy whose parameters are cast, or merged, once after each update; buffers and parameters that need neither are
    shared, but for saved buffers of recurrent layers, which are cast. With adapters that are not merged the copy has
    adapters of its own, since the trainer puts others in their place while it computes a reference.

    With `int8` the copy's linear layers multiply in 8 bits, and are rounded again after each update.

    Where several ranks hold parts of the trained weights, `load` fills the copy from those, and the trainer's model,
    which is in host memory, is not read.

    Args:
        device: where the engine computes; None: where the trainer's model is.

    Raises:
        ModelError: `int8` without exact products in 8 bits on this device, or without a layer for it.
    """

    def __init__(
        self, trained: nn.Module, dtype: torch.dtype, *, int8: bool = False, device: torch.device | None = None
    ) -> None:
        here = next(trained.parameters()).device
        self._device = here if device is None or device.type == here.type else device
        self._dtype, self._is_loaded = dtype, False
        self._int8: list[Int8Linear] = []
        self._in_8_bits: set[int] = set()  # ids of parameters that are rounded
        if int8:
            require_int8_products(self._device)
            self._in_8_bits = {id(layer.weight) for layer in int8_linears(trained).values()}
        merges = bool(adapted_layers(trained)) and merges_adapters(trained)
        same = self._device == here and all(p.dtype == dtype for p in trained.parameters())
        own = not int8 and not adapted_layers(trained) and same
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}  # of the copy, with their sizes
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._by_name: dict[str, Tensor] = {}  #: copies, by the name of their parameter
        self._merged: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self.model = trained if own else self._twin(trained, dtype, merges)
        self._stale = not own
        #: the engine computes with trained parameters, or what it computes with is made from them in another way
        self.needs_trained = len(self._by_name) < len(dict(trained.named_parameters()))

    def updated(self) -> None:
        """Report that the trained parameters changed."""
        self._stale = not self._is_loaded and bool(self._copies or self._merged or self._int8)

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
            self._allocate()
            if self._copies:
                torch._foreach_copy_([twin for twin, _ in self._copies], [own for _, own in self._copies])
            for twin, merge in self._merged:
                twin.copy_(merge())
            for layer in self._int8:
                layer.load()
            self._stale = False

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Fill the copy, tensor by tensor; from now on the trained parameters are not read any more."""
        self._allocate()
        copy_whole(weights, self._by_name, self._dtype)
        self._is_loaded, self._stale = True, False

    def _allocate(self) -> None:
        for storage, size in self._storages.values():
            if storage.nbytes() != size:  # a GPU would move it in any case
                storage.resize_(size)

    def _new_twins(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """Memory for casts of parameters, one behind the other. It is freed until it is used where they are on another
        device: a trainer whose explorers roll out never uses it."""
        sizes = [each.numel() for each in parameters]
        made = torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
        twins = [part.view(each.shape) for part, each in zip(made.split(sizes), parameters, strict=True)]
        storage = made.untyped_storage()
        self._storages[storage._cdata] = storage, storage.nbytes()
        if self._device != parameters[0].device:
            storage.resize_(0)
        return twins

    def _computes_with(self, parameter: Tensor) -> bool:
        """True if a parameter needs no cast."""
        fits = parameter.dtype == self._dtype or not parameter.is_floating_point()
        return fits and parameter.device == self._device

    def _twin(self, model: nn.Module, dtype: torch.dtype, merges: bool) -> nn.Module:
        """Copy the modules, without adapters if these are merged; tied parameters stay tied."""
        layers = {id(layer.base_layer.weight): layer for layer in adapted_layers(model).values() if merges}
        memo: dict[int, object] = {id(buffer): buffer.to(self._device) for buffer in model.buffers()}
        saved = {id(each) for each in model.state_dict(keep_vars=True).values()}
        for recurrent in recurrent_layers(model):  # decay rates, which meet activations in one product (MiniMax)
            own = [each for each in recurrent.buffers() if id(each) in saved and each.is_floating_point()]
            memo |= {id(buffer): buffer.to(self._device, dtype) for buffer in own}
        sources: dict[int, Callable[[], Tensor]] = {}  # of the twins that are rounded to 8 bits
        together: dict[int, Tensor] = {}
        for weights in find_weights_of_one_input(model) if self._device.type == "cuda" else ():
            if not any(map(self._computes_with, weights)):
                together |= {id(each): twin for each, twin in zip(weights, self._new_twins(weights), strict=True)}
        for name, parameter in model.named_parameters():
            layer = layers.get(id(parameter))
            if id(parameter) in self._in_8_bits:
                twin = nn.Parameter(torch.empty_like(parameter, dtype=dtype, device="meta"), requires_grad=False)
                memo[id(parameter)] = twin
                sources[id(twin)] = _data_of(parameter) if layer is None else _merge_of(layer)
                continue
            if merges if ".lora_" in name else layer is None and self._computes_with(parameter):
                memo[id(parameter)] = parameter
                continue
            place = together.get(id(parameter))
            twin = nn.Parameter(self._new_twins([parameter])[0] if place is None else place, requires_grad=False)
            memo[id(parameter)] = twin
            if layer is None:
                self._copies.append((twin.data, parameter))
                self._by_name[name] = twin.data
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
