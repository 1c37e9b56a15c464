"""Text games of the library TextArenaSection."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rollmill.config.environments.base import EnvironmentSection


class TextArenaSection(EnvironmentSection):
    """A game of TextArenaSection for one player (extra `textarena`).

    Tasks may have `seed` and `options` in their metadata; options go over those here.
    """

    name: Literal["textarena"] = "textarena"
    id: str
    """Its id in TextArenaSection's registry, such as `GuessTheNumber-v0`."""
    options: dict[str, Any] = {}
    """Keyword arguments of `textarena.make`."""
    max_steps: int | None = Field(None, ge=1)
    """Actions after which an episode ends; null: the game's own limit."""
