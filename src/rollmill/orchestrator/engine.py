"""Builds the rollout engine of a stage, and the publisher that sends it the trainer's weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from rollmill.config.checks.engine import uses_engine
from rollmill.config.engines import NativeEngineConfig
from rollmill.config.run import StageConfig
from rollmill.engines.base import EngineUse, RolloutEngine
from rollmill.engines.native.weights import EngineWeights
from rollmill.engines.vllm.process import probe_python
from rollmill.errors import ConfigError
from rollmill.models.load import PolicyModel
from rollmill.models.lora import merged_weights
from rollmill.models.routing import routing_shape
from rollmill.registry import build_component
from rollmill.weights import InPlacePublisher, SharedMemorySender, TransferPublisher, WeightPublisher
from rollmill.weights.buckets import ShardedWeights
from rollmill.weights.cuda_ipc import IPCSender
from rollmill.weights.layout import CRC32, XXH3


def build_engine(
    policy: PolicyModel,
    config: StageConfig,
    precision: str,
    weights: Path | None = None,
    *,
    trained_on: bool = True,
    reader: str = "",
) -> RolloutEngine:
    """Build the engine that `config.engine` names; it computes in `precision` (bf16 or fp32). A stage that generates
    nothing gets the native one.

    Args:
        weights: where an engine in another process finds weights that somebody shares already.
        trained_on: its completions are trained on.
        reader: what the sender of those weights knows the engine by.

    Raises:
        ConfigError: engine.python is no Python with vLLM; sleep mode is configured without a GPU.
        ModelError: vLLM cannot load this model's weights.
    """
    section = config.engine if uses_engine(config) else NativeEngineConfig()
    use = EngineUse(trained_on and replays_routing(config, policy.model), weights, reader)
    engine: RolloutEngine = build_component(section, policy, config.rollout, precision, use)
    return engine


def replays_routing(config: StageConfig, model: nn.Module) -> bool:
    """True if a stage trains tokens through the experts that their rollouts chose.

    Raises:
        ConfigError: it is configured, and the model is no mixture of experts.
    """
    wanted, recorded = config.trainer.router_replay, "router_replay" not in config.engine.unsupported
    if not wanted or not recorded or not config.algorithm.uses_rollouts:
        return False
    if routing_shape(model) is None and wanted is True:
        raise ConfigError(
            f"stage {config.name}: trainer.router_replay: {type(model).__name__} has no routers that select experts by "
            "topk; remove this key"
        )
    return routing_shape(model) is not None


class WeightOwner(Protocol):
    """A trainer, whose ranks may hold parts of the weights."""

    def sharded_weights(self) -> ShardedWeights | None:
        """The weights, where ranks hold parts of them, or will; None: the policy's model has them."""

    def gather_policy(self) -> None:
        """Brings the weights into the policy's model."""


def uses_policy(engine: RolloutEngine) -> bool:
    """True if an engine computes with the weights of the policy's model, or makes its own from them."""
    return getattr(engine, "weights_path", None) is None and getattr(engine, "copied_weights", None) is None


def build_publisher(
    policy: PolicyModel, engine: RolloutEngine, precision: str, trainer: WeightOwner | None = None
) -> WeightPublisher:
    """Build the publisher of the trainer's weights for an engine from `build_engine`.

    An engine in another process has `weights_path`, where it reads them, and `checksum`, by which it verifies them.

    Args:
        trainer: None: the policy's model always has the weights.
    """
    path: Path | None = getattr(engine, "weights_path", None)

    def gather() -> None:
        if trainer is None or (parts := trainer.sharded_weights()) is None:
            return
        copied: EngineWeights | None = getattr(engine, "copied_weights", None)
        if copied is None:
            trainer.gather_policy()
        else:
            copied.load(parts)

    if path is None:
        return InPlacePublisher(engine, gather=gather)

    def weights() -> Mapping[str, torch.Tensor]:
        return (None if trainer is None else trainer.sharded_weights()) or merged_weights(policy.model)

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    sender = SharedMemorySender(path, weights(), dtype=dtype, checksum=getattr(engine, "checksum", XXH3))
    ipc = IPCSender(path, policy.device) if policy.device.type == "cuda" else None
    return TransferPublisher(sender, weights, engine, ipc)


def shared_checksum(configs: Iterable[StageConfig]) -> str:
    """The checksum of shared weights that the engines of all these stages can verify."""
    pythons = {config.engine.reader_python() for config in configs if uses_engine(config)} - {None}
    return XXH3 if all(probe_python(python)["xxhash"] for python in pythons if python) else CRC32
