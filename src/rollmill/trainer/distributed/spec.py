"""From a stage's options to its trainer, in the run's own process and on every other rank."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn

from rollmill.algorithms import build_recipe
from rollmill.config.algorithm import AlgorithmOptions
from rollmill.config.trainer import TrainerConfig
from rollmill.errors import ConfigError
from rollmill.recipes import RewardModel, known_algorithms
from rollmill.registry import import_file
from rollmill.trainer.distributed.ranks import GroupRendezvous, RankGroup
from rollmill.trainer.reward_trainer import RewardTrainer
from rollmill.trainer.trainer import Trainer


@dataclass(frozen=True)
class TrainerSpec:
    """What a trainer is made from, besides models and ranks.

    Args:
        precision: fp32 or bf16.
        total_steps: training steps of the stage.
        max_new_tokens: longest completion.
        reward_weights: of every part of the reward, for advantages that see parts.
        plugins: users' files, which register parts of algorithms.
        kept_versions: earlier versions of the weights that are kept to compare late completions with.
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

    def trainer(
        self, model: Any, teacher: nn.Module | None, device: torch.device, ranks: RankGroup
    ) -> Trainer | RewardTrainer:
        """What learns: the policy, or a reward model that begins as the policy."""
        config = self.config.model_copy(update={"precision": self.precision})
        common: dict[str, Any] = {"total_steps": self.total_steps, "device": device, "seed": self.seed, "ranks": ranks}
        if isinstance(self.algorithm, RewardModel):
            return RewardTrainer(model, self.algorithm, config, **common)
        weights, longest = self.reward_weights, self.max_new_tokens
        recipe = build_recipe(self.algorithm, max_new_tokens=longest, reward_weights=weights)
        return Trainer(model, recipe, config, teacher=teacher, kept_versions=self.kept_versions, **common)

    def to_serialized(self) -> SerializedTrainerSpec:
        """In a form that another process can read: classes that users' files make have no place to be found at."""
        values = {
            key: getattr(self, key) for key in ("precision", "total_steps", "max_new_tokens", "seed", "kept_versions")
        }
        return SerializedTrainerSpec(
            [file.absolute() for file in self.plugins],
            self.algorithm.model_dump(),
            self.config,
            values | {"reward_weights": self.reward_weights},
        )


@dataclass(frozen=True)
class SerializedTrainerSpec:
    """A plan on its way to another process."""

    files: list[Path]
    algorithm: dict[str, Any]
    config: TrainerConfig
    others: dict[str, Any] = field(default_factory=dict)

    def received(self) -> TrainerSpec:
        """The plan. Raises ConfigError where a user's file cannot be imported, or registers too little."""
        for file in self.files:
            import_file(file)
        try:
            algorithm = known_algorithms()[self.algorithm["name"]].model_validate(self.algorithm)
        except (KeyError, ValidationError) as error:
            text = f"algorithm `{self.algorithm['name']}` cannot be made in another process; register parts of your own"
            raise ConfigError(f"{text} in a file listed under `plugins`: {error}") from error
        return TrainerSpec(algorithm, self.config, **self.others)


@dataclass(frozen=True)
class RankSetup:
    """What a rank begins with: its models are skeletons, whose weights come from rank 0."""

    plan: SerializedTrainerSpec
    policy: nn.Module
    teacher: nn.Module | None
    device: str
    threads: int
    run_dir: Path
    rendezvous: GroupRendezvous


def strip_weights(model: nn.Module) -> nn.Module:
    """The model without weights, small enough to be sent; parameters that are tied stay tied."""
    memo: dict[int, Any] = {id(buffer): buffer.cpu() for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    return copy.deepcopy(model, memo)


def allocate_weights(model: nn.Module, device: torch.device) -> nn.Module:
    """A skeleton with room for weights on a device."""
    memo: dict[int, Any] = {id(buffer): buffer.to(device) for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    return copy.deepcopy(model, memo)


@torch.no_grad()
def broadcast_weights(model: nn.Module) -> None:
    """Rank 0's weights on all ranks; every rank calls this."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
