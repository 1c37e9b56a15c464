"""One attention implementation for rollouts and training, plugged into transformers' attention interface.

Inside `use_attention_context(model, context)` every attention layer of `model` calls `context.attend`, and every
recurrent layer (`rollmill.models.recurrent`) calls `context.recur`. The context decides which tokens belong together:
the engine's reads a KV cache, the trainer's a packed batch. The tokens of a forward pass are therefore always one flat
row ([1, T] input ids), and no model code depends on how they are batched. `build_forward_inputs` builds the inputs of
such a pass, and `VarlenAttention` runs it by the GPU's variable-length kernel.

Shapes: T tokens of the row, H query heads, K key-value heads (a divisor of H), D head size, V size of a value.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from rollmill.errors import ModelError
from rollmill.models.recurrent import RecurrentCall, use_recurrent_handler
from rollmill.models.transfers import to_device

ATTENTION_IMPLEMENTATION = "rollmill"

_IGNORED = {
    # Queries and keys include positions, and the context decides what attends to what.
    "position_ids",
    "position_embeddings",
    "cache_position",
    "is_causal",
    "past_key_values",
    "use_cache",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    # Selects further return values.
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    # Settings of the model's forward pass that do not affect attention.
    "logits_to_keep",
    "num_items_in_batch",
}
"""Arguments that transformers' layers pass to the attention interface and that do not change its result here."""


AttentionWindow = tuple[int | None, int | None]
"""(window, chunk): limits on how far back a token attends."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of one layer's attention."""

    scaling: float  #: factor of the scores
    sliding_window: int | None = (
        None  #: number of latest positions (its own included) that a token attends to; None: all
    )
    chunk: int | None = None  #: a token attends only within its block of this many positions (Llama 4); None: all
    softcap: float | None = None  #: scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None
    """[H]: a score per head that is part of the softmax but has no value (gpt-oss)."""

    @property
    def window(self) -> AttentionWindow:
        """(sliding window, chunk)."""
        return self.sliding_window, self.chunk


class AttentionContext(Protocol):
    """Defines what the tokens of one forward pass attend to.

    Layers are identified by the order of their calls, which is the same in every pass: some models run a layer several
    times, with keys and values of each run.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Computes the attention of the next layer.

        Args:
            query: [1, H, T, D], rotary embedding applied.
            key: [1, K, T, D] and value: [1, K, T, V].

        Returns:
            [1, T, H, V].
        """
        ...

    def recur(self, hidden: Tensor, call: RecurrentCall) -> Tensor:
        """Runs the next recurrent layer over the row's sequences: hidden states [1, T, d] -> [1, T, d]."""
        ...


def window_mask(at_query: Tensor, at_key: Tensor, reach: AttentionWindow) -> Tensor | None:
    """Marks the keys that a window or chunk hides from a query; the two position tensors are broadcast.

    Returns:
        bool, True where hidden; None if neither limits anything.
    """
    window, chunk = reach
    hidden = None
    if window is not None:
        hidden = at_key <= at_query - window
    if chunk is not None:
        other = at_key // chunk != at_query // chunk
        hidden = other if hidden is None else hidden | other
    return hidden


def fits_window(length: int, reach: AttentionWindow) -> bool:
    """True if sequences of this length are too short for the window and the chunk to hide anything."""
    return all(limit is None or length <= limit for limit in reach)


def append_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turns sinks into one more key, so that any attention kernel takes them into account.

    Queries get one more component, sink / scaling, which is multiplied by 1 in the new key and by 0 in all others.

    Args:
        query: [n, H, S, D]; key: [n, K, L, D]; value: [n, K, L, V].
        mask: additive, [n or 1, 1, S, L]

    Returns:
        the same four for L + 1 keys, the last of which is the sink's.
    """
    assert options.sinks is not None
    column = (options.sinks / options.scaling).to(query.dtype)[None, :, None, None]
    query = torch.cat([query, column.expand(query.shape[0], -1, query.shape[2], 1)], dim=3)
    sink = torch.zeros_like(key[:, :, :1])
    key = torch.cat([key, sink], dim=2)
    component = torch.zeros_like(key[..., :1])
    component[:, :, -1] = 1
    value = torch.cat([value, torch.zeros_like(value[:, :, :1])], dim=2)
    return query, torch.cat([key, component], dim=3), value, torch.nn.functional.pad(mask, (0, 1))


_active: dict[int, AttentionContext] = {}
"""id of the configuration that a model's layers share -> context.

