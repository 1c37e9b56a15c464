"""`workflow`: how a task is rolled out."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializeAsAny, WrapValidator

from rollmill.config.parts import Chosen
from rollmill.config.workflows.base import WorkflowSection
from rollmill.config.workflows.environment import EnvironmentTurns
from rollmill.config.workflows.program import Program
from rollmill.config.workflows.single import SingleTurn
from rollmill.config.workflows.traffic import Traffic
from rollmill.config.workflows.verifiers import Verifiers


def _in_full(value: Any) -> Any:
    """A name alone stands for a section without other keys."""
    return {"name": value} if isinstance(value, str) else value


WorkflowConfig = Annotated[
    SerializeAsAny[
        Annotated[SingleTurn | EnvironmentTurns | Verifiers | Program | Traffic, Field(discriminator="name")]
    ],
    WrapValidator(Chosen("workflow")),
    BeforeValidator(_in_full),
]

__all__ = ["EnvironmentTurns", "Program", "SingleTurn", "Traffic", "Verifiers", "WorkflowConfig", "WorkflowSection"]
