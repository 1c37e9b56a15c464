"""Recurrent layers (linear attention, state-space layers, short convolutions) over flat rows of several sequences.

Such a layer reads its input from left to right and keeps a state, so the sequences of a flat row must be separated.
`use_recurrent_handler` intercepts the calls of all recurrent layers of a transformers model: the handler, which knows
the sequences of the row, runs the layer's own forward pass over each of them, from an earlier state or from none.
States are plain tensors and are never written in place, so gradients flow through them and several sequences may
continue from the same state. No layer is implemented here; all use transformers' code (with two functions that
`recurrent_functions.py` replaces).

Shapes: T tokens of the row, n sequences of a call, S their length, d hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rollmill.models.recurrent_functions import step_limit, use_exact_functions

RecurrentState = dict[tuple[str, int], Tensor]
"""State of one layer after some tokens: (kind, index) -> tensor [n, ...]."""


class RecurrentCall(Protocol):
    """Runs one recurrent layer over tokens of the row."""

    def __call__(self, places: Tensor, before: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        """Runs the layer over the tokens at row indices `places` [n, S].

        Args:
            before: the state before them; None: they are the first of their sequences.

        Returns:
            output [n, S, d] and the state after them.
        """
        ...

    @property
    def continues(self) -> bool:
        """True if the layer can process several tokens at once from a state. Others (Mamba 1) go token by token, slowly
        and without gradients.
        """
        ...


RecurrentHandler = Callable[[Tensor, RecurrentCall], Tensor]
"""Runs a layer over the whole row: (hidden states [1, T, d], call) -> [1, T, d]."""

_READS_STATE = {"get_conv_state", "get_recurrent_state", "get_linear_cache"}
_ATTENDS = {"ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"}
_PER_TOKEN = ("position_ids", "position_embeddings")
_CACHE = ("cache_params", "past_key_values")
_found: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()
_continues: dict[type[nn.Module], bool] = {}


class StateCache:
    """Replaces transformers' Cache in one call of one layer: provides a state and records the next one."""

    def __init__(self, before: RecurrentState | None) -> None:
        self._before = before or {}
        self.after: RecurrentState = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The latest inputs of a convolution, or None at the start of sequences."""
        return self._copy(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of a recurrence, or None at the start of sequences."""
        return self._copy(("recurrent", state_idx))

    def _copy(self, name: tuple[str, int]) -> Tensor | None:
        """A copy of a state, since some layers write into it instead of passing a new one."""
        if name in self._before:
            self.after[name] = self._before[name].clone()
        return self.after.get(name)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Records the latest inputs [n, c, S] of a convolution; returns all inputs it needs."""
        before = self._before.get(("conv", state_idx))
        if before is not None:
            size, seen = before.shape[-1], torch.cat([before, conv_states], dim=-1)
        else:
            size = conv_kernel_size or conv_states.shape[-1]
            seen = pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        self.after["conv", state_idx] = seen[..., -size:]
        return seen

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Records the state of a recurrence."""
        self.after["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's name for `get_recurrent_state`."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """MiniMax's name for `update_recurrent_state`."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """True if there are earlier tokens."""
        return bool(self._before)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns True, which keeps layers from writing their state in place."""
        return True


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the layers of a transformers model that keep a state of fixed size instead of keys and values of all
    tokens.
    """
    if model not in _found:
        _found[model] = [module for module in model.modules() if _is_recurrent(module)]
    return _found[model]


@contextmanager
def use_recurrent_handler(model: nn.Module, recur: RecurrentHandler) -> Iterator[None]:
    """Passes all calls of the model's recurrent layers to `recur`. May be nested: the innermost one applies."""
    layers: list[Any] = recurrent_layers(model)
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        use_exact_functions(type(layer).__module__)
        layer.forward = _PatchedForward(layer, recur)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


class _PatchedForward:
    """Forward pass of a layer that delegates to a RecurrentHandler."""

    def __init__(self, layer: Any, recur: RecurrentHandler) -> None:
        forward = layer.forward
        self._own: Callable[..., Any] = forward._own if isinstance(forward, _PatchedForward) else forward
        self._layer, self._recur = layer, recur

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self._own).bind(*args, **kwargs)
        others = bound.arguments.pop("kwargs", {})
        given = {**bound.arguments, **others}
        hidden: Tensor = given.pop(next(iter(given)))
        given |= dict.fromkeys({*_CACHE, "attention_mask"} & set(bound.signature.parameters))
        call = _LayerCall(self._layer, self._own, hidden, given)
        output = self._recur(call.hidden, call)
        return (output, *call.others) if call.others else output


