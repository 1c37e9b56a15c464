"""Products of a mixture's experts under autocast: in bf16, as other linear layers. Importing this module is enough.

transformers multiplies by all experts at once (`grouped_mm`), in the type of the weights: autocast does not reach these
products. With fp32 weights a GPU multiplies expert by expert, and the host waits for the number of tokens of each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

_KIND = "grouped_mm"


class _InBf16:
    """Experts whose weights are cast; all else is the module's own."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.bfloat16() if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def multiply_by_experts(experts: Any, hidden_Td: Tensor, index_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """transformers' function of the same kind; under autocast on a GPU with weights in bf16.

    Gradient checkpointing restores autocast where it computes a layer again, in another thread, so this does the same
    there.
    """
    if hidden_Td.is_cuda and torch.is_autocast_enabled("cuda"):
        experts, hidden_Td = _InBf16(experts), hidden_Td.bfloat16()
    product: Tensor = grouped_mm_experts_forward(experts, hidden_Td, index_Tk, weights_Tk)
    return product


ALL_EXPERTS_FUNCTIONS[_KIND] = multiply_by_experts
