"""Gymnasium environments with discrete actions, as text or as pictures."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from rollmill.config.environments import EnvironmentSection
from rollmill.errors import ConfigError
from rollmill.registry import import_object
from rollmill.rollout.environments.base import StepResult
from rollmill.types import Task

ACTIONS = {
    "FrozenLake": ["left", "down", "right", "up"],
    "Taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
    "CliffWalking": ["up", "right", "down", "left"],
}
_COLOURED = re.compile(r"\x1b\[([\d;]*)m(.)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_RED = "41"


class GymnasiumEnvironment(EnvironmentSection):
    """A gymnasium environment with discrete actions, rendered as text or as pictures (extra `gym`).

    Tasks may have `seed` and `options` in their metadata; these options override those here.
    """

    needs_extra = ("gym", "gymnasium")
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
    render_mode: Literal["ansi", "rgb_array"] = "ansi"
    """`rgb_array`: the policy sees a picture of each state, and must be a vision-language model. `ansi`: text."""
    describe: str | None = None
    """FILE.py:NAME of a function (environment, observation) -> text shown to the policy; null: the rendered map. With
    pictures, the text stands behind each."""
    _described: Callable[[Any, Any], Any] | None = PrivateAttr()
    _env: Any = PrivateAttr()
    _made: dict[str, Any] | None = PrivateAttr()
    _taken: int = PrivateAttr()
    _seen: list[Any] = PrivateAttr()
    _words: list[str] = PrivateAttr()
    _pattern: re.Pattern[str] = PrivateAttr()

    def picture_keys(self) -> dict[str, str]:
        text = "rgb_array shows pictures, and the model reads text only; write ansi, or train a vision-language model"
        return {"render_mode": text} if self.render_mode == "rgb_array" else {}

    def setup(self) -> None:
        self._described = None if self.describe is None else import_object(self.describe)
        self._env, self._made = None, None
        self._taken, self._seen = 0, [""]

    def reset(self, task: Task, seed: int) -> Any:
        """Start an episode; return the map, the text of `describe`, a picture, or a list of picture and text.

        Raises ConfigError if gymnasium is not installed, does not know the environment, or the environment has no
        discrete actions.
        """
        self._make({**self.options, **task.metadata.get("options", {})})
        observation, _ = self._env.reset(seed=int(task.metadata.get("seed", seed)) % 2**31)
        self._taken, self._seen = 0, self._shown(observation)
        return self._joined(self._seen)

    def step(self, action: str) -> StepResult:
        """Perform the last action named in the text; without one nothing happens, at a penalty."""
        self._taken += 1
        late = self.max_steps is not None and self._taken >= self.max_steps
        found = self._pattern.findall(action)
        if not found:
            shown = self._joined([f"That is no action; there are {', '.join(self._words)}.\n", *self._seen])
            return StepResult(shown, -self.invalid_penalty, late, {"invalid": 1.0})
        observation, reward, ended, cut, info = self._env.step(self._words.index(found[-1].lower()))
        self._seen = self._shown(observation)
        return StepResult(self._joined(self._seen), float(reward), ended or cut or late, {"invalid": 0.0, **info})

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _make(self, options: dict[str, Any]) -> None:
        """Create the environment with these options; equal options keep the current one."""
        if options == self._made and self._env is not None:
            return
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            raise ConfigError("environment gymnasium needs its library: pip install 'rollmill[gym]'") from error
        self.close()
        wanted = self.render_mode
        mode = {} if self._described is not None and wanted == "ansi" else {"render_mode": wanted}
        try:
            self._env = gymnasium.make(self.id, **{**mode, **options})
        except (gymnasium.error.Error, TypeError, ValueError) as error:
            raise ConfigError(f"environment.id: gymnasium does not make {self.id}: {error}") from error
        if mode and wanted not in self._env.metadata.get("render_modes", []):
            as_what = "as text; give environment.describe" if wanted == "ansi" else "as pictures; remove render_mode"
            raise ConfigError(f"environment.id: {self.id} is not rendered {as_what}")
        self._made, self._words = dict(options), self._known_words()
        ordered = sorted(map(re.escape, self._words), key=len, reverse=True)
        self._pattern = re.compile(rf"(?<!\w)(?:{'|'.join(ordered)})(?!\w)", re.IGNORECASE)

    def _known_words(self) -> list[str]:
        count = getattr(self._env.action_space, "n", None)
        if count is None:
            raise ConfigError(f"environment.id: {self.id} has no discrete actions, so no words can name them")
        words = self.actions or ACTIONS.get(self.id.partition("-")[0], [])
        if len(words) != count:
            has = f"has {count} actions, and environment.actions {len(words)} words"
            raise ConfigError(f"environment.actions: {self.id} {has}; give one for each")
        return [word.lower() for word in words]

    def _shown(self, observation: Any) -> list[Any]:
        """Texts and pictures that the policy sees of a state."""
        import gymnasium

        text = [] if self._described is None else [str(self._described(self._env, observation))]
        if text and self.render_mode == "ansi":
            return text
        try:
            rendered = self._env.render()
        except gymnasium.error.DependencyNotInstalled as error:
            raise ConfigError(f"environment.render_mode: {self.id} cannot be drawn: {error}") from error
        return [strip_colours(rendered)] if self.render_mode == "ansi" else [rendered, *text]

    @staticmethod
    def _joined(seen: list[Any]) -> Any:
        return "".join(seen) if all(isinstance(each, str) for each in seen) else seen


def strip_colours(rendered: str) -> str:
    """Remove colours from a rendered map. The player (on red, in FrozenLake) becomes P; other marks become brackets.

    The line that repeats the last action is left out.
    """
    text = _COLOURED.sub(lambda found: "P" if found[1] == _RED else f"[{found[2]}]", rendered)
    lines = _ESCAPE.sub("", text).splitlines()
    kept = [line for line in lines if line.strip() and not re.fullmatch(r"\s+\(\w+\)", line)]
    return "\n".join(kept) + "\n"
