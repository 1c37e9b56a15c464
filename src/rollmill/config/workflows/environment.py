"""Workflows with an environment."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rollmill.config.workflows.base import WorkflowSection


class EnvironmentWorkflow(WorkflowSection):
    """Turns with the section `environment` until it is done; the reward is the sum of its rewards."""

    uses_rewards: ClassVar[bool] = False
    uses_environment: ClassVar[bool] = True
    multi_step: ClassVar[bool] = True

    name: Literal["environment"] = "environment"
    turns: int = Field(16, ge=1)
    """Most turns of the policy."""
    system: str | None = None
    """What the policy is told before everything else: a system message, or text in front of a plain prompt."""
    history: Literal["full"] | Annotated[int, Field(ge=1)] = "full"
    """What the policy sees: everything so far, or the task and the last N observations with its actions between them.
    With a number each turn is a step of its own, as `gigpo` and `stepwise_grpo` need it."""
    steps: bool = False
    """With `history: full` too, make each turn a step of its own with its own reward."""
