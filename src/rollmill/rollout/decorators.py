"""The decorators that make a user's function a workflow or a tool of run files, and a user's class an environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from rollmill.config.environments.base import EnvironmentSection
from rollmill.config.parts import register_section, section_from_signature, source_location
from rollmill.config.tools import ToolSection
from rollmill.config.workflows.base import WorkflowSection
from rollmill.errors import ConfigError

Target = TypeVar("Target", bound=Callable[..., Any])
JUDGE, ENVIRONMENT, TOOLS, EXAMPLES, ENDPOINT = "judge", "environment", "tools", "examples", "endpoint"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def workflow(target: Target) -> Target:
    """Register a workflow under its name: `workflow: NAME`, or `workflow: {name: NAME, ...}` with options.

    It is an `async def solve(task, policy)`. Further parameters are parts of the run that it is given by name: `judge`
    (what `rewards` say of a reply), `environment` (a fresh one), `tools` (those of the section), `examples`
    (other tasks of the taskset that have a worked solution), `endpoint` (the policy as an OpenAI-compatible server:
    `base_url`, `api_key`), and every name under `models`. Keyword-only parameters
    with a type and a default are keys of the run file. It returns the reward: a number, a mapping of parts (their sum
    counts), what `judge` gave, or None to reject the rollout.

    Raises ConfigError naming file and line: it is no async function, does not take task and policy, or an option lacks
    a type or a default.
    """
    where = f"{source_location(target)}: {target.__name__}"
    if not inspect.iscoroutinefunction(target):
        raise ConfigError(f"{where}: a workflow is `async def {target.__name__}(task, policy)`; write `async def`")
    parameters = inspect.signature(target).parameters.values()
    names = [each.name for each in parameters if each.kind in _POSITIONAL]
    if names[:2] != ["task", "policy"]:
        raise ConfigError(f"{where}: a workflow takes task and policy first; found ({', '.join(names)})")
    section: Any = section_from_signature(target, WorkflowSection)
    everything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    section.parts = (*names[2:], "*") if everything else tuple(names[2:])
    section.uses_rewards = JUDGE in names
    section.uses_environment = ENVIRONMENT in names
    section.uses_tools = TOOLS in names or everything
    section.multi_step = True
    register_section("workflow", target.__name__, section)
    return target


def environment(target: Target) -> Target:
    """Register an environment under its name: `environment: NAME`, or `environment: {name: NAME, ...}` with options.

    It is a class with `reset(self, task, seed)`, which gives what the policy sees first, `step(self, action)`, which
    gives a `rollmill.rollout.environments.StepResult`, and, where it holds something, `close(self)`; each plain or
    async. Keyword-only parameters of `__init__` with a type and a default are keys of the run file. One is made per
    rollout.

    Raises ConfigError naming file and line: it is no such class, or an option lacks a type or a default.
    """
    where = f"{source_location(target)}: {target.__name__}"
    if not inspect.isclass(target):
        raise ConfigError(f"{where}: an environment is a class with reset(self, task, seed) and step(self, action)")
    for name, count in (("reset", 3), ("step", 2)):
        method = inspect.getattr_static(target, name, None)
        taken = [] if not inspect.isfunction(method) else list(inspect.signature(method).parameters.values())
        if len([each for each in taken if each.kind in _POSITIONAL]) != count:
            wanted = "reset(self, task, seed)" if name == "reset" else "step(self, action)"
            raise ConfigError(f"{where}: an environment needs a method {wanted}")
    register_section("environment", target.__name__, section_from_signature(target, EnvironmentSection))
    return target


def tool(target: Target) -> Target:
    """Register a tool under its name: `tools: [NAME]`, or `{name: NAME, ...}` with options.

    It is a typed function, plain or async. What it takes is what the policy gives: the JSON schema comes from the
    types, descriptions from the docstring (`Args:`). A parameter `task` is the rollout's task, which is not shown.
    Keyword-only parameters with a type and a default are keys of the run file. What it returns is shown as text, or as
    JSON; what it raises is told to the policy.

    Raises ConfigError naming file and line: it is no function, or a parameter lacks a type.
    """
    from rollmill.rollout.tools.function_tool import FunctionTool

    where = f"{source_location(target)}: {target.__name__}"
    if not inspect.isfunction(target):
        raise ConfigError(f"{where}: a tool is a function, plain or async")
    FunctionTool(target)
    register_section("tool", target.__name__, section_from_signature(target, ToolSection))
    return target