class _LayerCall:
    """The RecurrentCall of one call of a layer."""

    def __init__(self, layer: nn.Module, own: Callable[..., Any], hidden: Tensor, given: dict[str, Any]) -> None:
        self._layer, self._own, self._given = layer, own, given
        self.hidden = hidden
        self.others: list[None] = []  #: placeholders for the layer's return values besides its output

    def __call__(self, places: Tensor, before: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        if before is None or places.shape[1] == 1 or self.continues:
            return self._run(self.hidden, places, before)
        outputs = []
        for column in places.split(1, dim=1):
            output, before = self._run(self.hidden, column, before)
            outputs.append(output)
        return torch.cat(outputs, dim=1), before

    @property
    def continues(self) -> bool:
        """Measured once per class, on random input."""
        kind = type(self._layer)
        if kind not in _continues:
            with torch.no_grad():
                generator = torch.Generator().manual_seed(0)
                hidden = torch.randn(1, 64, self.hidden.shape[2], generator=generator).to(self.hidden)
                places = torch.zeros(1, 64, dtype=torch.int64, device=hidden.device)
                whole, _ = self._run(hidden, places, None, at=torch.arange(64))
                _, state = self._run(hidden, places[:, :56], None, at=torch.arange(56))
                rest, _ = self._run(hidden, places[:, 56:], state, at=torch.arange(56, 64))
                error = (whole[:, 56:] - rest).abs().max() / whole[:, 56:].abs().max()
            _continues[kind] = bool(error < (1e-4 if hidden.dtype in (torch.float32, torch.float64) else 0.02))
        return _continues[kind]

    def _run(
        self, hidden: Tensor, places: Tensor, before: RecurrentState | None, at: Tensor | None = None
    ) -> tuple[Tensor, RecurrentState]:
        """Runs the layer once; `at` are indices of the hidden states to read, if not `places`."""
        cache = StateCache(before)
        picked = places if at is None else at.to(places.device)[None]
        inputs = hidden[0].index_select(0, picked.flatten()).view(*picked.shape, -1)
        limit = step_limit(self._layer) if before is not None and places.shape[1] == 1 else {}
        output = self._own(inputs, **_of_call(self._given, places, cache), **limit)
        if isinstance(output, tuple):
            self.others = [None] * (len(output) - 1)
            output = output[0]
        return output, cache.after


def _of_call(given: dict[str, Any], places: Tensor, cache: StateCache) -> dict[str, Any]:
    """A layer's arguments besides its input, for the tokens at `places`."""
    own = {name: _picked(value, places) if name in _PER_TOKEN else value for name, value in given.items()}
    return own | {name: cache for name in _CACHE if name in given}


def _picked(value: Any, places: Tensor) -> Any:
    """Selects the tokens at `places` from tensors [1, T, ...] or tuples of them."""
    if isinstance(value, tuple):
        return tuple(_picked(each, places) for each in value)
    return value if value is None else value[0][places]


def _is_recurrent(module: nn.Module) -> bool:
    """True if a module reads a state from the cache and does not attend to keys."""
    if not hasattr(module, "layer_idx"):
        return False
    names: set[str] = set()
    for function in vars(type(module)).values():
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        names |= set() if code is None else set(code.co_names)
    return bool(names & _READS_STATE) and not names & _ATTENDS
