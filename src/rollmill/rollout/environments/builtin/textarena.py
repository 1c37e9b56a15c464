"""Text games of the library TextArena for one player."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from rollmill.config.environments import EnvironmentSection
from rollmill.errors import ConfigError
from rollmill.rollout.environments.base import StepResult
from rollmill.types import Task

_RAW = "-raw"
_GLOBAL = threading.Lock()
"""Held during every call: the games draw from the global generator of the module `random`."""


class TextArenaEnvironment(EnvironmentSection):
    """A single-player game of TextArena (extra `textarena`).

    Tasks may have `seed` and `options` in their metadata; these options override those here.
    """

    needs_extra = ("textarena", "textarena")
    name: Literal["textarena"] = "textarena"
    id: str
    """Game id in TextArena's registry, such as `GuessTheNumber-v0`."""
    options: dict[str, Any] = {}
    """Keyword arguments of `textarena.make`."""
    max_steps: int | None = Field(None, ge=1)
    """Maximum actions per episode; null: the game's limit."""
    _game: Any = PrivateAttr()
    _made: dict[str, Any] | None = PrivateAttr()
    _random: Any = PrivateAttr()  # state of the module `random` for this game
    _taken: int = PrivateAttr()

    def setup(self) -> None:
        self._game, self._made = None, None
        self._random, self._taken = random.Random(0).getstate(), 0

    def reset(self, task: Task, seed: int) -> str:
        """Start a game; return the rules and the first state. The policy does not see its own actions.

        Raises ConfigError if TextArena is not installed or does not know the game, or the game lacks data (word lists
        that nltk downloads) or needs several players.
        """
        number = int(task.metadata.get("seed", seed)) % 2**31
        self._random, self._taken = random.Random(number).getstate(), 0
        with self._own_randomness():
            self._make({**self.options, **task.metadata.get("options", {})})
            try:
                self._game.reset(num_players=1, seed=number)
            except (AssertionError, ValueError) as error:
                text = f"environment.id: {self.id} does not begin for one player"
                raise ConfigError(f"{text}, and there is no other: {error}; choose a game for one") from error
            return self._new_text()

    def step(self, action: str) -> StepResult:
        """Make a move. The reward comes with the game's end."""
        self._taken += 1
        with self._own_randomness():
            done, _ = self._game.step(action=action)
            late = self.max_steps is not None and self._taken >= self.max_steps
            if not done:
                return StepResult(self._new_text(), 0.0, late)
            rewards, info = self._game.close()
            invalid = {"invalid": float(info[0]["invalid_move"])}
            return StepResult(self._new_text(), float((rewards or {}).get(0, 0.0)), True, invalid)

    def _make(self, options: dict[str, Any]) -> None:
        if options == self._made:
            return
        try:
            import textarena
            from textarena.envs.registration import ENV_REGISTRY
        except ModuleNotFoundError as error:
            raise ConfigError("environment textarena needs its library: pip install 'rollmill[textarena]'") from error
        name = self.id
        if name not in ENV_REGISTRY:
            near = get_close_matches(name, list(ENV_REGISTRY), n=1)
            raise ConfigError(
                f"environment.id: TextArena has no {name}" + (f"; did you mean {near[0]}?" if near else "")
            )
        raw = name if name.endswith(_RAW) or name + _RAW not in ENV_REGISTRY else name + _RAW
        try:
            self._game = textarena.make(raw, **options)
        except Exception as error:  # games report missing libraries, data and keys in various ways
            why = f"{type(error).__name__}: {error}"
            if type(error) is LookupError:  # nltk's
                why = "it needs word lists that nltk downloads; where there is a network run nltk.download once"
            raise ConfigError(f"environment.id: TextArena does not make {name}: {why}") from error
        self._made = dict(options)

    def _new_text(self) -> str:
        """New texts of the game for the player since the last call, line by line."""
        _, messages = self._game.get_observation()
        if isinstance(messages, str):
            return messages.rstrip() + "\n"
        return "".join(f"{str(text).rstrip()}\n" for speaker, text, *_ in messages if speaker != 0)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Swap in this game's state of the module `random`, and restore the old state afterwards."""
        with _GLOBAL:
            before = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(before)
