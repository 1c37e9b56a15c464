"""From the section `environment` to an environment, here or in a worker process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollmill.config import environments as config
from rollmill.core.errors import ConfigError
from rollmill.core.registry import import_object


@dataclass(frozen=True, slots=True)
class UsersClass:
    """A user's class as another process finds it, and its options."""

    name: str
    source: str  #: FILE.py:NAME or package.module:NAME
    options: dict[str, Any]


Recipe = config.EnvironmentSection | UsersClass
"""What a worker process makes environments from."""


def recipe(section: config.EnvironmentSection) -> Recipe:
    """How a worker process makes a section's environment.

    Raises ConfigError where it cannot find the class.
    """
    target = type(section).function
    if target is None:
        return section
    from rollmill.rewards.python import source_of

    source = source_of(section.name, target)
    if source is None:
        raise ConfigError(
            f"environment.processes: other processes cannot find the class of environment `{section.name}`; define it "
            "at the top level of a file, under the name it has there, or set processes: 0"
        )
    return UsersClass(section.name, source, section.arguments())


def make_environment(recipe: Recipe) -> Any:
    """An object with reset, step and perhaps close.

    Raises:
        ConfigError: a library is missing, or does not know what the section asks for.
        Exception: whatever a user's class raises.
    """
    if isinstance(recipe, UsersClass):
        return import_object(recipe.source)(**recipe.options)
    target = type(recipe).function
    if target is not None:
        return target(**recipe.arguments())
    match recipe:  # imported here: a run pays for what it uses
        case config.Gymnasium():
            from rollmill.explorer.environments.gymnasium import GymnasiumText

            return GymnasiumText(recipe)
        case config.ReasoningGymAttempts():
            from rollmill.explorer.environments.reasoning_gym import Attempts

            return Attempts(recipe)
        case config.TextArena():
            from rollmill.explorer.environments.textarena import TextGame

            return TextGame(recipe)
    raise AssertionError(f"no environment is built from {type(recipe).__name__}")
