"""What explorers in other processes cannot do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollmill.config.placement import OnRay
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.tree import KeyPath
from rollmill.config.workflows import Traffic


def placement_contradictions(config: RunConfig, stages: Sequence[StageConfig]) -> Iterator[tuple[KeyPath, str]]:
    """Choices of stages that need explorers in the trainer's process."""
    if not isinstance(config.placement, OnRay):
        return
    if config.placement.address is not None and config.placement.address.startswith("ray://"):
        text = "Ray Client cannot start runs; give HOST:PORT of the cluster's head (6379 by default), or `auto`"
        yield ("placement", "address"), text
    for stage in stages:
        for what in _needed_here(stage):
            text = f"stage {stage.name} has {what}, which needs explorers in the trainer's process; remove it, or use"
            yield ("placement",), f"{text} placement: inline"


def unhonoured_by_placement(config: RunConfig) -> dict[KeyPath, str]:
    """Keys of `placement` that its other keys leave without effect."""
    if isinstance(config.placement, OnRay) and config.placement.weights == "memory":
        return {("placement", "weights_folder"): "not honoured with weights `memory`; it is with `folder`"}
    return {}


def _needed_here(stage: StageConfig) -> Iterator[str]:
    if stage.rollout.token_budget is not None:
        yield "rollout.token_budget"
    if stage.rollout.reuse is not None:
        yield "rollout.reuse"
    if isinstance(stage.workflow, Traffic):
        yield "workflow `traffic`"
    if stage.residency is not None:
        yield "residency"
    for name, model in stage.models.items():
        if model.policy is not None:
            yield f"models.{name}.policy"
