"""Text games of the library TextArena."""

from __future__ import annotations

from typing import Any, Literal

from rollmill.config.environments.base import EnvironmentSection


class TextArena(EnvironmentSection):
    """A game of TextArena for one player (extra `textarena`)."""

    name: Literal["textarena"] = "textarena"
    id: str
    """Its id in TextArena's registry, such as `GuessTheNumber-v0`."""
    options: dict[str, Any] = {}
    """Keyword arguments of `textarena.make`."""
