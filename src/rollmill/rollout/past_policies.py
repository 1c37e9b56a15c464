"""Past copies of the policy as a model of workflows: an opponent drawn for each rollout."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from rollmill.config.model import AuxiliaryModelConfig
from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import RolloutEngine
from rollmill.engines.native import NativeEngine
from rollmill.models.load import PolicyModel
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.policy import Policy
from rollmill.rollout.workflow import Rollout
from rollmill.seeds import counter_uniforms, derive_seed

_STREAM = 0x9A57  # keeps these random numbers apart from the policy's


class PastPolicies:
    """The newest copies of the policy of one stage, taken every few steps, for a model with `policy: past`.

    Copies are taken between two training steps, when no rollout is under way. A rollout draws one copy, or the current
    policy, by its seed alone: so a resumed run draws the same.

    Args:
        name, number: of the model in the section `models`.
        current: the stage's engine, which decodes with the current policy.
        build_engine: builds an engine for a copy of the policy's network.
        sampling: default sampling of replies.
    """

    def __init__(
        self,
        name: str,
        number: int,
        section: AuxiliaryModelConfig,
        policy: PolicyModel,
        current: RolloutEngine,
        build_engine: Callable[[nn.Module], NativeEngine],
        sampling: SamplingConfig,
    ) -> None:
        self._name, self._number, self._section, self._sampling = name, number, section, sampling
        self._policy, self._current, self._build_engine = policy, current, build_engine
        self._chat = ChatRenderer(policy.tokenizer, policy.eos_ids)
        self._copies: dict[int, _Copy] = {}
        self.finish_step(0)

    @property
    def steps(self) -> list[int]:
        """Steps of the stage after which the kept copies were taken, oldest first; 0 is the start of the stage."""
        return list(self._copies)

    def takes_copy(self, step: int) -> bool:
        """True if a copy is due after a training step of the stage."""
        return step % self._section.every == 0

    def finish_step(self, step: int) -> None:
        """Take a copy after a training step of the stage if one is due; it replaces the oldest of `keep`."""
        if self.takes_copy(step):
            oldest = self._copies.pop(self.steps[0]) if len(self._copies) == self._section.keep else self._new_copy()
            self._copies[step] = oldest.load(self._policy.model.state_dict(), step)

    def choose(self, seed: int) -> int | None:
        """Draw for a rollout by its seed: the step of one of the copies, or None for the current policy."""
        drawn = derive_seed(seed, _STREAM, self._number)
        latest, which = counter_uniforms(np.full(2, drawn, np.uint64), np.arange(2, dtype=np.uint64))
        return None if latest < self._section.latest else self.steps[int(which * len(self._copies))]

    @asynccontextmanager
    async def open(self, rollout: Rollout) -> AsyncIterator[Policy]:
        """Give a rollout the model that it draws; its calls are not recorded."""
        step = self.choose(rollout.seed)
        yield Policy(
            self._current if step is None else self._copies[step].engine,
            self._chat,
            self._sampling,
            seed=derive_seed(rollout.seed, _STREAM, self._number, 1),
            name=f"models.{self._name}, task {rollout.task.id}",
            index=rollout.index,
            copied_at=step,
        )

    def state_dict(self) -> dict[int, dict[str, Tensor]]:
        """State for a checkpoint: the weights of each copy by its step."""
        return {step: each.model.state_dict() for step, each in self._copies.items()}

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore a state from `state_dict`: the same copies, in the same order."""
        made, self._copies = list(self._copies.values()), {}
        for step in sorted(state):
            self._copies[step] = (made.pop() if made else self._new_copy()).load(state[step], step)

    async def close(self) -> None:
        """Free the engines; may be called twice."""
        for each in self._copies.values():
            await each.engine.close()

    def _new_copy(self) -> _Copy:
        model = copy.deepcopy(self._policy.model).requires_grad_(False).to(self._policy.device)
        model.zero_grad(set_to_none=True)  # gradients are copied with their parameters
        return _Copy(model, self._build_engine(model))


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of the policy's network, with the engine that decodes with it."""

    model: nn.Module
    engine: NativeEngine

    def load(self, weights: Mapping[str, Any], step: int) -> _Copy:
        """Take over weights; what the engine has cached of others is dropped."""
        self.model.load_state_dict(weights)
        self.engine.weights_updated(step)
        return self
