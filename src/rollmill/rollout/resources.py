"""Builds a workflow from the run file, with the resources that workflows take as arguments."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol, TypeVar

from rollmill.config.environments import EnvironmentSection
from rollmill.config.tools import ToolSection
from rollmill.config.workflows import WorkflowSection
from rollmill.errors import ConfigError
from rollmill.registry import CONTAINER, ENDPOINT, ENVIRONMENT, EXAMPLES, JUDGE, TOOLS, build_component
from rollmill.rewards import RewardManager
from rollmill.rollout.containers import Container
from rollmill.rollout.containers.pool import ContainerPool
from rollmill.rollout.environments.builtin.container import ContainerEnvironment
from rollmill.rollout.environments.pool import EnvironmentPool
from rollmill.rollout.tools.pool import ToolPool
from rollmill.rollout.workflow import PolicyServer, ResourceFactory, Rollout, RolloutScorer, Workflow
from rollmill.types import Task


class AsyncClosable(Protocol):
    """An object with processes or connections to close."""

    async def close(self) -> None: ...


ClosableT = TypeVar("ClosableT", bound=AsyncClosable)
_EXAMPLES_KEPT = 8
"""Number of tasks whose worked examples are cached, for groups that start together."""


class WorkflowResources:
    """Resources shared by the workflows of a stage, and their clean-up.

    Args:
        rewards: the stage's rewards.
        environment: the section, if there is one.
        endpoint: serves the policy to programs; starts when needed.
        tools: the section; workflows get the argument `tools` if it is not empty.
        models: sources of the models besides the policy, by name.
        examples: tasks with worked solutions.
    """

    def __init__(
        self,
        rewards: RewardManager,
        environment: EnvironmentSection | None = None,
        endpoint: PolicyServer | None = None,
        *,
        tools: Sequence[ToolSection] = (),
        models: Mapping[str, ResourceFactory] | None = None,
        examples: Sequence[Task] = (),
    ) -> None:
        self.groupwise = rewards.groupwise  #: whether some reward compares a group's completions
        self._environments: EnvironmentPool | ContainerPool | None = None
        self.container: ResourceFactory | None = None  #: starts the container of a rollout
        if isinstance(environment, ContainerEnvironment):
            self._environments = ContainerPool(environment)
            self.container = self._environments.one
        elif environment is not None:
            self._environments = EnvironmentPool(environment)
        self._tools = ToolPool(tools) if tools else None
        self._reported: dict[str, float] = {}
        self._shared: list[tuple[WorkflowSection, AsyncClosable]] = []
        self.endpoint = endpoint
        self.sources: dict[str, ResourceFactory] = {
            JUDGE: partial(_open_scorer, rewards),
            EXAMPLES: _Examples(examples).one,
        }
        if endpoint is not None:
            self.sources[ENDPOINT] = endpoint.one
        if self.container is not None:
            self.sources[CONTAINER] = _container_of
        elif self._environments is not None:
            self.sources[ENVIRONMENT] = self._environments.one
        if self._tools is not None:
            self.sources[TOOLS] = self._tools.one
        self.sources |= models or {}

    def metrics(self) -> dict[str, float]:
        """Metrics of environments and tools since the last call."""
        found = {} if self._environments is None else self._environments.metrics()
        if self._tools is not None:
            before, self._reported = self._reported, self._tools.counters()
            found |= {f"tools/{key}": value - before.get(key, 0.0) for key, value in self._reported.items()}
        return found

    def kept(self, section: WorkflowSection, make: Callable[[], ClosableT]) -> ClosableT:
        """The resource shared by workflows of equal sections; made at the first call, closed with the resources."""
        for known, made in self._shared:
            if known == section:
                return made  # type: ignore[return-value]
        self._shared.append((section, made := make()))
        return made

    async def close(self) -> None:
        """Close processes, the endpoint and tools; may be called twice."""
        for _, made in self._shared:
            await made.close()
        if self.endpoint is not None:
            await self.endpoint.close()
        if self._environments is not None:
            await self._environments.close()
        if self._tools is not None:
            self._tools.close()


def build_workflow(section: WorkflowSection, resources: WorkflowResources) -> Workflow | None:
    """Build the workflow of a section; None if a rollout is one completion.

    Raises ConfigError if it needs an argument that the run does not have, or rewards before there are any.
    """
    if section.single_turn:
        return None
    if resources.groupwise and section.early_rewards is not None:
        raise ConfigError(
            f"workflow.{section.early_rewards}: a reward is wanted before the rollout ends, and some of `rewards` "
            "compare the completions of a group; change that key, or remove those rewards"
        )
    component = build_component(section, resources)  # a user's function, or a copy of the section
    if type(section).function is not None:
        solve, names = component, list(section.parts)
    else:
        solve = component.solve
        parameters = list(inspect.signature(solve).parameters.values())[2:]
        plain = [each for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
        names = [each.name for each in plain if each.default is each.empty or each.name in resources.sources]
        names += section.models.values()
    if "*" in names:
        others = [name for name in resources.sources if name not in names and name != ENDPOINT]
        names = others + [name for name in names if name != "*"]
    missing = [name for name in names if name not in resources.sources]
    if missing:
        known = ", ".join(f"`{name}`" for name in resources.sources)
        raise ConfigError(
            f"workflow `{section.name}` asks for `{missing[0]}`, which the run does not have; there are {known}. "
            "Add the section of that name, or an entry of `models`"
        )
    sources = {name: resources.sources[name] for name in names}
    if section.forces_sampling and resources.endpoint is not None:
        sources[ENDPOINT] = partial(resources.endpoint.one, forced=True)
    return Workflow(section.name, solve, sources, resources.container)


@asynccontextmanager
async def _container_of(rollout: Rollout) -> AsyncIterator[Container]:
    assert rollout.container is not None, "the workflow starts it first"
    yield rollout.container


@asynccontextmanager
async def _open_scorer(rewards: RewardManager, rollout: Rollout) -> AsyncIterator[RolloutScorer]:
    yield RolloutScorer(rewards, rollout)


class _Examples:
    """Worked examples: tasks other than the rollout's, with other prompts; rollouts of a task share the list."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._known: dict[str, list[Task]] = {}

    @asynccontextmanager
    async def one(self, rollout: Rollout) -> AsyncIterator[list[Task]]:
        task = rollout.task
        found = self._known.pop(task.id, None)
        if found is None:
            found = [each for each in self._tasks if each.id != task.id and each.prompt != task.prompt]
        self._known[task.id] = found
        if len(self._known) > _EXAMPLES_KEPT:
            self._known.pop(next(iter(self._known)))
        yield list(found)
