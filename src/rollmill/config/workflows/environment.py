"""Workflows that act in an environment."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rollmill.config.workflows.base import WorkflowSection


class EnvironmentWorkflow(WorkflowSection):
    """Interacts with the section `environment` until the episode ends; the reward is the sum of its rewards."""

    uses_rewards: ClassVar[bool] = False
    uses_environment: ClassVar[bool] = True
    multi_step: ClassVar[bool] = True

    implementation = "rollmill.rollout.workflows.environment:environment_turns"
    name: Literal["environment"] = "environment"
    turns: int = Field(16, ge=1)
    """Maximum turns of the policy."""
    system: str | None = None
    """System message, or text in front of a plain prompt."""
    history: Literal["full"] | Annotated[int, Field(ge=1)] = "full"
    """Context of the policy: the whole episode, or the task and the last N observations with the actions between them.
    With a number each turn is a separate step, as `gigpo` and `stepwise_grpo` need it."""
    steps: bool = False
    """Make each turn a separate step with its own reward, with `history: full`, too."""
