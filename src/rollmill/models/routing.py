"""Routing of mixture-of-experts models: records the experts chosen in one pass and replays them in another.

Two passes over the same tokens with the same weights may choose different experts where two scores are close, because
of rounding; a token's log-prob then jumps. Rollout routing replay (R3, arXiv:2510.11370) keeps the rollout's choice and
makes the trainer use the same experts. Only the choice is replayed: the experts' weights come from the trainer's own
scores, so gradients flow into the router as before.

A router is a module that scores all experts and selects some with `topk` (PhiMoE: with `max`, one after the other). No
router is implemented here: inside the contexts below, the selecting call within the router's own forward pass is
recorded or given other indices.

Shapes: T tokens of a flat row, L routers of the model in module order, k experts per token (the most of any router;
unused entries are 0), E experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from rollmill.errors import ModelError

_TOPK = (torch.topk, torch.Tensor.topk)
_MAX = (torch.max, torch.Tensor.max)
_SPARSEMIXER = "sparsemixer"
"""PhiMoE's function that selects one expert after the other."""


class Router(NamedTuple):
    """A module that chooses experts."""

    module: nn.Module
    experts: int
    k: int  #: experts per token
    sequential: bool  #: selects with `max`, k times
    groups: int  #: groups of experts that are scored before, by their best two: [..., groups, experts of each]


_found: WeakKeyDictionary[nn.Module, list[Router]] = WeakKeyDictionary()


def find_routers(model: nn.Module) -> list[Router]:
    """Returns the routers of a transformers model, in module order; none for a dense model."""
    if model not in _found:
        routers = (_as_router(module) for module in model.modules())
        _found[model] = [router for router in routers if router is not None]
    return _found[model]


def routing_shape(model: nn.Module) -> tuple[int, int] | None:
    """Returns (L, k) of a model; None for a dense one."""
    routers = find_routers(model)
    return (len(routers), max(router.k for router in routers)) if routers else None


class RecordedRouting:
    """Experts chosen in the forward passes inside `capture_routing`."""

    def __init__(self, routers: list[Router]) -> None:
        self._routers = routers
        self._width = 0  #: most experts of a router that has run
        self._chosen: dict[int, Tensor] = {}  # router -> [T, k]

    def take(self) -> Tensor:
        """Returns and clears the experts of the last pass's tokens, [T, L, k]; uint8 for up to 256 experts, else int16.

        Routers that did not run (those of an image encoder) have 0 everywhere.
        """
        chosen, self._chosen = self._chosen, {}
        any_Tk = next(iter(chosen.values()))
        most = max(router.k for router in self._routers)
        columns = [chosen.get(number, any_Tk.new_zeros(len(any_Tk), 0)) for number in range(len(self._routers))]
        routing_TLk = torch.stack([pad(each, (0, most - each.shape[1])) for each in columns], dim=1)
        return routing_TLk.to(torch.uint8 if self._width <= 256 else torch.int16)

    def _record(self, number: int, parts: list[tuple[Tensor, int]]) -> None:
        if number in self._chosen or not parts:
            what = "runs several times in one pass" if parts else "selects its experts in a way that is not known"
            raise ModelError(
                f"{type(self._routers[number].module).__name__} {what}, so its choice cannot be replayed; set "
                "trainer.router_replay: false"
            )
        self._chosen[number] = torch.cat([indices for indices, _ in parts], dim=1)
        self._width = max(self._width, *(width for _, width in parts))


@contextmanager
def capture_routing(model: nn.Module) -> Iterator[RecordedRouting]:
    """Records the experts chosen in the passes inside; call `take` after every pass."""
    recorded = RecordedRouting(find_routers(model))

    def record(number: int) -> _Selection:
        return _Recording(recorded, number)

    with _patch_routers(model, record):
        yield recorded


@contextmanager
def replay_routing(model: nn.Module, routing_TLk: Tensor) -> Iterator[None]:
    """Makes every router use the given experts for the T tokens of the passes inside; -1: the router's own choice.

    Backward passes that recompute activations must run inside as well. May be nested: the innermost one applies.
    """
    own = bool((routing_TLk < 0).any())

    def replay(number: int) -> _Selection:
        return _Replaying(routing_TLk[:, number].long(), own)

    with _patch_routers(model, replay):
        yield


