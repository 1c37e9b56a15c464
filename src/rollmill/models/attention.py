"""One attention implementation for rollouts and training, plugged into transformers' attention interface.

Inside `attending(model, context)` every attention layer of `model` calls `context.attend`. What attends to what is
the context's business: the engine's reads a KV cache, the trainer's a packed batch. The tokens of a forward pass are
therefore always one flat row ([1, T] input ids), and no model code depends on how they are batched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

IMPLEMENTATION = "rollmill"


class AttentionContext(Protocol):
    """What one forward pass attends to."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attention of one layer.

        Args:
            query: [1, H, T, D], rotary embedding applied.
            key: [1, K, T, D] and value: [1, K, T, V]: K divides H.
            scaling: factor on the scores.
            sliding_window: how many latest positions (own included) a token sees, or None for all.
            softcap: scores become softcap * tanh(scores / softcap), or None.

        Returns:
            [1, T, H, V].
        """
        ...


_active: dict[int, AttentionContext] = {}
"""By id of the configuration that a model's layers share: two models may be at work in two threads (and a backward
pass that recomputes activations runs in threads of its own)."""


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    context = _active.get(id(module.config))
    assert context is not None, "a forward pass outside attending()"
    layer: int = module.layer_idx  # type: ignore[assignment]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = context.attend(layer, query, key, value, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
    return output, None


AttentionInterface.register(IMPLEMENTATION, _attention)


@contextmanager
def attending(model: torch.nn.Module, context: AttentionContext) -> Iterator[None]:
    """Route the attention of `model` through `context`; outside, the model is an ordinary transformers model.

    Backward passes that recompute activations (gradient checkpointing) must run inside as well.
    """
    config: Any = model.config
    parts = [getattr(config, name) for name in config.sub_configs]
    keys = {id(config), *(id(part) for part in parts if part is not None)}
    previous, name = {key: _active[key] for key in keys if key in _active}, config._attn_implementation
    _active.update(dict.fromkeys(keys, context))
    config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        for key in keys:
            del _active[key]
        _active.update(previous)
        config._attn_implementation = name
