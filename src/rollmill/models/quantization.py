"""Linear layers whose frozen weights are quantised, below adapters that are trained (QLoRA, arXiv:2305.14314).

Trainer and engine share the layers and compute with the same dequantised weights, which exist one layer at a time; the
backward pass makes them again.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rollmill.errors import ModelError
from rollmill.models.storage import page_out
from rollmill.models.vision import vision_parts

Quantization = Literal["int8", "nf4"]
_BLOCK = 64  # weights that share a scale in nf4, as in the paper
_LEVELS = 127


class QuantizedLinear(nn.Linear):
    """A frozen linear layer in int8 or nf4.

    int8: a scale for each row of the weight, its largest magnitude over 127. nf4: codes of 4 bits for quantiles of the
    normal distribution, in blocks of 64 with a scale in 8 bits (double quantisation), by bitsandbytes. A layer on the
    meta device has the sizes and no values.
    """

    scale: Tensor | None
    """Of each row, [out], float32; None for nf4."""

    def __init__(self, layer: nn.Linear, kind: Quantization) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = layer.in_features, layer.out_features, kind
        weight = layer.weight.detach()
        scale: Tensor | None = None
        self._states: dict[torch.dtype, Any] = {}
        if kind == "int8":
            codes, scale = _to_int8(weight)
        elif weight.is_meta:
            codes = torch.empty((weight.numel() + 1) // 2, 1, dtype=torch.uint8, device="meta")
        else:
            from bitsandbytes.functional import quantize_4bit

            codes, state = quantize_4bit(
                weight.contiguous(), blocksize=_BLOCK, compress_statistics=True, quant_type="nf4"
            )
            for dtype in (torch.float32, torch.bfloat16):
                self._states[dtype] = copy.copy(state)
                self._states[dtype].dtype = dtype
        self.register_buffer("scale", scale, persistent=False)
        self.weight = nn.Parameter(codes, requires_grad=False)
        bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """Product with the dequantised weight, in the type of autocast or of the input."""
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
        found: Tensor = _Product.apply(input.to(dtype), self)  # type: ignore[no-untyped-call]
        if self.scale is not None:
            found = found * self.scale.to(dtype)
        return found if self.bias is None else found + self.bias.to(dtype)

    def codes(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix [out, in] of the product: codes in int8, whose scales follow, or weights in nf4."""
        if self.kind == "int8":
            return self.weight.to(dtype)
        from bitsandbytes.functional import dequantize_4bit

        state = self._states.get(dtype)
        found: Tensor = dequantize_4bit(self.weight.data, self._states[torch.float32] if state is None else state)
        return found.to(dtype)

    def dequantized(self) -> Tensor:
        """Returns the weight in float32, [out, in]."""
        values = self.codes(torch.float32)
        return values if self.scale is None else values * self.scale.float()[:, None]

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedLinear:
        """Returns the layer itself: nothing in it changes."""
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for state in self._states.values():
            state.to(self.weight.device)
        return self


class _Product(torch.autograd.Function):
    """x W^T; its backward pass dequantises W again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return linear(x, layer.codes(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.layer.codes(grads[0].dtype), None


def quantize_linears(model: Any, kind: Quantization) -> None:
    """Quantises all linear layers of a model but its output layer and its vision tower, in place and one after the
    other.

    Raises:
        ModelError: the library for nf4 is missing, or the model has no such layer.
    """
    meta = next(model.parameters()).is_meta
    if kind == "nf4" and not meta and find_spec("bitsandbytes") is None:
        raise ModelError(
            "model.quantization: nf4 needs the library bitsandbytes: pip install 'rollmill[quantization]', or use int8"
        )
    head, parts = model.get_output_embeddings(), vision_parts(model)
    chosen = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and not any(name.startswith(f"{part}.") for part in parts)
    ]
    if not chosen:
        raise ModelError(f"model.quantization: {type(model).__name__} has no linear layers that can be quantised")
    for name, module in chosen:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, QuantizedLinear(module, kind))
        if not meta:
            page_out(module.weight.untyped_storage())


def is_quantized(model: nn.Module) -> bool:
    """True if `quantize_linears` was called on the model."""
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def count_weights(model: nn.Module) -> int:
    """Returns the number of weights of a model; packed ones count as what they stand for."""
    packed = {id(module.weight): module for module in model.modules() if isinstance(module, QuantizedLinear)}
    return sum(
        packed[id(each)].in_features * packed[id(each)].out_features if id(each) in packed else each.numel()
        for each in model.parameters()
    )


def full_weight(layer: nn.Module) -> Tensor:
    """Returns the weight of a linear layer; of a quantised one, the dequantised weight in float32."""
    if isinstance(layer, QuantizedLinear):
        return layer.dequantized()
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [out, in] and scales [out] in float32."""
    if weight.is_meta:
        return torch.empty_like(weight, dtype=torch.int8), torch.empty(len(weight), device="meta")
    values = weight.float()
    scale = values.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny) / _LEVELS
    return (values / scale[:, None]).round_().to(torch.int8), scale
