"""Explorers of a stage: the engine and the judge, with the stage's workflow and its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.config.run import StageConfig
from rollmill.engines.base import RolloutEngine
from rollmill.models.load import PolicyModel
from rollmill.rewards import RewardManager
from rollmill.rollout import Explorer
from rollmill.rollout.auxiliary_models import AuxiliaryModels
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.draft_cache import DraftCache
from rollmill.rollout.endpoint.policy_endpoint import PolicyEndpoint
from rollmill.rollout.resources import WorkflowResources, build_workflow
from rollmill.rollout.runner import RetryingWorkflow, WorkflowRunner
from rollmill.trackers.trace import Trace
from rollmill.types import Task


class StageExplorers:
    """Makes the explorers of one stage, which share what workflows need; `close` ends it.

    Args:
        precision: bf16 or fp32, what other models than the policy compute in.
        tasks: what worked examples are chosen from.
        models: other models that somebody else closes; None: those of the stage are made.
    """

    def __init__(
        self,
        config: StageConfig,
        policy: PolicyModel,
        engine: RolloutEngine,
        judge: RewardManager,
        *,
        precision: str = "fp32",
        tasks: Sequence[Task] = (),
        models: AuxiliaryModels | None = None,
    ) -> None:
        self._config, self._policy, self._engine, self._judge = config, policy, engine, judge
        self._tasks, self._owns_models = tasks, models is None
        chat = ChatRenderer(policy.tokenizer, policy.eos_ids)
        asked = config.models if config.algorithm.uses_rollouts or config.evaluation is not None else {}
        self._models = AuxiliaryModels(asked, policy, config.rollout, precision) if models is None else models
        self._resources = WorkflowResources(
            judge,
            config.environment,
            PolicyEndpoint(engine, chat, policy.context, config.rollout.deadline_s),
            tools=config.tools,
            models=self._models.sources,
            examples=[task for task in tasks if task.response is not None],
        )

    def variant(self, config: StageConfig, judge: RewardManager) -> StageExplorers:
        """Others for the same policy, with the same worked examples and the same other models: frozen ones stay what
        they were at the start of the stage, on resume as well."""
        return StageExplorers(config, self._policy, self._engine, judge, tasks=self._tasks, models=self._models)

    def explorer(self, trace: Trace | None = None, drafts: DraftCache | None = None) -> Explorer:
        """One that rolls out as the stage's `workflow` says."""
        workflow = build_workflow(self._config.workflow, self._resources)
        runner = None
        if workflow is not None:
            chat = ChatRenderer(self._policy.tokenizer, self._policy.eos_ids)
            needs_reward = self._config.algorithm.needs_rewards
            attempts = RetryingWorkflow(workflow, self._config.rollout, needs_reward=needs_reward)
            runner = WorkflowRunner(attempts, self._engine, chat, self._judge, trace)
        return Explorer(self._engine, self._judge, self._policy.tokenizer, trace, runner, drafts)

    def metrics(self) -> dict[str, float]:
        """What has happened in environments and tools since the last call."""
        return self._resources.metrics()

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint keeps: frozen weights, where a workflow has them."""
        return self._models.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue where `state_dict` was taken."""
        self._models.load_state_dict(state)

    async def close(self) -> None:
        """End environments, tools and other models; may be called twice."""
        await self._resources.close()
        if self._owns_models:
            await self._models.close()
