"""Builds a stage's explorers: engine, rewards, workflow, and the workflow's resources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.config.run import StageConfig
from rollmill.engines.base import RolloutEngine
from rollmill.models.load import PolicyModel
from rollmill.orchestrator.metrics import sum_metrics
from rollmill.plugins import call_hook
from rollmill.rewards import RewardManager
from rollmill.rollout import Explorer
from rollmill.rollout.auxiliary_models import AuxiliaryModels
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.draft_cache import DraftCache
from rollmill.rollout.resources import WorkflowResources, build_workflow
from rollmill.rollout.runner import RetryingWorkflow, WorkflowRunner
from rollmill.trackers.trace import Trace
from rollmill.types import Task


class ExplorerFactory:
    """Builds the explorers of one stage, which share the workflow's resources; `close` frees them.

    Args:
        precision: bf16 or fp32, the compute type of models other than the policy.
        tasks: candidates for worked examples.
        models: other models, closed by their owner; None: the stage's are loaded.
    """

    def __init__(
        self,
        config: StageConfig,
        policy: PolicyModel,
        engine: RolloutEngine,
        rewards: RewardManager,
        *,
        precision: str = "fp32",
        tasks: Sequence[Task] = (),
        models: AuxiliaryModels | None = None,
    ) -> None:
        self._config, self._policy, self._engine, self._rewards = config, policy, engine, rewards
        self._tasks, self._owns_models = tasks, models is None
        chat = ChatRenderer(policy.tokenizer, policy.eos_ids)
        models_config = config.all_models if config.algorithm.uses_rollouts or config.evaluation is not None else {}
        self._models = models or AuxiliaryModels(models_config, policy, engine, config.rollout, precision)
        self._resources = WorkflowResources(
            rewards,
            config.environment,
            call_hook("policy_server", engine, chat, policy.context, config.rollout.deadline_s),
            tools=config.tools,
            models=self._models.sources,
            examples=[task for task in tasks if task.response is not None],
        )
        self._domains: dict[str, ExplorerFactory] = {}
        for name, view in config.by_domain().items() if rewards.domains else ():
            own, scorers = [task for task in tasks if task.taskset == name], rewards.domains[name]
            self._domains[name] = ExplorerFactory(
                view, policy, engine, scorers, precision=precision, tasks=own, models=self._models
            )

    def variant(self, config: StageConfig, rewards: RewardManager) -> ExplorerFactory:
        """Explorers of another stage configuration for the same policy, worked examples and other models: frozen models
        stay as they were at the start of the stage, on resume as well."""
        return ExplorerFactory(config, self._policy, self._engine, rewards, tasks=self._tasks, models=self._models)

    def explorer(self, trace: Trace | None = None, drafts: DraftCache | None = None) -> Explorer:
        """Build an explorer with the workflow of the stage, or those of its domains."""
        made = {name: each._runner(trace, each._config) for name, each in (self._domains or {"": self}).items()}
        runners = {name: runner for name, runner in made.items() if runner is not None}

        def task_runner(task: Task) -> WorkflowRunner | None:
            of = self._domains.get(task.taskset, self)
            return of._runner(trace, of._config if task.workflow is None else of._config.of_row(task.workflow))

        return Explorer(self._engine, self._rewards, self._policy.tokenizer, trace, runners, drafts, task_runner)

    def _runner(self, trace: Trace | None, config: StageConfig) -> WorkflowRunner | None:
        workflow = build_workflow(config.workflow, self._resources)
        if workflow is None:
            return None
        chat = ChatRenderer(self._policy.tokenizer, self._policy.eos_ids)
        needs_reward = self._config.algorithm.needs_rewards
        attempts = RetryingWorkflow(workflow, self._config.rollout, needs_reward=needs_reward)
        return WorkflowRunner(attempts, self._engine, chat, self._rewards, trace, self._config.roles)

    def metrics(self) -> dict[str, float]:
        """Metrics of environments and tools since the last call."""
        return sum_metrics([self._resources.metrics(), *(each.metrics() for each in self._domains.values())])

    def finish_step(self, step: int) -> None:
        """Take the copies of the policy that are due after a training step of the stage (`policy: past`)."""
        self._models.finish_step(step)

    def state_dict(self) -> dict[str, Any] | None:
        """State for a checkpoint: frozen weights and past copies of the policy, if a workflow has them."""
        return self._models.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore a state from `state_dict`."""
        self._models.load_state_dict(state)

    async def close(self) -> None:
        """Close environments, tools and other models; may be called twice."""
        for domain in self._domains.values():
            await domain.close()
        await self._resources.close()
        if self._owns_models:
            await self._models.close()
