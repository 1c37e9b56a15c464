"""Checks of `offload`: a stage's components, the phases that need them, and conflicting choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rollmill.config.checks.engine import uses_engine
from rollmill.config.checks.modes import OFFLOAD_ENGINE, OFFLOAD_SHARDS
from rollmill.config.engines import EngineConfig, VLLMEngineConfig
from rollmill.config.offload import PHASES, OffloadConfig, Phase
from rollmill.config.placement import RayPlacement
from rollmill.config.rewards import Reward
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.tree import KeyPath
from rollmill.config.workflows import LiveRequestsWorkflow

OFFLOAD_COMPONENTS = tuple(key for key in OffloadConfig.model_fields if key not in ("budget_gb", "folder", "shared_by"))
REBUILT_COMPONENTS = ("cast", "cache", "engine")
"""Components that are destroyed and rebuilt, never moved."""
RANKED_COMPONENTS = ("policy", "optimizer", "gradients", "reference", "critic", "critic_optimizer", "teacher")
"""Components of which every rank of the trainer has a copy."""


def stage_phases(stage: StageConfig) -> tuple[Phase, ...]:
    """Returns the phases of a step of this stage."""
    samples = stage.algorithm.uses_rollouts or stage.evaluation is not None
    return tuple(phase for phase in PHASES if phase != "rollout" or samples)


def engines_on_device(config: RunConfig) -> list[EngineConfig | None] | None:
    """Returns the engine of each explorer in another process that shares the trainer's device, as far as the run file
    says: a section of its own, or None for the stage's. Without such explorers, where the trainer's process rolls out,
    returns None.
    """
    if config.is_split:
        return [None]
    if not isinstance(config.placement, RayPlacement):
        return None
    placement = config.placement
    gpus = [(kind, placement.gpus if kind.gpus is None else kind.gpus) for kind in placement.every_explorer]
    return [kind.engine for kind, own in gpus if own < 1]


def explorers_on_device(stage: StageConfig, engines: Sequence[EngineConfig | None]) -> list[StageConfig]:
    """Returns the stage as each explorer sees that shares the trainer's device; `offload.shared_by` limits or repeats
    those of `engines_on_device`."""
    chosen = None if stage.offload is None else stage.offload.shared_by
    if chosen is not None:
        engines = [engines[number % len(engines)] if engines else None for number in range(chosen)]
    return [stage.with_engine(engine) for engine in engines]


def component_phases(stage: StageConfig, *, elsewhere: bool = False) -> dict[str, frozenset[Phase]]:
    """Returns the components that a stage may have, each with the phases that need it.

    Args:
        elsewhere: explorers in other processes roll out; what they hold is the component `engine`.
    """
    algorithm, phases = stage.algorithm, stage_phases(stage)
    needs: dict[str, Sequence[Phase]] = {"policy": phases, "optimizer": ["train"]}
    if algorithm.uses_reference:
        needs["reference"] = ["inference"]
    if algorithm.active_critic is not None:
        needs |= {"critic": ["inference", "train"], "critic_optimizer": ["train"]}
    if algorithm.keeps_teacher:
        needs["teacher"] = ["train"]
    if reward_models(stage):
        # rewards of later batches are computed while it trains
        later: list[Phase] = ["train"] if stage.max_staleness else []
        needs["rewards"] = ["rollout", "inference", *later]
    if "rollout" in phases and elsewhere:
        # with max_staleness they roll out while it trains
        needs |= {"policy": [phase for phase in phases if phase != "rollout"]}
        needs["engine"] = phases if stage.max_staleness else ["rollout"]
    elif "rollout" in phases and engine_has_process(stage):
        needs |= {"policy": [phase for phase in phases if phase != "rollout"], "engine": ["rollout"]}
    elif "rollout" in phases:
        needs |= {"cast": ["rollout"], "cache": ["rollout"]}
    return {name: frozenset(some) for name, some in needs.items()}


def engine_has_process(stage: StageConfig) -> bool:
    """Returns whether the stage's engine has a copy of the weights in a process of its own."""
    return uses_engine(stage) and stage.engine.reader_python() is not None


