"""The forward pass of any transformers causal LM over a flat row of tokens: its inputs, and the parts it consists of.

Shapes: T tokens of the row.
"""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_needs: WeakKeyDictionary[nn.Module, tuple[bool, bool]] = WeakKeyDictionary()


def base_network(model: Any) -> Any:
    """The network below the output layer: what gives the last hidden states."""
    base = model.base_model
    if base is not model:
        return base
    embedding = model.get_input_embeddings()  # Llama 4's text model names no body
    return next(child for child in model.children() if any(each is embedding for each in child.modules()))


def build_forward_inputs(network: nn.Module, tokens: Tensor, positions: Tensor) -> dict[str, Any]:
    """Arguments of a forward pass over a flat row: tokens and positions are [1, T].

    Args:
        network: a causal LM or the body of one.
    """
    if network not in _needs:
        named = inspect.signature(network.forward).parameters
        _needs[network] = "position_ids" in named, any(_counts_positions(module) for module in network.modules())
    takes_positions, counts_positions = _needs[network]
    inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    if takes_positions:
        inputs["position_ids"] = positions
    if counts_positions:
        inputs["past_key_values"] = _RowPositions(positions)
    return inputs


def _counts_positions(module: nn.Module) -> bool:
    """Whether an attention layer counts positions by itself, from the length of the cache on (Llama 4)."""
    names = set(inspect.unwrap(type(module).forward).__code__.co_names)
    return {"ALL_ATTENTION_FUNCTIONS", "get_seq_length"} <= names


class _RowPositions:
    """Stands in for transformers' Cache where layers count positions: 0, 1, 2, ... plus the length of the cache."""

    def __init__(self, positions: Tensor) -> None:
        self._before = positions[0] - torch.arange(positions.shape[1], device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """[T]: what makes each token's place in the row its position."""
        return self._before

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values are kept elsewhere."""
        return key, value