class _Selection:
    """Handles the selecting calls of one forward pass of a router."""

    def select(self, call: Any, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Selects k experts by scores [..., E], T in all but the last axis; `call` makes the router's own choice.

        Returns:
            scores and indices of the selected experts, [..., k].
        """
        raise NotImplementedError

    def end(self) -> None:
        """Called at the end of the forward pass."""


class _Recording(_Selection):
    def __init__(self, recorded: RecordedRouting, number: int) -> None:
        self._recorded, self._number = recorded, number
        self._parts: list[tuple[Tensor, int]] = []

    def select(self, call: Any, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, indices = call()
        self._parts.append((indices.detach().flatten(0, -2), scores.shape[-1]))
        return values, indices

    def end(self) -> None:
        self._recorded._record(self._number, self._parts)


class _Replaying(_Selection):
    def __init__(self, given_Tk: Tensor, own: bool) -> None:
        self._given_Tk, self._own, self._at = given_Tk, own, 0

    def select(self, call: Any, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        indices = self._given_Tk[:, self._at : self._at + k].view(*scores.shape[:-1], k)
        self._at += k
        if self._own:
            indices = torch.where(indices < 0, call()[1], indices)
        return scores.gather(-1, indices), indices


class _PatchedRouterForward:
    """Forward pass of a router that delegates its selecting calls to a _Selection."""

    def __init__(self, router: Router, selection: Any) -> None:
        forward = router.module.forward
        self._own: Any = forward._own if isinstance(forward, _PatchedRouterForward) else forward
        self._router, self._selection = router, selection

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        selection: _Selection = self._selection()
        with _SelectionMode(self._router, selection):
            output = self._own(*args, **kwargs)
        selection.end()
        return output


class _SelectionMode(TorchFunctionMode):
    """Passes selecting calls to a _Selection, and all others to torch."""

    def __init__(self, router: Router, selection: _Selection) -> None:
        super().__init__()
        self._router, self._selection = router, selection

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        k = self._selects(func, args, kwargs)
        if not k:
            return func(*args, **kwargs)
        selected = self._selection.select(lambda: func(*args, **kwargs), args[0], k)
        return (torch.return_types.max if self._router.sequential else torch.return_types.topk)(selected)

    def _selects(self, func: Any, args: Any, kwargs: Any) -> int:
        """Number of experts that a call selects; 0 if it selects none, for example scores groups of experts."""
        if func not in (_MAX if self._router.sequential else _TOPK) or not args:
            return 0
        scores = args[0]
        if scores.shape[-1] < self._router.experts:
            return 0
        if scores.shape[1:] == (self._router.groups, self._router.experts):  # one group of all
            return 0
        if self._router.sequential:
            return int(kwargs.get("dim") == -1 and kwargs.get("keepdim", False))
        k = kwargs["k"] if "k" in kwargs else args[1]
        return int(k) if k == self._router.k else 0


@contextmanager
def _patch_routers(model: nn.Module, selection: Any) -> Iterator[None]:
    """Delegates the selecting calls of all routers to `selection(number)`, created for every pass."""
    routers = find_routers(model)
    before = [router.module.__dict__.get("forward") for router in routers]
    for number, router in enumerate(routers):
        router.module.forward = _PatchedRouterForward(router, lambda number=number: selection(number))
    try:
        yield
    finally:
        for router, forward in zip(routers, before, strict=True):
            if forward is None:
                del router.module.forward
            else:
                router.module.forward = forward


def _as_router(module: nn.Module) -> Router | None:
    names: set[str] = set()
    for kind in type(module).__mro__:
        for function in vars(kind).values() if not kind.__module__.startswith("torch.") else ():
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            names |= set() if code is None else set(code.co_names)
    config = getattr(module, "config", None)
    experts = getattr(module, "num_experts", None) or getattr(config, "num_experts", None)
    k = getattr(module, "top_k", None) or getattr(config, "top_k_experts", None)
    if not isinstance(experts, int) or not isinstance(k, int) or not names & {"topk", _SPARSEMIXER}:
        return None
    # Doge composes experts of pairs of keys, each chosen separately; whole models use topk in their sampling code
    if hasattr(module, "num_keys") or hasattr(module, "get_output_embeddings"):
        return None
    groups = getattr(module, "num_group", None)
    return Router(module, experts, k, _SPARSEMIXER in names, groups if isinstance(groups, int) else 0)
