"""Environments of the library gymnasium whose states are text."""

from __future__ import annotations

from typing import Any, Literal

from rollmill.config.environments.base import EnvironmentSection


class Gymnasium(EnvironmentSection):
    """A gymnasium environment with discrete actions, rendered as text (extra `gym`)."""

    name: Literal["gymnasium"] = "gymnasium"
    id: str = "FrozenLake-v1"
    """Its id in gymnasium's registry."""
    options: dict[str, Any] = {}
    """Keyword arguments of `gymnasium.make`."""
