"""The parameters the engine decodes with: the trainer's own, or one cast of them per update."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Weights:
    """`model` computes in `dtype`.

    If the trainer's model already has that type, it is that very model: nothing is copied and nothing can differ.
    Otherwise it is a twin whose parameters are cast once after each update; buffers are shared.
    """

    def __init__(self, trained: nn.Module, dtype: torch.dtype) -> None:
        self._trained = trained
        self._own = all(p.dtype == dtype for p in trained.parameters())
        self.model = trained if self._own else _twin(trained, dtype)
        self._stale = not self._own

    def updated(self) -> None:
        """The trained parameters changed."""
        self._stale = not self._own

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the twin up to date, if there is one and it is stale."""
        if self._stale:
            pairs = list(zip(self.model.parameters(), self._trained.parameters(), strict=True))
            torch._foreach_copy_([twin.data for twin, _ in pairs], [own.data for _, own in pairs])
            self._stale = False


def _twin(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Same modules, empty parameters of another type (tied ones stay tied), the same buffers."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, dtype=dtype)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=False)
    memo[id(model.config)] = copy.deepcopy(model.config)
    twin = copy.deepcopy(model, memo)
    return twin.eval()
