"""Environments of the library gymnasium with text states."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rollmill.config.environments.base import EnvironmentSection


class GymnasiumSection(EnvironmentSection):
    """A gymnasium environment with discrete actions, rendered as text (extra `gym`).

    Tasks may have `seed` and `options` in their metadata; these options override those here.
    """

    implementation = "rollmill.rollout.environments.gymnasium:GymnasiumEnvironment"
    name: Literal["gymnasium"] = "gymnasium"
    id: str = "FrozenLake-v1"
    """Environment id in gymnasium's registry."""
    options: dict[str, Any] = {}
    """Keyword arguments of `gymnasium.make`."""
    actions: list[str] = []
    """Words for the actions 0, 1, 2, ...; the last one in a reply counts. Built in for FrozenLake, Taxi,
    CliffWalking."""
    invalid_penalty: float = Field(0.0, ge=0)
    """Penalty for a reply without an action. The policy is shown the words and the unchanged state again."""
    max_steps: int | None = Field(None, ge=1)
    """Maximum actions per episode, invalid ones included; null: gymnasium's limit."""
    describe: str | None = None
    """FILE.py:NAME of a function (environment, observation) -> text shown to the policy; null: the rendered map."""
