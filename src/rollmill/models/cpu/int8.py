"""Linear layers of the rollout engine that multiply in 8 bits, on processors with instructions for it.

Weights are rounded with a scale per output channel, and inputs with a scale per token (W8A8, as in LLM.int8(),
arXiv:2208.07339, without its outliers). Products are exact sums of integers, made by oneDNN. The results differ from
the trainer's by about a percent, so tokens are sampled from a slightly different distribution. Their recorded log-probs
are those of that distribution, and an algorithm's `corrections` weigh them by it.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rollmill.errors import ModelError
from rollmill.models.routing import find_routers
from rollmill.models.vision import vision_parts

_LEVELS = 127
_ZERO = 128  # what oneDNN subtracts from inputs: its fast products take them without a sign
_TINY = torch.finfo(torch.float32).tiny
_TRIED = 256  # inputs of the product that is compared with an exact one


class Int8Linear(nn.Module):
    """A linear layer that rounds its weights and inputs to 8 bits. It computes after the first `load`.

    Args:
        layer: the layer to stand for. Its bias is used as it is.
        source: returns the present weight [O, I], in any floating type.
    """

    def __init__(self, layer: nn.Linear, source: Callable[[], Tensor]) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias, self._source = layer.bias, source
        #: empty; some models ask for its type
        self.weight = nn.Parameter(torch.empty(0, dtype=layer.weight.dtype), requires_grad=False)
        self._packed: Tensor | None = None
        self._scale_O = self._zero_O = torch.empty(0)

    @torch.no_grad()
    def load(self) -> None:
        """Round the present weights."""
        weight_OI = self._source().float()
        self._scale_O = torch.maximum(weight_OI.amax(1), -weight_OI.amin(1)).clamp_(min=_TINY) / _LEVELS
        codes_OI = (weight_OI / self._scale_O[:, None]).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(codes_OI, None)
        self._zero_O = torch.zeros(self.out_features, dtype=torch.int64)

    def unload(self) -> None:
        """Free the weights, until the next `load`."""
        self._packed = None

    @property
    def nbytes(self) -> int:
        """Bytes of the rounded weights."""
        return 0 if self._packed is None else self.in_features * self.out_features

    def forward(self, input: Tensor) -> Tensor:
        """Product [..., O] of inputs [..., I], in their type."""
        return self.product(*round_rows(input))

    def product(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Product of inputs from `round_rows`, in the type of their scales."""
        none: list[Any] = []
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            codes, 1.0, _ZERO, self._packed, self._scale_O, self._zero_O, None, 1.0, 0, scale.dtype, "none", none, ""
        )
        found.mul_(scale)
        return found if self.bias is None else found.add_(self.bias)


def round_rows(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [..., I] (uint8, 128 for 0) of inputs and their scales [..., 1], in the type of the inputs."""
    scale = input.abs().amax(-1, keepdim=True).clamp_(min=_TINY).div_(_LEVELS)
    return (input / scale.float()).round_().add_(_ZERO).to(torch.uint8), scale


def int8_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers by name that may multiply in 8 bits: not the output layer, adapters, routers or a vision tower.

    Raises:
        ModelError: there is none.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    routers = [module for router in find_routers(model) for module in router.module.modules()]
    left_out = {id(module) for module in (head, *routers)}
    apart = tuple(f"{part}." for part in vision_parts(model))
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and id(module) not in left_out
        and not name.startswith(apart)
        and ".lora_" not in name
    }
    if not found:
        raise ModelError(f"engine.weights: int8: {type(model).__name__} has no linear layers for it; remove this key")
    return found


def require_int8_products(device: torch.device) -> None:
    """Raise ModelError if there are no exact products in 8 bits: on a GPU, or with a processor that cannot.

    Processors without VNNI or AMX would add pairs of products in 16 bits, which overflow.
    """
    advice = "remove this key"
    if device.type != "cpu":
        raise ModelError(f"engine.weights: int8 is for CPUs, and the engine is on {device}; {advice}")
    layer = nn.Linear(_TRIED, 2, bias=False)
    extreme_OI = torch.ones(2, _TRIED) * torch.tensor([[1.0], [-1.0]])
    tried = Int8Linear(layer, lambda: extreme_OI)
    try:
        tried.load()
        found = tried(torch.ones(1, _TRIED))
    except (RuntimeError, AttributeError) as error:
        raise ModelError(
            f"engine.weights: int8: this build of torch has no such products ({error}); {advice}"
        ) from error
    if not torch.allclose(found, torch.tensor([[_TRIED, -_TRIED]], dtype=found.dtype), rtol=1e-4):
        raise ModelError(f"engine.weights: int8: this processor has no exact products in 8 bits (VNNI); {advice}")
