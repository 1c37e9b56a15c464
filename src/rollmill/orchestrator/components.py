"""Builds the components of a stage from its configuration: rewards, trainer, rollouts, evaluator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from rollmill.buffer.experts import RatingOverrides
from rollmill.config.algorithms.distillation import Distill
from rollmill.config.rewards import RewardConfig
from rollmill.config.run import StageConfig
from rollmill.data import Sampler, build_sampler
from rollmill.models.load import PolicyModel, load_teacher
from rollmill.models.run_tokenizer import compute_fingerprint
from rollmill.orchestrator.batches import BatchSource, RolloutBatches, RolloutComponents
from rollmill.orchestrator.context import RunContext
from rollmill.orchestrator.evaluation import Evaluator
from rollmill.orchestrator.scheduler import RolloutScheduler, TokenCounter
from rollmill.orchestrator.traffic import NoTasksSampler, TrafficBatches
from rollmill.pipelines.pipeline import PipelineResources, build_pipeline
from rollmill.rewards import RewardManager, build_reward_manager
from rollmill.rollout.base import ExplorerProtocol
from rollmill.trainer import DistributedTrainer, RewardTrainer, Trainer
from rollmill.trainer.distributed.ranks import RankGroup
from rollmill.trainer.distributed.ray_ranks import RayRankLauncher
from rollmill.trainer.distributed.spec import TrainerSpec
from rollmill.trainer.verification import verify_checkpoint
from rollmill.types import Task

if TYPE_CHECKING:
    from rollmill.orchestrator.explorer_factory import ExplorerFactory
    from rollmill.orchestrator.stages import Stage
    from rollmill.remote.rollout_backend import RemoteRollouts


def build_stage_rewards(config: StageConfig, policy: PolicyModel, rewards: Sequence[RewardConfig]) -> RewardManager:
    """Build a reward manager of these rewards, with the stage's limits."""
    return build_reward_manager(rewards, config.judging, tokenizer=policy.tokenizer, device=str(policy.device))


def build_trainer(
    config: StageConfig,
    policy: PolicyModel,
    rewards: RewardManager | None,
    context: RunContext,
    *,
    seed: int,
    kept_versions: int,
) -> Trainer | RewardTrainer | DistributedTrainer:
    """Build the trainer of the policy, or of a reward model initialized from the policy."""
    algorithm = config.algorithm
    plan = TrainerSpec(
        algorithm,
        config.trainer,
        context.precision,
        total_steps=config.steps,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=seed,
        reward_weights=None if rewards is None else dict(rewards.weights),
        plugins=tuple(context.plugins),
        kept_versions=kept_versions,
    )
    teacher = None
    if isinstance(algorithm, Distill) and algorithm.teacher is not None:
        teacher = load_teacher(algorithm.teacher, policy)
        verify_checkpoint(teacher, algorithm.teacher)
    if config.trainer.ranks > 1:
        crew = RayRankLauncher(context.ranks) if context.ranks else None
        return DistributedTrainer(plan, policy.model, teacher, policy.device, context.run_dir, crew)
    return plan.trainer(policy.model, teacher, policy.device, RankGroup.current())


def build_rollouts(
    stage: Stage, explorers: ExplorerFactory | RemoteRollouts, counter: TokenCounter
) -> tuple[BatchSource | None, Evaluator | None]:
    """Build the source of a stage's batches, if its algorithm rolls out, and its evaluator, if it has one.

    Args:
        counter: counts the generated tokens.
    """
    config, policy, batches, evaluator = stage.config, stage.policy, None, None
    assert stage.rewards is not None
    if config.algorithm.uses_rollouts:
        components = build_rollout_components(stage, explorers.explorer(stage.trace, stage.drafts), counter)
        ratings = RatingOverrides(stage.context.buffers.of_run(stage.store))
        kind = RolloutBatches if config.workflow.uses_tasks else TrafficBatches
        first, shared = stage.first_version, stage.context.buffers.shared
        batches = kind(config, components, ratings, first_version=first, seed=stage.seed, shared=shared)
    if config.evaluation is not None:
        evaluator = Evaluator(
            config,
            stage.tasks.held_out,
            rewards=stage.rewards,
            explorers=explorers,
            build_rewards=partial(build_stage_rewards, config, policy),
            seed=stage.context.seed,
        )
    return batches, evaluator


def build_rollout_components(stage: Stage, explorer: ExplorerProtocol, engine: TokenCounter) -> RolloutComponents:
    """Build the components that groups pass through."""
    config, policy, tasks, seed = stage.config, stage.policy, stage.tasks.training, stage.seed
    advantage = getattr(config.algorithm, "advantage", None)
    by_id: dict[str, Task] = {task.id: task for task in tasks.tasks}
    batch = config.rollout.batch
    sampler: Sampler = NoTasksSampler()
    if config.workflow.uses_tasks:
        sampler = build_sampler(tasks, config.required_taskset.order, seed, batch=batch)
    rollouts = RolloutScheduler(
        config,
        sampler=sampler,
        explorer=explorer,
        engine=engine,
        store=stage.store,
        task=by_id.__getitem__,
        first_version=stage.first_version,
        seed=seed,
        uses_greedy=advantage is not None and advantage.uses_greedy,
    )

    def build_rewards(rewards: Sequence[RewardConfig]) -> RewardManager:
        return build_stage_rewards(config, policy, rewards)

    return RolloutComponents(
        sampler,
        rollouts,
        build_pipeline(config.pipeline, PipelineResources(build_rewards, seed)),
        stage.store,
        stage.trace,
        policy.tokenizer,
        compute_fingerprint(policy.tokenizer),
        policy.end_id,
        by_id.__getitem__,
    )
