"""The explorer: tasks in, judged experiences out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmill.rollout.explorer import Explorer

__all__ = ["Explorer"]


def __getattr__(name: str) -> Any:
    """Import the explorer on first use: environments live in processes that do without torch."""
    if name != "Explorer":
        raise AttributeError(f"module 'rollmill.rollout' has no attribute '{name}'")
    from rollmill.rollout.explorer import Explorer

    return Explorer