Not thread-local: two models may run in two threads, and a backward pass that recomputes activations runs in others.
"""


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
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    context = _active.get(id(module.config))
    assert context is not None, "a forward pass outside use_attention_context()"
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _IGNORED)
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise ModelError(
            f"{type(module).__name__} hands {', '.join(unknown)} to its attention, which rollmill's attention does not "
            "know; leaving it out would compute another model. Choose a model of another architecture"
        )
    window, chunk = _attention_window(module, sliding_window)
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=window,
        chunk=chunk,
        softcap=softcap,
        sinks=s_aux,
    )
    return context.attend(query, key, value, options).contiguous(), None


def _attention_window(module: torch.nn.Module, window: int | None) -> AttentionWindow:
    """Window and chunk of a layer. Some models apply them only in their masks, which are not built here."""
    config: Any = module.config
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[layer] if kinds is not None and layer is not None and layer < len(kinds) else None
    if kind == "chunked_attention":
        return window, config.attention_chunk_size
    if window is None and (kind == "sliding_attention" or kinds is None):
        window = getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None)
    return window, None


AttentionInterface.register(ATTENTION_IMPLEMENTATION, _attention)


@contextmanager
def use_attention_context(model: torch.nn.Module, context: AttentionContext) -> Iterator[None]:
    """Routes the attention and the recurrent layers of `model` through `context`.

    Outside this context, the model is an ordinary transformers model. Backward passes that recompute activations
    (gradient checkpointing) must run inside as well.
    """
    config: Any = model.config
    parts = [getattr(config, name) for name in config.sub_configs]
    configs = [config, *(part for part in parts if part is not None)]
    keys = {id(each) for each in configs}
    previous = {key: _active[key] for key in keys if key in _active}
    names = [(each, each._attn_implementation) for each in configs]
    _active.update(dict.fromkeys(keys, context))
    config._attn_implementation = ATTENTION_IMPLEMENTATION
    try:
        with use_recurrent_handler(model, context.recur):
            yield
    finally:
        for key in keys:
            del _active[key]
        _active.update(previous)
        for each, name in names:
            each._attn_implementation = name


_needs: WeakKeyDictionary[nn.Module, tuple[bool, bool]] = WeakKeyDictionary()


def base_network(model: Any) -> Any:
    """Returns the network below the output layer, which computes the last hidden states."""
    base = model.base_model
    if base is not model:
        return base
    embedding = model.get_input_embeddings()  # Llama 4's text model has no base model attribute
    return next(child for child in model.children() if any(each is embedding for each in child.modules()))


def build_forward_inputs(network: nn.Module, tokens: Tensor, positions: Tensor) -> dict[str, Any]:
    """Builds the arguments of a forward pass over a flat row: tokens and positions are [1, T].

    Args:
        network: a causal LM or its base network.
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
    """True if an attention layer derives positions from the length of the cache (Llama 4)."""
    names = set(inspect.unwrap(type(module).forward).__code__.co_names)
    return {"ALL_ATTENTION_FUNCTIONS", "get_seq_length"} <= names


class _RowPositions:
    """Replaces transformers' Cache for layers that compute positions as 0, 1, 2, ... plus the length of the cache."""

    def __init__(self, positions: Tensor) -> None:
        self._before = positions[0] - torch.arange(positions.shape[1], device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """[T]: the offset from each token's row index to its position."""
        return self._before

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns keys and values unchanged; the attention context stores them."""
        return key, value


_NEEDED = {"scale", "window_size"}  # parameters that early versions of the function lack
_WIDEST_HEAD = 256  # of the flash kernels


def varlen_available(query: Tensor, value: Tensor) -> bool:
    """True if GPU and torch have the kernel for this type and heads of these sizes (the last dimension).

    The kernel needs compute capability 8.0 (Ampere), 16 bits, and queries and values of one head size.
    """
    size = value.shape[-1]
    return (
        value.device.type == "cuda"
        and value.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == size <= _WIDEST_HEAD
        and size % 8 == 0
        and torch.cuda.get_device_capability(value.device) >= (8, 0)
        and set(inspect.signature(varlen_attn).parameters) >= _NEEDED
    )


class VarlenAttention:
    """Attention of concatenated segments in one call of the GPU's variable-length kernel.

    The keys of a child segment are its parent's and its own, concatenated.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> None:
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        rows: list[int] = []
        key_starts = [0]
        for i, parent in enumerate(parents):
            if parent >= 0:
                rows.extend(range(starts[parent], starts[parent + 1]))
            rows.extend(range(starts[i], starts[i + 1]))
            key_starts.append(len(rows))
        shared = any(parent >= 0 for parent in parents)
        places = np.array(rows if shared else [], np.int64)
        columns = (np.array(starts, np.int32), np.array(key_starts, np.int32), places)
        self._query_starts, self._key_starts, rows_T = to_device(columns, device)
        self._rows = rows_T if shared else None
        self._max_query = max(lengths)
        self._max_key = max(b - a for a, b in pairwise(key_starts))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        """[T, H, D], [T, K, D], [T, K, D] -> [T, H, D]. The kernel aligns causal masks with the last key."""
        if self._rows is not None:
            k, v = k.index_select(0, self._rows), v.index_select(0, self._rows)
        grouped = {}
        if (heads := q.shape[1] // k.shape[1]) > 1:
            if "enable_gqa" in inspect.signature(varlen_attn).parameters:
                grouped["enable_gqa"] = True
            else:  # torch before 2.12
                k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
        output: Any = varlen_attn(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            self._query_starts,
            self._key_starts,
            self._max_query,
            self._max_key,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            **grouped,
        )
        result: Tensor = output
        return result
