"""From the section `environment` to an environment, here or in a worker process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollmill.config import environments as config
from rollmill.errors import ConfigError
from rollmill.registry import import_object


@dataclass(frozen=True, slots=True)
class EnvironmentClassSpec:
    """A user's class as another process finds it, and its options."""

    name: str
    source: str  #: FILE.py:NAME or package.module:NAME
    options: dict[str, Any]


EnvironmentSpec = config.EnvironmentSection | EnvironmentClassSpec
"""What a worker process makes environments from."""


def build_environment_spec(section: config.EnvironmentSection) -> EnvironmentSpec:
    """How a worker process makes a section's environment.

    Raises ConfigError where it cannot find the class.
    """
    target = type(section).function
    if target is None:
        return section
    from rollmill.rewards.python import function_source

    source = function_source(section.name, target)
    if source is None:
        raise ConfigError(
            f"environment.processes: other processes cannot find the class of environment `{section.name}`; define it "
            "at the top level of a file, under the name it has there, or set processes: 0"
        )
    return EnvironmentClassSpec(section.name, source, section.arguments())


def make_environment(recipe: EnvironmentSpec) -> Any:
    """An object with reset, step and perhaps close.

    Raises:
        ConfigError: a library is missing, or does not know what the section asks for.
        Exception: whatever a user's class raises.
    """
    if isinstance(recipe, EnvironmentClassSpec):
        return import_object(recipe.source)(**recipe.options)
    target = type(recipe).function
    if target is not None:
        return target(**recipe.arguments())
    match recipe:  # imported here: a run pays for what it uses
        case config.GymnasiumSection():
            from rollmill.rollout.environments.gymnasium import GymnasiumEnvironment

            return GymnasiumEnvironment(recipe)
        case config.ReasoningGymSection():
            from rollmill.rollout.environments.reasoning_gym import ReasoningGymEnvironment

            return ReasoningGymEnvironment(recipe)
        case config.TextArenaSection():
            from rollmill.rollout.environments.textarena import TextArenaEnvironment

            return TextArenaEnvironment(recipe)
    raise AssertionError(f"no environment is built from {type(recipe).__name__}")
