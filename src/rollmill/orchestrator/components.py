"""Builds the components of a stage from its configuration: rewards, trainer, rollouts, evaluator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from rollmill.buffer import ExperienceStore
from rollmill.buffer.offline_data import RatingOverrides
from rollmill.config.rewards import Reward
from rollmill.config.run import StageConfig
from rollmill.data import Sampler, build_sampler
from rollmill.models.load import PolicyModel, load_teacher
from rollmill.models.run_tokenizer import compute_fingerprint
from rollmill.orchestrator.batches import RolloutBatches, RolloutComponents
from rollmill.orchestrator.context import RunContext
from rollmill.orchestrator.evaluation import Evaluator
from rollmill.orchestrator.live_requests import LiveRequestBatches, NoTasksSampler
from rollmill.orchestrator.scheduler import InterruptibleEngine, RolloutScheduler
from rollmill.pipelines import Pipeline
from rollmill.pipelines.pipeline import PipelineResources, build_domain_pipelines, build_pipeline
from rollmill.rewards import RewardManager, build_reward_manager
from rollmill.rewards.stage_rewards import StageRewards
from rollmill.rollout.base import ExplorerProtocol
from rollmill.trackers.trace import Trace
from rollmill.trainer import DistributedTrainer, RewardTrainer, Trainer
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.trainer.distributed.ray_ranks import RayRankLauncher
from rollmill.trainer.distributed.spec import DomainSpec, TrainerSpec
from rollmill.trainer.parity import require_parity
from rollmill.types import Task

if TYPE_CHECKING:
    from rollmill.orchestrator.stages import Stage
    from rollmill.orchestrator.task_selection import StageTasks


def build_stage_rewards(config: StageConfig, policy: PolicyModel) -> StageRewards:
    """Build the rewards of a stage."""
    return StageRewards.build(config, partial(build_rewards, policy=policy))


def build_rewards(config: StageConfig, policy: PolicyModel) -> RewardManager:
    """Build the reward manager of a stage without domains, or of one domain."""
    return build_reward_manager(
        config.rewards, config.reward_settings, tokenizer=policy.tokenizer, device=str(policy.device)
    )


def build_stage_pipeline(config: StageConfig, policy: PolicyModel, seed: int) -> Pipeline:
    """Build the pipeline of a stage, or of its domains. Raises like `build_pipeline`."""

    def build(view: StageConfig) -> Pipeline:
        def own_rewards(rewards: Sequence[Reward]) -> RewardManager:
            return build_rewards(view.model_copy(update={"rewards": list(rewards)}), policy)

        needed = [section for section in view.pipeline if section.taken & config.algorithm.sources]
        return build_pipeline(needed, PipelineResources(own_rewards, seed))

    return build_domain_pipelines({name: partial(build, view) for name, view in config.by_domain().items()})


def build_trainer(
    config: StageConfig,
    policy: PolicyModel,
    rewards: StageRewards | None,
    context: RunContext,
    *,
    seed: int,
    kept_versions: int,
) -> Trainer | RewardTrainer | DistributedTrainer:
    """Build the trainer of the policy, or of a reward model initialized from the policy."""
    algorithm = config.algorithm
    weights = {} if rewards is None else {name: dict(each.weights) for name, each in rewards.by_domain.items()}
    plan = TrainerSpec(
        algorithm,
        config.trainer,
        context.precision,
        total_steps=config.steps,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=seed,
        reward_weights=None if rewards is None else weights.get("", {}),
        plugins=tuple(context.plugins),
        kept_versions=kept_versions,
        domains={
            name: DomainSpec(view.algorithm, view.rollout.max_new_tokens, weights.get(name))
            for name, view in config.by_domain().items()
            if name and algorithm.uses_rollouts
        },
    )
    teacher = None
    if algorithm.teacher_folder is not None:
        teacher = load_teacher(algorithm.teacher_folder, policy)
        require_parity(teacher, algorithm.teacher_folder)
    if config.trainer.ranks > 1:
        launcher = RayRankLauncher(context.ranks) if context.ranks else None
        return DistributedTrainer(plan, policy.model, teacher, policy.device, context.run_dir, launcher)
    return plan.trainer(policy.model, teacher, policy.device, RankGroup.current())


def build_rollouts(stage: Stage) -> tuple[RolloutBatches | None, Evaluator | None]:
    """Build the source of a stage's batches, if its algorithm rolls out, and its evaluator, if it has one."""
    config, policy, batches, evaluator, sampler = stage.config, stage.policy, None, None, None
    if config.algorithm.uses_rollouts:
        explorer = stage.backend.explorer(trace=stage.trace, drafts=stage.drafts)
        components = build_rollout_components(stage, explorer, stage.backend.generating)
        sampler = components.sampler if config.domains else None
        ratings = RatingOverrides(stage.context.buffers.of_run(stage.store))
        kind = RolloutBatches if config.workflow.uses_tasks else LiveRequestBatches
        first, shared = stage.first_version, stage.context.buffers.shared
        batches = kind(config, components, ratings, first_version=first, seed=stage.seed, shared=shared)
    if config.evaluation is not None:
        assert stage.rewards is not None
        evaluator = Evaluator(
            config,
            stage.tasks.held_out,
            rewards=stage.rewards,
            build_explorer=stage.backend.explorer,
            build_rewards=partial(build_rewards, policy=policy),
            seed=stage.context.seed,
            sampler=sampler,
        )
    return batches, evaluator


class RolloutStage(Protocol):
    """The part of a stage that rollouts use: a trainer's stage, or one that explores alone."""

    @property
    def config(self) -> StageConfig: ...
    @property
    def policy(self) -> PolicyModel: ...
    @property
    def tasks(self) -> StageTasks: ...
    @property
    def seed(self) -> int: ...
    @property
    def first_version(self) -> int: ...
    @property
    def store(self) -> ExperienceStore: ...
    @property
    def pipeline(self) -> Pipeline: ...
    @property
    def trace(self) -> Trace: ...


def build_rollout_components(
    stage: RolloutStage, explorer: ExplorerProtocol, engine: InterruptibleEngine
) -> RolloutComponents:
    """Build the components that groups pass through."""
    config, policy, tasks, seed = stage.config, stage.policy, stage.tasks.training, stage.seed
    by_id: dict[str, Task] = {task.id: task for task in tasks.tasks}
    batch = config.rollout.batch
    sampler: Sampler = NoTasksSampler()
    if config.workflow.uses_tasks:
        section, domains, mixing = config.required_taskset.sampler, config.domains, config.mixing
        sampler = build_sampler(tasks, section, seed, batch=batch, domains=domains, mixing=mixing)
    rollouts = RolloutScheduler(
        config,
        sampler=sampler,
        explorer=explorer,
        engine=engine,
        store=stage.store,
        task=by_id.__getitem__,
        first_version=stage.first_version,
        seed=seed,
    )

    return RolloutComponents(
        sampler,
        rollouts,
        stage.pipeline,
        stage.store,
        stage.trace,
        policy.tokenizer,
        compute_fingerprint(policy.tokenizer),
        policy.end_id,
        by_id.__getitem__,
    )
