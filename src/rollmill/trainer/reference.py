"""The frozen policy that a KL penalty or a preference loss compares with."""

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
    """The policy of the moment this is made, unless another model is given.

    It is a frozen copy of the model. Where the model has LoRA adapters only these are copied, and put in the place of
    the trained ones while the reference is asked.
    """

    def __init__(self, trained: nn.Module, given: nn.Module | None, device: torch.device) -> None:
        self._trained, self._given = trained, given is not None
        self.model: nn.Module | None = None  #: a model of its own, if it has one
        self._adapter: dict[str, Tensor] = {}
        if given is None and has_lora(trained):
            self._adapter = {name: weight.detach().clone() for name, weight in self._trainable()}
        else:
            frozen = copy.deepcopy(trained) if given is None else given.to(device)
            self.model = frozen.requires_grad_(False).eval()

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The model that is the reference inside."""
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
        """The policy of the moment becomes the reference. One that was given stays."""
        if self._given:
            return
        if self.model is not None:
            self.model.load_state_dict(self._trained.state_dict())
        for name, weight in self._trainable():
            if name in self._adapter:
                self._adapter[name].copy_(weight)

    @torch.no_grad()
    def follow(self, rate: float) -> None:
        """Move the weights towards the policy of the moment by a share of the difference: an exponential average."""
        trained = dict(self._trained.named_parameters())
        if self.model is not None:
            for name, weight in self.model.named_parameters():
                weight.lerp_(trained[name].to(weight.dtype), rate)
        for name, own in self._adapter.items():
            own.lerp_(trained[name], rate)

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps; None for a reference that was given."""
        if self._given:
            return None
        return self._adapter if self.model is None else self.model.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue where `state_dict` was taken."""
        if state is None or self._given:
            return
        if self.model is not None:
            load_full_weights(self.model, state)
        for name in self._adapter:
            self._adapter[name].copy_(state[name])

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, weight) for name, weight in self._trained.named_parameters() if weight.requires_grad]
