"""`environment`: what a workflow acts in."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializeAsAny, WrapValidator

from rollmill.config.environments.base import EnvironmentSection
from rollmill.config.environments.gymnasium import Gymnasium
from rollmill.config.environments.reasoning_gym import ReasoningGymAttempts
from rollmill.config.environments.textarena import TextArena
from rollmill.config.parts import Chosen


def _in_full(value: Any) -> Any:
    """A name alone stands for a section without other keys."""
    return {"name": value} if isinstance(value, str) else value


EnvironmentConfig = Annotated[
    SerializeAsAny[Annotated[Gymnasium | ReasoningGymAttempts | TextArena, Field(discriminator="name")]],
    WrapValidator(Chosen("environment")),
    BeforeValidator(_in_full),
]

__all__ = ["EnvironmentConfig", "EnvironmentSection", "Gymnasium", "ReasoningGymAttempts", "TextArena"]
