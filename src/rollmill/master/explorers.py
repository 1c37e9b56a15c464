"""Explorers of a stage: the engine and the judge, with the stage's workflow and its parts."""

from __future__ import annotations

from rollmill.config.run import StageConfig
from rollmill.engines.base import RolloutEngine
from rollmill.explorer import Explorer
from rollmill.explorer.attempts import Attempts
from rollmill.explorer.build import Resources, build_workflow
from rollmill.explorer.chat import ChatFormat
from rollmill.explorer.runner import WorkflowRunner
from rollmill.models.load import Policy
from rollmill.monitor.trace import Trace
from rollmill.rewards import Judge


class Explorers:
    """Makes the explorers of one stage, which share what workflows need; `close` ends it."""

    def __init__(self, config: StageConfig, policy: Policy, engine: RolloutEngine, judge: Judge) -> None:
        self._config, self._policy, self._engine, self._judge = config, policy, engine, judge
        self._resources = Resources(judge, config.environment)

    def training(self, trace: Trace | None = None) -> Explorer:
        """One that rolls out as the stage's `workflow` says."""
        workflow = build_workflow(self._config.workflow, self._resources)
        runner = None
        if workflow is not None:
            chat = ChatFormat(self._policy.tokenizer, self._policy.eos_ids)
            runner = WorkflowRunner(Attempts(workflow, self._config.rollout), self._engine, chat, self._judge, trace)
        return Explorer(self._engine, self._judge, self._policy.tokenizer, trace, runner)

    async def close(self) -> None:
        """End environments; may be called twice."""
        await self._resources.close()
