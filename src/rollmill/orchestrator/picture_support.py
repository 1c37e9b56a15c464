"""Refuses runs in which a vision-language model would not see, or would be computed otherwise than it was checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollmill.config.algorithms.base import PolicyGradientOptions
from rollmill.config.algorithms.distillation import DistillationOptions, SelfDistill
from rollmill.config.loader import LoadedRun
from rollmill.config.placement import InlinePlacement
from rollmill.config.run import RunConfig, StageConfig
from rollmill.config.taskset import TasksetConfig
from rollmill.config.trainer import TrainerConfig
from rollmill.data.images import image_refs_of
from rollmill.errors import ConfigError
from rollmill.models.load import PolicyModel
from rollmill.models.vision import picture_processor
from rollmill.types import Task


def require_seen(config: TasksetConfig, tasks: Sequence[Task], policy: PolicyModel, where: str) -> None:
    """Raise ConfigError if tasks have pictures that the policy is to see and cannot, or that it sees and must not."""
    sees = picture_processor(policy.model) is not None
    name = type(policy.model).__name__
    for part in config.parts():
        own = [task for task in tasks if not config.mix or task.taskset == getattr(part, "name", "")]
        task = next((task for task in own if image_refs_of(task.metadata)), None)
        if task is None:
            continue
        if not sees and part.images == "see":
            raise ConfigError(
                f"{where}: task {task.id} has pictures, which {name} cannot see; train a vision-language model, or "
                "write `images: text` in the taskset if only rewards are to see them"
            )
        if sees and part.images == "text":
            raise ConfigError(f"{where}.images: text is for text models, and {name} sees pictures; remove it")


def require_picture_support(loaded: LoadedRun, policy: PolicyModel) -> None:
    """Raise ConfigError for what does not work with a model that sees, or for `trainer.freeze` without one."""
    if picture_processor(policy.model) is None:
        for stage in loaded.stages:
            if stage.trainer.freeze != TrainerConfig.model_fields["freeze"].default:
                raise ConfigError(
                    f"stage {stage.name}: trainer.freeze: {type(policy.model).__name__} has neither vision tower nor "
                    "projector; remove this key, or train a vision-language model"
                )
        return
    name = type(policy.model).__name__
    for key, value in _run_wide(loaded.config):
        raise ConfigError(f"{key}: {value} does not work with {name}, which sees pictures")
    for stage in loaded.stages:
        for view in stage.by_domain().values():
            for key, remedy in _of_stage(view):
                raise ConfigError(f"stage {stage.name}: {key} does not work with {name}, which sees pictures; {remedy}")


def _run_wide(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.mode != "both":
        yield "mode", config.mode
    if not isinstance(config.placement, InlinePlacement):
        yield "placement", config.placement.name


def _of_stage(stage: StageConfig) -> Iterator[tuple[str, str]]:
    """Yields keys that are not supported yet, each with a remedy."""
    rollout, algorithm = stage.rollout, stage.algorithm
    if stage.engine.name != "native":
        yield f"engine: {stage.engine.name}", "use engine: native"
    if stage.trainer.precision == "bf16":
        yield "trainer.precision: bf16", "use fp32"
    if stage.trainer.ranks > 1:
        yield "trainer.ranks", "use one rank"
    if stage.residency is not None:
        yield "residency", "remove it"
    if stage.max_staleness > 0:
        yield "max_staleness", "roll out synchronously (max_staleness: 0)"
    if rollout.reuse is not None or rollout.ngram_draft is not None:
        yield "rollout.reuse (or ngram_draft)", "remove it: drafts are verified without pictures"
    if rollout.token_budget is not None or rollout.oversample > 0:
        yield "rollout.token_budget (or oversample)", "remove it: pictures do not travel with parts of completions"
    if stage.buffer.replay is not None:
        yield "buffer.replay", "remove it"
    if any(workflow.name != "single_turn" for workflow in stage.workflows) or stage.rows_name_workflows:
        yield "workflow", "use single_turn: pictures belong to the first turn"
    if stage.all_models:
        yield "models", "remove them"
    if stage.experts.others or any(operator.creates_experiences for operator in stage.pipeline):
        yield "experts.sources (or an operator that creates experiences)", "their pictures are not stored; remove it"
    preferences = algorithm.uses_pairs or algorithm.uses_labels or not algorithm.trains_policy
    distils = isinstance(algorithm, DistillationOptions | SelfDistill)
    if preferences or distils or (isinstance(algorithm, PolicyGradientOptions) and algorithm.advantage.uses_critic):
        yield f"algorithm: {algorithm.name}", "use sft, or a policy-gradient algorithm without critic"
