"""Rollouts that an application makes."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rollmill.config.workflows.base import WorkflowSection


class TrafficWorkflow(WorkflowSection):
    """What applications do with the model that `rollmill serve RUN.yaml --train` serves; feedback rewards it."""

    uses_rewards: ClassVar[bool] = False
    uses_tasks: ClassVar[bool] = False
    single_turn: ClassVar[bool] = True
    multi_step: ClassVar[bool] = True

    name: Literal["traffic"] = "traffic"
    group: Literal["session", "prompt"] = "session"
    """What is compared: `session`: every session is a group of its own, for algorithms that compare with the whole
    batch. `prompt`: `rollout.group_size` sessions that began with the same prompt."""
    pending: int = Field(4096, ge=1)
    """Sessions that wait for others with the same prompt; past that the oldest are dropped."""
