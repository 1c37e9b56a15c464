"""Builds a stage's trainer from its options, in the run's own process and on every other rank."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn

from rollmill.algorithms import Recipe, build_recipe
from rollmill.algorithms.policy_recipes import combine_recipes
from rollmill.config.algorithms import known_algorithms
from rollmill.config.algorithms.base import AlgorithmOptions
from rollmill.config.algorithms.preferences import RewardModel
from rollmill.config.trainer import TrainerConfig
from rollmill.errors import ConfigError
from rollmill.registry import import_file
from rollmill.trainer.distributed.ranks import GroupRendezvous, RankGroup
from rollmill.trainer.reward_trainer import RewardTrainer
from rollmill.trainer.trainer import Trainer


@dataclass(frozen=True)
class DomainSpec:
    """Algorithm of a domain's experiences, with their longest completion and the weights of their rewards."""

    algorithm: AlgorithmOptions
    max_new_tokens: int
    reward_weights: dict[str, float] | None = None

    def recipe(self) -> Recipe:
        return build_recipe(self.algorithm, max_new_tokens=self.max_new_tokens, reward_weights=self.reward_weights)


@dataclass(frozen=True)
class TrainerSpec:
    """Everything a trainer is built from, except models and ranks.

    Args:
        precision: fp32 or bf16.
        total_steps: training steps of the stage.
        max_new_tokens: longest completion.
        reward_weights: weight of every reward component, for advantages computed from components.
        plugins: user files that register parts of algorithms.
        kept_versions: number of earlier weight versions kept to compare late completions with.
        domains: algorithms of the stage's domains, by name.
    """

    algorithm: AlgorithmOptions
    config: TrainerConfig
    precision: str
    total_steps: int
    max_new_tokens: int
    seed: int
    reward_weights: dict[str, float] | None = None
    plugins: tuple[Path, ...] = ()
    kept_versions: int = 0
    domains: Mapping[str, DomainSpec] = field(default_factory=dict)

    def trainer(
        self, model: Any, teacher: nn.Module | None, device: torch.device, ranks: RankGroup
    ) -> Trainer | RewardTrainer:
        """Builds the trainer of the policy, or of a reward model initialized from the policy."""
        config = self.config.model_copy(update={"precision": self.precision})
        common: dict[str, Any] = {"total_steps": self.total_steps, "device": device, "seed": self.seed, "ranks": ranks}
        if isinstance(self.algorithm, RewardModel):
            return RewardTrainer(model, self.algorithm, config, **common)
        weights, longest = self.reward_weights, self.max_new_tokens
        recipe = build_recipe(self.algorithm, max_new_tokens=longest, reward_weights=weights)
        if self.domains:
            recipe = combine_recipes(recipe, {name: each.recipe() for name, each in self.domains.items()})
        return Trainer(model, recipe, config, teacher=teacher, kept_versions=self.kept_versions, **common)

    def to_serialized(self) -> SerializedTrainerSpec:
        """Converts to a form that can be unpickled elsewhere: classes defined in user files cannot be pickled by
        reference.
        """
        values = {
            key: getattr(self, key) for key in ("precision", "total_steps", "max_new_tokens", "seed", "kept_versions")
        }
        return SerializedTrainerSpec(
            [file.absolute() for file in self.plugins],
            self.algorithm.model_dump(),
            self.config,
            values | {"reward_weights": self.reward_weights},
            {
                name: (each.algorithm.model_dump(), each.max_new_tokens, each.reward_weights)
                for name, each in self.domains.items()
            },
        )


def _received(values: dict[str, Any]) -> AlgorithmOptions:
    """Rebuilds the options of an algorithm. Raises ConfigError like SerializedTrainerSpec.received."""
    try:
        return known_algorithms()[values["name"]].model_validate(values)
    except (KeyError, ValidationError) as error:
        text = f"algorithm `{values['name']}` cannot be made in another process; register parts of your own"
        raise ConfigError(f"{text} in a file listed under `plugins`: {error}") from error


@dataclass(frozen=True)
class SerializedTrainerSpec:
    """A TrainerSpec in transit to another process."""

    files: list[Path]
    algorithm: dict[str, Any]
    config: TrainerConfig
    others: dict[str, Any] = field(default_factory=dict)
    domains: dict[str, tuple[dict[str, Any], int, dict[str, float] | None]] = field(default_factory=dict)

    def received(self) -> TrainerSpec:
        """Rebuilds the TrainerSpec.

        Raises:
            ConfigError: a user file cannot be imported, or does not register the algorithm.
        """
        for file in self.files:
            import_file(file)
        domains = {
            name: DomainSpec(_received(algorithm), longest, weights)
            for name, (algorithm, longest, weights) in self.domains.items()
        }
        return TrainerSpec(_received(self.algorithm), self.config, **self.others, domains=domains)


@dataclass(frozen=True)
class RankSetup:
    """Setup of a rank. Its models have no weights; these come from rank 0."""

    plan: SerializedTrainerSpec
    policy: nn.Module
    teacher: nn.Module | None
    device: str
    threads: int
    run_dir: Path
    rendezvous: GroupRendezvous


def strip_weights(model: nn.Module) -> nn.Module:
    """Returns the model without weights, small enough to send; tied parameters stay tied."""
    memo: dict[int, Any] = {id(buffer): buffer.cpu() for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    return copy.deepcopy(model, memo)


def allocate_weights(model: nn.Module, device: torch.device) -> nn.Module:
    """Allocates memory on a device for the weights of a stripped model."""
    memo: dict[int, Any] = {id(buffer): buffer.to(device) for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    return copy.deepcopy(model, memo)


@torch.no_grad()
def broadcast_weights(model: nn.Module) -> None:
    """Copies rank 0's weights to all ranks; every rank calls this."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
