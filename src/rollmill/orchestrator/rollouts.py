"""Rollouts of a stage: the protocol of what makes them, and those made in this process.

Explorers in other processes have the same interface (`remote/rollouts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollmill.config.checks.engine import uses_engine
from rollmill.config.run import StageConfig
from rollmill.engines.base import RolloutEngine
from rollmill.errors import DeadlineError
from rollmill.models.load import PolicyModel
from rollmill.orchestrator.engine import WeightOwner, build_engine, build_publisher, uses_policy
from rollmill.orchestrator.metrics import sum_metrics
from rollmill.orchestrator.scheduler import InterruptibleEngine
from rollmill.plugins import call_hook
from rollmill.rewards import RewardManager
from rollmill.rewards.stage_rewards import StageRewards
from rollmill.rollout import Explorer
from rollmill.rollout.auxiliary_models import AuxiliaryModels
from rollmill.rollout.base import ExplorerProtocol
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.draft_cache import DraftCache
from rollmill.rollout.resources import WorkflowResources, build_workflow
from rollmill.rollout.runner import RetryingWorkflow, WorkflowRunner
from rollmill.trackers.trace import Trace
from rollmill.types import Task
from rollmill.weights import WeightPublisher


class RolloutBackend(Protocol):
    """The components that roll out and score, in this process or in others."""

    engine: RolloutEngine
    """The engine of this process; it generates nothing if other processes roll out."""
    location: str
    """Description of where rollouts are made; empty for this process."""
    trains_in_thread: bool
    """The event loop has to go on while the trainer works, since others send requests."""

    @property
    def uses_policy(self) -> bool:
        """True if something here computes with the weights of the policy's model, or makes its own from them."""
        ...

    @property
    def generating(self) -> InterruptibleEngine:
        """All engines together: counts their tokens, and interrupts them."""
        ...

    @property
    def display_name(self) -> str:
        """Names what makes completions, as `rollmill status` names them."""
        ...

    def explorer(
        self,
        config: StageConfig | None = None,
        rewards: StageRewards | None = None,
        *,
        trace: Trace | None = None,
        drafts: DraftCache | None = None,
    ) -> ExplorerProtocol:
        """Build an explorer of the stage; all share its engine and the resources of its workflows.

        Args:
            config, rewards: those of held-out tasks with another workflow, environment or rewards.
        """
        ...

    def metrics(self) -> dict[str, float]:
        """Return counts and times of environments and tools since the last call."""
        ...

    async def close(self) -> None:
        """Stop what is running and free what was allocated."""

    async def offload(self) -> None:
        """Free what rollouts need, as far as it is in other processes; the next rollout brings it back.

        Raises:
            DeadlineError: an explorer takes too long.
            OffloadError: an explorer has no room for it elsewhere.
        """

    def device_bytes(self) -> dict[str, int]:
        """Return the bytes of components on devices of explorers in other processes, as far as they are known."""
        ...

    def publish(self, version: int) -> None:
        """Bring the trainer's weights, which are now those of `version`, to the engines."""

    def finish_step(self, step: int) -> None:
        """Take the copies of the policy that workflows talk to, as far as they are due after a step of the stage."""

    def explain(self, error: DeadlineError) -> DeadlineError:
        """Add to an error of the stage what is known of the processes that it waited for."""
        ...

    def reward_counters(self) -> dict[str, float]:
        """Return the rewards' own counters so far."""
        ...

    def state_dict(self) -> dict[str, Any] | None:
        """Return the frozen weights of workflows, which a checkpoint keeps."""
        ...

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue where `state_dict` was taken."""


@dataclass(frozen=True)
class _DomainWorkflows:
    """A stage as one of its domains sees it, with the resources of its workflows."""

    config: StageConfig
    rewards: RewardManager
    resources: WorkflowResources


class LocalRollouts:
    """Rollouts in this process, by an engine with the trainer's parameters or with those that vLLM is sent.

    Args:
        rewards: None: nothing is rolled out.
        precision: bf16 or fp32, the compute type of the engine and of models other than the policy.
        tasks: candidates for worked examples.
        engine, publisher: by default those that the stage names.
        trainer: where its ranks hold parts of the weights, they are gathered for the engine.
        trained_on: whether completions are trained on.
    """

    location, display_name = "", "the engine"

    def __init__(
        self,
        config: StageConfig,
        policy: PolicyModel,
        rewards: StageRewards | None,
        *,
        precision: str = "fp32",
        tasks: Sequence[Task] = (),
        engine: RolloutEngine | None = None,
        publisher: WeightPublisher | None = None,
        trainer: WeightOwner | None = None,
        trained_on: bool = True,
    ) -> None:
        self._config, self._policy, self._rewards, self._tasks = config, policy, rewards, tasks
        self.engine = engine or build_engine(policy, config, precision, trained_on=trained_on)
        self.generating = self.engine
        self._trainer = trainer if uses_engine(config) else None
        self._publisher = publisher or build_publisher(policy, self.engine, precision, self._trainer)
        self.uses_policy = uses_engine(config) and uses_policy(self.engine)
        self.trains_in_thread = not config.workflow.uses_tasks  # applications send requests
        self._chat = ChatRenderer(policy.tokenizer, policy.eos_ids)
        rolls_out = rewards is not None and (config.algorithm.uses_rollouts or config.evaluation is not None)
        models = config.all_models if rolls_out else {}
        self._models = AuxiliaryModels(models, policy, self.engine, config.rollout, precision)
        self._opened: list[WorkflowResources] = []
        self._parts = {} if rewards is None else self._open(config, rewards)

    def explorer(
        self,
        config: StageConfig | None = None,
        rewards: StageRewards | None = None,
        *,
        trace: Trace | None = None,
        drafts: DraftCache | None = None,
    ) -> Explorer:
        """Build an explorer of the stage, or of held-out tasks with resources of their own for their workflow.

        Worked examples and other models are always the stage's: frozen ones stay as they were at its start, on resume
        as well.
        """
        scorers = rewards or self._rewards
        assert scorers is not None, "a stage that rolls out has rewards"
        parts = self._parts if config is None else self._open(config, scorers)

        def task_runner(task: Task) -> WorkflowRunner | None:
            part = parts.get(task.taskset) or parts[""]
            config = part.config if task.workflow is None else part.config.of_row(task.workflow)
            return self._runner(part, config, trace)

        made = {name: self._runner(part, part.config, trace) for name, part in parts.items()}
        runners = {name: runner for name, runner in made.items() if runner is not None}
        return Explorer(self.engine, scorers, self._policy.tokenizer, trace, runners, drafts, task_runner)

    def _open(self, config: StageConfig, rewards: StageRewards) -> Mapping[str, _DomainWorkflows]:
        """Open the resources of the workflows of each domain; a stage without domains is its own, with the name ""."""
        parts = {}
        for name, view in config.by_domain().items():
            scorers = rewards.by_domain[name]
            examples = [task for task in self._tasks if task.response is not None and name in ("", task.taskset)]
            server = call_hook("policy_server", self.engine, self._chat, self._policy.context, view.rollout.deadline_s)
            models = self._models.sources
            resources = WorkflowResources(
                scorers, view.environment, server, tools=view.tools, models=models, examples=examples
            )
            self._opened.append(resources)
            parts[name] = _DomainWorkflows(view, scorers, resources)
        return parts

    def _runner(self, part: _DomainWorkflows, config: StageConfig, trace: Trace | None) -> WorkflowRunner | None:
        """Build what runs a workflow; None if a rollout is one completion."""
        workflow = build_workflow(config.workflow, part.resources)
        if workflow is None:
            return None
        needs_reward = part.config.algorithm.needs_rewards
        attempts = RetryingWorkflow(workflow, part.config.rollout, needs_reward=needs_reward)
        return WorkflowRunner(attempts, self.engine, self._chat, part.rewards, trace, part.config.roles)

    async def offload(self) -> None:
        """Ends vLLM's process; the native engine's memory is moved by the offload plan."""
        await self.engine.sleep(destroy=True)

    def device_bytes(self) -> dict[str, int]:
        """Empty: there are no explorers in other processes."""
        return {}

    def publish(self, version: int) -> None:
        self._publisher.publish(version)

    def finish_step(self, step: int) -> None:
        if self._trainer is not None and self._models.takes_copies(step):
            self._trainer.gather_policy()
        self._models.finish_step(step)

    def explain(self, error: DeadlineError) -> DeadlineError:
        return error

    def metrics(self) -> dict[str, float]:
        return sum_metrics([each.metrics() for each in self._opened])

    def reward_counters(self) -> dict[str, float]:
        return {} if self._rewards is None else self._rewards.counters()

    def state_dict(self) -> dict[str, Any] | None:
        return self._models.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._models.load_state_dict(state)

    async def close(self) -> None:
        for each in self._opened:
            await each.close()
        await self._models.close()
        await self.engine.close()
        self._publisher.close()
