"""The frozen reference policy of a KL penalty or a preference loss."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rollmill.models.lora import has_lora
from rollmill.trainer.distributed.fsdp import load_full_weights


class ReferenceModel:
    """A frozen copy of the policy as it is now, or a given model.

    If the policy has LoRA adapters, only these are copied, and swapped in while the reference is active.
    """

    def __init__(self, trained: nn.Module, given: nn.Module | None, device: torch.device) -> None:
        self._trained, self._given = trained, given is not None
        self.model: nn.Module | None = None  #: the separate model; None with copied adapters
        self._adapter: dict[str, Tensor] = {}
        if given is None and has_lora(trained):
            self._adapter = {name: weight.detach().clone() for name, weight in self._trainable()}
        else:
            frozen = copy.deepcopy(trained) if given is None else given.to(device)
            self.model = frozen.requires_grad_(False).eval()

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """Context that yields the reference model."""
        if self.model is not None:
            yield self.model
            return
        weights = dict(self._trainable())
        trained = {name: weight.data for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.data = self._adapter[name]
        try:
            yield self._trained
        finally:
            for name, weight in weights.items():
                weight.data = trained[name]

    @torch.no_grad()
    def refresh(self) -> None:
        """Replaces the reference with the current policy. A given model stays."""
        if self._given:
            return
        if self.model is not None:
            self.model.load_state_dict(self._trained.state_dict())
        for name, weight in self._trainable():
            if name in self._adapter:
                self._adapter[name].copy_(weight)

    @torch.no_grad()
    def follow(self, rate: float) -> None:
        """Moves the weights towards the current policy by a share of the difference (exponential moving average)."""
        trained = dict(self._trained.named_parameters())
        if self.model is not None:
            for name, weight in self.model.named_parameters():
                weight.lerp_(trained[name].to(weight.dtype), rate)
        for name, own in self._adapter.items():
            own.lerp_(trained[name], rate)

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the weights for a checkpoint; None for a given model."""
        if self._given:
            return None
        return self._adapter if self.model is None else self.model.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is None or self._given:
            return
        if self.model is not None:
            load_full_weights(self.model, state)
        for name in self._adapter:
            self._adapter[name].copy_(state[name])

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, weight) for name, weight in self._trained.named_parameters() if weight.requires_grad]
