"""Environments of the library gymnasium whose states are text."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rollmill.config.environments.base import EnvironmentSection


class GymnasiumSection(EnvironmentSection):
    """A gymnasium environment with discrete actions, rendered as text (extra `gym`).

    Tasks may have `seed` and `options` in their metadata; options go over those here.
    """

    name: Literal["gymnasium"] = "gymnasium"
    id: str = "FrozenLake-v1"
    """Its id in gymnasium's registry."""
    options: dict[str, Any] = {}
    """Keyword arguments of `gymnasium.make`."""
    actions: list[str] = []
    """Words for the actions 0, 1, 2, ...; the last one in a reply counts. Known for FrozenLake, Taxi, CliffWalking."""
    invalid_penalty: float = Field(0.0, ge=0)
    """Taken off where a reply names no action. The policy is told the words and sees the state again, which stays
    as it is."""
    max_steps: int | None = Field(None, ge=1)
    """Actions after which an episode ends, invalid ones included; null: gymnasium's own limit."""
    describe: str | None = None
    """FILE.py:NAME of a function (environment, observation) -> text that says what the policy sees; null: the rendered
    map."""
