"""What explorers in other processes cannot do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollmill.config.checks.engine import engine_conflicts, uses_engine
from rollmill.config.engine import VLLMEngineConfig
from rollmill.config.placement import RayPlacement
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.tree import KeyPath, format_key_path
from rollmill.config.workflows import TrafficWorkflow


def placement_conflicts(config: RunConfig, stages: Sequence[StageConfig]) -> Iterator[tuple[KeyPath, str]]:
    """Choices of stages that need explorers in the trainer's process, or that the engine of some explorers refuses; and
    NCCL without GPUs.
    """
    if not isinstance(config.placement, RayPlacement):
        return
    if config.placement.nccl and not (config.placement.trainer_gpus >= 1 and _all_with_gpus(config.placement)):
        text = "needs a GPU for each explorer and the trainer; set placement.gpus and placement.trainer_gpus to 1"
        yield ("placement", "nccl"), text
    if config.placement.address is not None and config.placement.address.startswith("ray://"):
        text = "Ray Client cannot start runs; give HOST:PORT of the cluster's head (6379 by default), or `auto`"
        yield ("placement", "address"), text
    for stage in stages:
        for what in _needed_here(stage):
            text = f"stage {stage.name} has {what}, which needs explorers in the trainer's process; remove it, or use"
            yield ("placement",), f"{text} placement: inline"
    for number, kind in enumerate(config.placement.explorers):
        if isinstance(kind.engine, VLLMEngineConfig) and kind.engine.sleep:
            text = "explorers on Ray do not sleep; remove it"
            yield ("placement", "explorers", number, "engine", "sleep"), text
        for stage in stages if kind.engine is not None else []:
            for path, text in engine_conflicts(stage.with_engine(kind.engine)):
                yield (
                    ("placement", "explorers", number, "engine"),
                    f"{format_key_path(path)} of stage {stage.name}: {text}",
                )
    if 0 < config.placement.trainer_gpus < 1 and any(stage.trainer.ranks > 1 for stage in stages):
        text = "ranks cannot share a GPU, and trainer.ranks is above 1"
        yield ("placement", "trainer_gpus"), f"{text}; reserve 1 for each, or none to see all of a host"


def unused_placement_keys(config: RunConfig, stages: Sequence[StageConfig]) -> dict[KeyPath, str]:
    """Keys of `placement` that its other keys leave without effect, and of stages that it leaves without effect."""
    keys: dict[KeyPath, str] = {}
    if not isinstance(config.placement, RayPlacement):
        return keys
    weights = config.placement.weights
    for key, other in (("weights_folder", "folder"), ("nccl", "broadcast")):
        if weights != other:
            keys["placement", key] = f"not honoured with weights `{weights}`; it is with `{other}`"
    kinds, own = config.placement.explorers, "not honoured: every kind of placement.explorers has its own; remove it"
    for key in ("cpus", "gpus"):
        if all(getattr(kind, key) is not None for kind in kinds):
            keys["placement", key] = own
    if not any(uses_engine(stage) for stage in stages):
        for number in range(len(kinds)):
            text = "not honoured: no stage rolls out or is evaluated; remove it"
            keys |= {("placement", "explorers", number, key): text for key in ("engine", "threads")}
    elif config.mode == "both" and all(kind.engine is not None for kind in kinds):
        keys |= {("engine",): own} | {("stages", index, "engine"): own for index in range(len(stages))}
    return keys


def _all_with_gpus(placement: RayPlacement) -> bool:
    return all((placement.gpus if kind.gpus is None else kind.gpus) >= 1 for kind in placement.explorers)


def _needed_here(stage: StageConfig) -> Iterator[str]:
    if stage.rollout.token_budget is not None:
        yield "rollout.token_budget"
    if stage.rollout.reuse is not None:
        yield "rollout.reuse"
    if isinstance(stage.workflow, TrafficWorkflow):
        yield "workflow `traffic`"
    if stage.residency is not None:
        yield "residency"
    if isinstance(stage.engine, VLLMEngineConfig) and stage.engine.sleep:
        yield "engine.sleep"
    for name, model in stage.models.items():
        if model.policy is not None:
            yield f"models.{name}.policy"
