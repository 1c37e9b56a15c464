"""Workflows whose rollouts an application makes."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rollmill.config.workflows.base import WorkflowSection


class TrafficWorkflow(WorkflowSection):
    """Sessions of applications with the model that `rollmill serve RUN.yaml --train` serves, rewarded by feedback."""

    uses_rewards: ClassVar[bool] = False
    uses_tasks: ClassVar[bool] = False
    single_turn: ClassVar[bool] = True
    multi_step: ClassVar[bool] = True

    name: Literal["traffic"] = "traffic"
    group: Literal["session", "prompt"] = "session"
    """Group of sessions that are compared. `session`: every session is its own group, for algorithms that compare with
    the whole batch. `prompt`: `rollout.group_size` sessions with the same first prompt."""
    pending: int = Field(4096, ge=1)
    """Maximum sessions that wait for others with the same prompt; beyond that the oldest are dropped."""
