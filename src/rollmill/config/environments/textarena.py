"""Text games of the library TextArena."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rollmill.config.environments.base import EnvironmentSection


class TextArenaSection(EnvironmentSection):
    """A single-player game of TextArena (extra `textarena`).

    Tasks may have `seed` and `options` in their metadata; these options override those here.
    """

    implementation = "rollmill.rollout.environments.textarena:TextArenaEnvironment"
    name: Literal["textarena"] = "textarena"
    id: str
    """Game id in TextArena's registry, such as `GuessTheNumber-v0`."""
    options: dict[str, Any] = {}
    """Keyword arguments of `textarena.make`."""
    max_steps: int | None = Field(None, ge=1)
    """Maximum actions per episode; null: the game's limit."""