def reward_models(stage: StageConfig) -> list[Path]:
    """Returns the folders of the reward models of a stage, of its evaluation sets and of its pipeline."""
    found: list[Reward] = []
    for each in [] if stage.evaluation is None else stage.evaluation.all_sets().values():
        found += each.rewards or []
    for view in stage.by_domain().values():
        found += view.rewards
        found += [reward for operator in view.pipeline for _, rewards in operator.reward_lists for reward in rewards]
    return [reward.offloadable_model for reward in found if reward.offloadable_model is not None]


def unused_offload_keys(stage: StageConfig) -> dict[KeyPath, str]:
    """Returns keys of `offload` without effect in this stage, wherever it rolls out, each with the reason."""
    algorithm, needs = stage.algorithm, component_phases(stage)
    if not algorithm.trains_policy:
        text = f"not honoured by algorithm `{algorithm.name}`, which needs all that it has in every phase; remove it"
        return {("offload",): text}
    if isinstance(stage.workflow, LiveRequestsWorkflow):
        text = "not honoured by workflow `live_requests`, whose requests need the policy at any time; remove it"
        return {("offload",): text}
    if uses_engine(stage) and stage.engine.name != "native" and not engine_has_process(stage):
        return {("offload",): f"not honoured with engine `{stage.engine.name}`: {OFFLOAD_ENGINE}"}
    if stage.trainer.shards_weights:
        return {("offload",): f"not honoured with trainer.sharding `{stage.trainer.sharding}`: {OFFLOAD_SHARDS}"}
    if all(needed == frozenset(stage_phases(stage)) for name, needed in needs.items() if name != "optimizer") and (
        "rollout" not in stage_phases(stage)
    ):
        text = f"not honoured: algorithm `{algorithm.name}` without an evaluation needs all that it has; remove it"
        return {("offload",): text}
    absent = [name for name in OFFLOAD_COMPONENTS if name not in needs and name not in REBUILT_COMPONENTS]
    return {("offload", name): f"not honoured: the stage has no {name.replace('_', ' ')}" for name in absent}


def offload_conflicts(config: RunConfig, stages: Sequence[StageConfig]) -> Iterator[tuple[KeyPath, str]]:
    """Yields key paths of the run for components that engine and trainer share, or that are never idle."""
    model, elsewhere = config.model, engines_on_device(config) is not None
    for index, stage in enumerate(stages):
        chosen, at = stage.offload, ("stages", index) if len(stages) > 1 else ()
        if chosen is None:
            continue
        if chosen.reference != "auto" and model.lora is not None:
            text = "with model.lora the reference is a copy of the adapters, which stays where it is; remove this"
            yield (*at, "offload", "reference"), text
        if isinstance(stage.engine, VLLMEngineConfig) and engine_has_process(stage) and stage.engine.sleep:
            yield (*at, "engine", "sleep"), "with `offload` that decides (offload.engine); remove this"
        needs = component_phases(stage, elsewhere=elsewhere)
        for name in [each for each in REBUILT_COMPONENTS if each not in needs and getattr(chosen, each) != "auto"]:
            yield (*at, "offload", name), f"not honoured: {_describe_absence(name, elsewhere)}; remove this"
        if chosen.shared_by is not None and not elsewhere:
            yield (*at, "offload", "shared_by"), "not honoured without explorers in other processes; remove this"
        if elsewhere and chosen.engine == "destroyed" and stage.max_staleness:
            text = f"explorers roll out while the trainer works (max_staleness {stage.max_staleness}), so all that they"
            yield (*at, "offload", "engine"), f"{text} hold stays; remove this, or set max_staleness: 0"
        if (
            elsewhere
            or "rollout" not in stage_phases(stage)
            or (stage.trainer.precision != "fp32" and stage.trainer.param_dtype != "bf16")
            or engine_has_process(stage)
        ):
            continue
        if chosen.policy not in ("auto", "device"):
            text = "rollouts need the policy's own weights, so every phase needs them; remove this"
            other = "" if stage.trainer.param_dtype == "bf16" else ", or set trainer.precision to bf16"
            yield (*at, "offload", "policy"), f"{text}{other}"
        if chosen.cast != "auto" and model.lora is None:
            text = "rollouts run on the policy's own weights, and there is no cast"
            yield (*at, "offload", "cast"), f"{text}; remove this"


def _describe_absence(name: str, elsewhere: bool) -> str:
    if elsewhere and name != "engine":
        return "explorers in other processes have it, and free it where offload.engine says so"
    return f"the stage has no {name}"
