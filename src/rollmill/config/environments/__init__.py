"""`environment`: the environment that a workflow acts in."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, SerializeAsAny, WrapValidator

from rollmill.config.environments.base import EnvironmentSection
from rollmill.config.environments.gymnasium import GymnasiumSection
from rollmill.config.environments.reasoning_gym import ReasoningGymSection
from rollmill.config.environments.textarena import TextArenaSection
from rollmill.config.section import RegisteredUnion, expand_name

EnvironmentConfig = Annotated[
    SerializeAsAny[Annotated[GymnasiumSection | ReasoningGymSection | TextArenaSection, Field(discriminator="name")]],
    WrapValidator(RegisteredUnion("environment")),
    BeforeValidator(expand_name),
]

__all__ = ["EnvironmentConfig", "EnvironmentSection", "GymnasiumSection", "ReasoningGymSection", "TextArenaSection"]
