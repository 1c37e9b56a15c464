"""`workflow`: how a task is rolled out."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, SerializeAsAny, WrapValidator

from rollmill.config.parts import Chosen, name_alone
from rollmill.config.workflows.agents import React, ToolTurns
from rollmill.config.workflows.base import WorkflowSection
from rollmill.config.workflows.environment import EnvironmentTurns
from rollmill.config.workflows.program import Program
from rollmill.config.workflows.second import FewShot, Judged, Reflection, Vote
from rollmill.config.workflows.single import SingleTurn
from rollmill.config.workflows.traffic import Traffic
from rollmill.config.workflows.verifiers import Verifiers

WorkflowConfig = Annotated[
    SerializeAsAny[
        Annotated[
            SingleTurn
            | FewShot
            | ToolTurns
            | React
            | EnvironmentTurns
            | Reflection
            | Vote
            | Judged
            | Verifiers
            | Program
            | Traffic,
            Field(discriminator="name"),
        ]
    ],
    WrapValidator(Chosen("workflow")),
    BeforeValidator(name_alone),
]

__all__ = [
    "EnvironmentTurns",
    "FewShot",
    "Judged",
    "Program",
    "React",
    "Reflection",
    "SingleTurn",
    "ToolTurns",
    "Traffic",
    "Verifiers",
    "Vote",
    "WorkflowConfig",
    "WorkflowSection",
]
