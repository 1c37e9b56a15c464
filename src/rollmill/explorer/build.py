"""From the run file to a workflow with its parts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from rollmill.config import workflows as config
from rollmill.config.environments import EnvironmentSection
from rollmill.config.tools import ToolSection
from rollmill.core.errors import ConfigError
from rollmill.core.types import Task
from rollmill.explorer.environments.build import EnvironmentPool
from rollmill.explorer.tools.build import ToolPool
from rollmill.explorer.user import ENVIRONMENT, EXAMPLES, JUDGE, TOOLS
from rollmill.explorer.workflow import Rollout, RolloutJudge, Solve, Source, Workflow
from rollmill.rewards import Judge


class Resources:
    """What workflows of a stage share, and where it is closed again.

    Args:
        judge: of the stage's rewards.
        environment: the section, if there is one.
        tools: the section; a workflow gets them where there are some.
        models: sources of the models besides the policy, by name.
        examples: tasks with worked solutions.
    """

    def __init__(
        self,
        judge: Judge,
        environment: EnvironmentSection | None = None,
        *,
        tools: Sequence[ToolSection] = (),
        models: Mapping[str, Source] | None = None,
        examples: Sequence[Task] = (),
    ) -> None:
        self._environments = None if environment is None else EnvironmentPool(environment)
        self._tools = ToolPool(tools) if tools else None
        self._told: dict[str, float] = {}
        self.sources: dict[str, Source] = {JUDGE: partial(_judge, judge), EXAMPLES: partial(_examples, examples)}
        if self._environments is not None:
            self.sources[ENVIRONMENT] = self._environments.one
        if self._tools is not None:
            self.sources[TOOLS] = self._tools.one
        self.sources |= models or {}

    def metrics(self) -> dict[str, float]:
        """What has happened since the last call: tools/NAME/calls and others."""
        if self._tools is None:
            return {}
        before, self._told = self._told, self._tools.counters()
        return {f"tools/{key}": value - before.get(key, 0.0) for key, value in self._told.items()}

    async def close(self) -> None:
        """End processes; may be called twice."""
        if self._environments is not None:
            await self._environments.close()
        if self._tools is not None:
            self._tools.close()


def build_workflow(section: config.WorkflowSection, resources: Resources) -> Workflow | None:
    """The workflow of a section; None where a rollout is one completion.

    Raises ConfigError where it asks for a part that the run does not have.
    """
    if section.single_turn:
        return None
    solve, names = _solve(section)
    if "*" in names:
        names = [name for name in resources.sources if name not in names] + [name for name in names if name != "*"]
    missing = [name for name in names if name not in resources.sources]
    if missing:
        known = ", ".join(f"`{name}`" for name in resources.sources)
        raise ConfigError(
            f"workflow `{section.name}` asks for `{missing[0]}`, which the run does not have; there are {known}. "
            "Add the section of that name, or an entry of `models`"
        )
    return Workflow(section.name, solve, {name: resources.sources[name] for name in names})


def _solve(section: config.WorkflowSection) -> tuple[Solve, Sequence[str]]:
    """What a section's workflow calls, and the parts that it takes. Imported here: a run pays for what it uses."""
    function = type(section).function
    if function is not None:
        return partial(function, **section.arguments()), section.parts
    match section:
        case config.EnvironmentTurns():
            from rollmill.explorer.workflows.environment import environment_turns

            return partial(environment_turns, section), [ENVIRONMENT]
        case config.ToolTurns():
            from rollmill.explorer.workflows.tools import tool_turns

            return partial(tool_turns, section), [JUDGE, TOOLS]
        case config.React():
            from rollmill.explorer.workflows.react import react

            return partial(react, section), [JUDGE, TOOLS]
        case config.FewShot():
            from rollmill.explorer.workflows.few_shot import few_shot

            return partial(few_shot, section), [JUDGE, EXAMPLES]
        case config.Reflection():
            from rollmill.explorer.workflows.reflection import reflection

            return partial(reflection, section), [JUDGE]
        case config.Vote():
            from rollmill.explorer.workflows.vote import vote

            return partial(vote, section), [JUDGE]
        case config.Judged():
            from rollmill.explorer.workflows.judged import judged

            return partial(judged, section), [section.by]
    raise AssertionError(f"no workflow is built from {type(section).__name__}")


@asynccontextmanager
async def _judge(judge: Judge, rollout: Rollout) -> AsyncIterator[RolloutJudge]:
    yield RolloutJudge(judge, rollout)


@asynccontextmanager
async def _examples(tasks: Sequence[Task], rollout: Rollout) -> AsyncIterator[list[Task]]:
    """Worked examples: other tasks than the rollout's, with other prompts."""
    own = rollout.task
    yield [each for each in tasks if each.id != own.id and each.prompt != own.prompt]
