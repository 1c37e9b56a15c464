"""`environment`: the environment that a workflow acts in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rollmill.config.section import NamedSection, module_sections, section_union


class EnvironmentSection(NamedSection):
    """An environment chosen by name; its other keys are its options."""

    processes: int = Field(0, ge=0)
    """Number of worker processes for environments, several environments in each; 0: threads of this process. For
    environments that cannot share a process, hang or crash."""
    time_limit_s: float = Field(60.0, gt=0)
    """Timeout of a reset or a step; the rollout then fails, and with `processes` the worker is killed."""
    restart_after: int = Field(1000, ge=1)
    """Episodes after which a worker process is replaced, to limit memory leaks. Only with `processes`."""
    memory_gb: float = Field(4.0, gt=0)
    """Memory limit of a worker process: above it, the worker is replaced once its episodes have ended; above twice as
    much, it is killed at once. Only with `processes`."""

    def arguments(self) -> dict[str, object]:
        """Returns the options of the environment itself."""
        common = EnvironmentSection.model_fields
        return {key: value for key, value in super().arguments().items() if key not in common}

    def unused_keys(self) -> dict[str, str]:
        text = "not honoured with processes 0: it is about worker processes; give processes"
        return {key: text for key in ("restart_after", "memory_gb") if self.processes == 0}


class GymnasiumSection(EnvironmentSection):
    """A gymnasium environment with discrete actions, rendered as text or as pictures (extra `gym`).

    Tasks may have `seed` and `options` in their metadata; these options override those here.
    """

    needs_extra = ("gym", "gymnasium")
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
    render_mode: Literal["ansi", "rgb_array"] = "ansi"
    """`rgb_array`: the policy sees a picture of each state, and must be a vision-language model. `ansi`: text."""
    describe: str | None = None
    """FILE.py:NAME of a function (environment, observation) -> text shown to the policy; null: the rendered map. With
    pictures, the text stands behind each."""


class ReasoningGymSection(EnvironmentSection):
    """Several attempts at a task of `taskset.generator`, with feedback after a wrong answer.

    The reward is the generator's score of the last answer. With one attempt, it is equivalent to workflow `single_turn`
    with the reward `reasoning_gym`.
    """

    needs_extra = ("reasoning", "reasoning_gym")
    implementation = "rollmill.rollout.environments.reasoning_gym:ReasoningGymEnvironment"
    name: Literal["reasoning_gym"] = "reasoning_gym"
    attempts: int = Field(3, ge=1)
    """Maximum number of answers."""
    after: str | None = None
    """The answer is the text after the last occurrence of this marker; null: the whole reply."""
    solved: float = Field(1.0, gt=0, le=1)
    """Score at which the episode ends."""
    discount: float = Field(1.0, gt=0, le=1)
    """Factor of the reward per previous attempt."""
    feedback: str = "That is not right. Try again."
    """Message to the policy after a wrong answer."""


class TextArenaSection(EnvironmentSection):
    """A single-player game of TextArena (extra `textarena`).

    Tasks may have `seed` and `options` in their metadata; these options override those here.
    """

    needs_extra = ("textarena", "textarena")
    implementation = "rollmill.rollout.environments.textarena:TextArenaEnvironment"
    name: Literal["textarena"] = "textarena"
    id: str
    """Game id in TextArena's registry, such as `GuessTheNumber-v0`."""
    options: dict[str, Any] = {}
    """Keyword arguments of `textarena.make`."""
    max_steps: int | None = Field(None, ge=1)
    """Maximum actions per episode; null: the game's limit."""


if TYPE_CHECKING:
    EnvironmentConfig = EnvironmentSection
else:
    EnvironmentConfig = section_union(module_sections(__name__, EnvironmentSection), kind="environment")
