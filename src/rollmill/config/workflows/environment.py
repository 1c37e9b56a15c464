"""Workflows with an environment."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rollmill.config.workflows.base import WorkflowSection


class EnvironmentTurns(WorkflowSection):
    """Turns with the section `environment` until it is done; the reward is the sum of its rewards."""

    asks_judge: ClassVar[bool] = False
    uses_environment: ClassVar[bool] = True

    name: Literal["environment"] = "environment"
    turns: int = Field(16, ge=1)
    """Most turns of the policy."""
