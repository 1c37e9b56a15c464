"""Checks of `residency`: a stage's components, the phases that need them, and conflicting choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollmill.config.algorithms.base import PolicyGradientOptions
from rollmill.config.algorithms.distillation import Distill, SelfDistill
from rollmill.config.algorithms.preferences import DPO, KTO
from rollmill.config.checks.engine import uses_engine
from rollmill.config.checks.modes import RESIDENCY_ENGINE, RESIDENCY_SHARDS
from rollmill.config.engines import VLLMEngineConfig
from rollmill.config.model import ModelConfig
from rollmill.config.offload import PHASES, OffloadConfig, Phase
from rollmill.config.rewards.base import RewardSection
from rollmill.config.rewards.judges import ModelReward
from rollmill.config.run import StageConfig
from rollmill.config.tree import KeyPath
from rollmill.config.workflows import TrafficWorkflow

OFFLOAD_COMPONENTS = tuple(key for key in OffloadConfig.model_fields if key not in ("budget_gb", "folder"))
REBUILT_COMPONENTS = ("cast", "cache", "engine")
"""Components that are destroyed and rebuilt, never moved."""
RANKED_COMPONENTS = ("policy", "optimizer", "gradients", "reference", "critic", "critic_optimizer", "teacher")
"""Components of which every rank of the trainer has a copy."""


def stage_phases(stage: StageConfig) -> tuple[Phase, ...]:
    """Returns the phases of a step of this stage."""
    samples = stage.algorithm.uses_rollouts or stage.evaluation is not None
    return tuple(phase for phase in PHASES if phase != "rollout" or samples)


def component_phases(stage: StageConfig) -> dict[str, frozenset[Phase]]:
    """Returns the components that a stage may have, each with the phases that need it."""
    algorithm, phases = stage.algorithm, stage_phases(stage)
    needs: dict[str, Sequence[Phase]] = {"policy": phases, "optimizer": ["train"]}
    penalised = isinstance(algorithm, PolicyGradientOptions) and algorithm.kl.coefficient > 0
    if isinstance(algorithm, DPO | KTO) or penalised:
        needs["reference"] = ["inference"]
    if isinstance(algorithm, PolicyGradientOptions) and algorithm.advantage.uses_critic:
        needs |= {"critic": ["inference", "train"], "critic_optimizer": ["train"]}
    if isinstance(algorithm, Distill) or (isinstance(algorithm, SelfDistill) and algorithm.weights != "current"):
        needs["teacher"] = ["train"]
    if reward_models(stage):
        # rewards of later batches are computed while it trains
        later: list[Phase] = ["train"] if stage.max_staleness else []
        needs["rewards"] = ["rollout", "inference", *later]
    if "rollout" in phases and engine_has_process(stage):
        needs |= {"policy": [phase for phase in phases if phase != "rollout"], "engine": ["rollout"]}
    elif "rollout" in phases:
        needs |= {"cast": ["rollout"], "cache": ["rollout"]}
    return {name: frozenset(some) for name, some in needs.items()}


def engine_has_process(stage: StageConfig) -> bool:
    """Returns whether the stage generates with vLLM, which has a copy of the weights in a process of its own."""
    return uses_engine(stage) and isinstance(stage.engine, VLLMEngineConfig)


def reward_models(stage: StageConfig) -> list[ModelReward]:
    """Returns the reward models of a stage, of its evaluation sets and of its pipeline."""
    found: list[RewardSection] = []
    for each in [] if stage.evaluation is None else stage.evaluation.all_sets().values():
        found += each.rewards or []
    for view in stage.by_domain().values():
        found += view.rewards
        found += [reward for operator in view.pipeline for _, rewards in operator.reward_lists for reward in rewards]
    return [reward for reward in found if isinstance(reward, ModelReward)]


def unused_offload_keys(stage: StageConfig) -> dict[KeyPath, str]:
    """Returns keys of `residency` without effect in this stage, each with the reason."""
    algorithm, needs = stage.algorithm, component_phases(stage)
    if not algorithm.trains_policy:
        text = f"not honoured by algorithm `{algorithm.name}`, which needs all that it has in every phase; remove it"
        return {("residency",): text}
    if isinstance(stage.workflow, TrafficWorkflow):
        text = "not honoured by workflow `traffic`, whose requests need the policy at any time; remove it"
        return {("residency",): text}
    if uses_engine(stage) and stage.engine.name != "native" and not engine_has_process(stage):
        return {("residency",): f"not honoured with engine `{stage.engine.name}`: {RESIDENCY_ENGINE}"}
    if stage.trainer.ranks > 1 and stage.trainer.sharding != "none":
        return {("residency",): f"not honoured with trainer.sharding `{stage.trainer.sharding}`: {RESIDENCY_SHARDS}"}
    if all(needed == frozenset(stage_phases(stage)) for name, needed in needs.items() if name != "optimizer") and (
        "rollout" not in stage_phases(stage)
    ):
        text = f"not honoured: algorithm `{algorithm.name}` without an evaluation needs all that it has; remove it"
        return {("residency",): text}
    absent = [name for name in OFFLOAD_COMPONENTS if name not in needs]
    return {("residency", name): f"not honoured: the stage has no {name.replace('_', ' ')}" for name in absent}


def offload_conflicts(model: ModelConfig, stages: Sequence[StageConfig]) -> Iterator[tuple[KeyPath, str]]:
    """Yields key paths of the run for components that engine and trainer share."""
    for index, stage in enumerate(stages):
        chosen, at = stage.residency, ("stages", index) if len(stages) > 1 else ()
        if chosen is None:
            continue
        if chosen.reference != "auto" and model.lora is not None:
            text = "with model.lora the reference is a copy of the adapters, which stays where it is; remove this"
            yield (*at, "residency", "reference"), text
        if isinstance(stage.engine, VLLMEngineConfig) and engine_has_process(stage) and stage.engine.sleep:
            yield (*at, "engine", "sleep"), "with `residency` that decides (residency.engine); remove this"
        if "rollout" not in stage_phases(stage) or stage.trainer.precision != "fp32" or engine_has_process(stage):
            continue
        if chosen.policy not in ("auto", "device"):
            text = "in fp32 rollouts need the policy's own weights, so every phase needs them; remove this"
            yield (*at, "residency", "policy"), f"{text}, or set trainer.precision to bf16"
        if chosen.cast != "auto" and model.lora is None:
            text = "in fp32 rollouts run on the policy's own weights, and there is no cast"
            yield (*at, "residency", "cast"), f"{text}; remove this"
