"""`environment`: what a workflow acts in."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, SerializeAsAny, WrapValidator

from rollmill.config.environments.base import EnvironmentSection
from rollmill.config.environments.gymnasium import Gymnasium
from rollmill.config.environments.reasoning_gym import ReasoningGymAttempts
from rollmill.config.environments.textarena import TextArena
from rollmill.config.parts import Chosen, name_alone

EnvironmentConfig = Annotated[
    SerializeAsAny[Annotated[Gymnasium | ReasoningGymAttempts | TextArena, Field(discriminator="name")]],
    WrapValidator(Chosen("environment")),
    BeforeValidator(name_alone),
]

__all__ = ["EnvironmentConfig", "EnvironmentSection", "Gymnasium", "ReasoningGymAttempts", "TextArena"]
