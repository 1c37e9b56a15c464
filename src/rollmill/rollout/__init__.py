"""Rollouts: the explorer turns tasks into experiences with rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.rollout.explorer import Explorer

__all__ = ["Explorer"]


def __getattr__(name: str) -> Any:
    """Import the explorer on first use: environment processes run without torch."""
    if name != "Explorer":
        raise AttributeError(f"module 'rollmill.rollout' has no attribute '{name}'")
    from rollmill.rollout.explorer import Explorer

    return Explorer
