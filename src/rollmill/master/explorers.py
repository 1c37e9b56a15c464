"""Explorers of a stage: the engine and the judge, with the stage's workflow and its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmill.config.run import StageConfig
from rollmill.core.types import Task
from rollmill.engines.base import RolloutEngine
from rollmill.explorer import Explorer
from rollmill.explorer.attempts import Attempts
from rollmill.explorer.build import Resources, build_workflow
from rollmill.explorer.chat import ChatFormat
from rollmill.explorer.drafts import DraftShelf
from rollmill.explorer.other_models import OtherModels
from rollmill.explorer.runner import WorkflowRunner
from rollmill.explorer.serving.endpoint import Endpoint
from rollmill.models.load import Policy
from rollmill.monitor.trace import Trace
from rollmill.rewards import Judge


class Explorers:
    """Makes the explorers of one stage, which share what workflows need; `close` ends it.

    Args:
        precision: bf16 or fp32, what other models than the policy compute in.
        tasks: what worked examples are chosen from.
        models: other models that somebody else closes; None: those of the stage are made.
    """

    def __init__(
        self,
        config: StageConfig,
        policy: Policy,
        engine: RolloutEngine,
        judge: Judge,
        *,
        precision: str = "fp32",
        tasks: Sequence[Task] = (),
        models: OtherModels | None = None,
    ) -> None:
        self._config, self._policy, self._engine, self._judge = config, policy, engine, judge
        self._tasks, self._owns_models = tasks, models is None
        chat = ChatFormat(policy.tokenizer, policy.eos_ids)
        asked = config.models if config.algorithm.uses_rollouts or config.evaluation is not None else {}
        self._models = OtherModels(asked, policy, config.rollout, precision) if models is None else models
        self._resources = Resources(
            judge,
            config.environment,
            Endpoint(engine, chat, policy.context, config.rollout.deadline_s),
            tools=config.tools,
            models=self._models.sources,
            examples=[task for task in tasks if task.response is not None],
        )

    def otherwise(self, config: StageConfig, judge: Judge) -> Explorers:
        """Others for the same policy, with the same worked examples and the same other models: frozen ones stay what
        they were at the start of the stage, on resume as well."""
        return Explorers(config, self._policy, self._engine, judge, tasks=self._tasks, models=self._models)

    def training(self, trace: Trace | None = None, drafts: DraftShelf | None = None) -> Explorer:
        """One that rolls out as the stage's `workflow` says."""
        workflow = build_workflow(self._config.workflow, self._resources)
        runner = None
        if workflow is not None:
            chat = ChatFormat(self._policy.tokenizer, self._policy.eos_ids)
            needs_reward = self._config.algorithm.needs_rewards
            attempts = Attempts(workflow, self._config.rollout, needs_reward=needs_reward)
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
