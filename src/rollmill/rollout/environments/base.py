"""What an environment is, and what its methods may return."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollmill.config import environments as config
from rollmill.errors import ConfigError, EpisodeError
from rollmill.registry import import_object
from rollmill.types import Task

Observation = str | Sequence[Mapping[str, Any]]
"""What the policy sees: a text, or chat messages in OpenAI's format."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an action led to. `observation` is what the policy sees next; `info` has numbers that are logged."""

    observation: Observation
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One episode at a time, used by one rollout. Each method may be plain or async; `close` may be missing.

    Plain methods run outside of the event loop and may block; those of one object never run at the same time.
    """

    def reset(self, task: Task, seed: int) -> Observation | Awaitable[Observation]:
        """Begin an episode of a task; what the policy sees first. The same task and seed begin alike."""
        ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Act as the policy says."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Free what it holds; may be called at any time, more than once."""
        ...


class EnvironmentTimeoutError(EpisodeError):
    """A call took longer than environment.time_limit_s."""


class EnvironmentCrashError(EpisodeError):
    """The process that the environment lived in has ended."""


def validate_observation(found: Any, where: str) -> Observation:
    """An observation in plain types: a text, or a list of messages.

    Raises TypeError naming `where`, the class and method, for anything else.
    """
    if isinstance(found, str):
        return drop_surrogates(found)
    if isinstance(found, Sequence) and all(isinstance(each, Mapping) and _is_message(each) for each in found):
        return [dict(each) for each in found]
    raise TypeError(f"{where} gave {_kind(found)} as observation; give a text, or a list of messages (role, content)")


def validate_step(found: Any, where: str) -> StepResult:
    """A step's result in plain types, with the numbers of its `info` alone.

    Raises TypeError naming `where`, the class and method, for anything else.
    """
    if not isinstance(found, StepResult):
        raise TypeError(f"{where} returned {_kind(found)}; return a StepResult(observation, reward, done)")
    observation, reward = validate_observation(found.observation, where), _number(found.reward)
    if reward is None or not math.isfinite(reward):
        raise TypeError(f"{where} gave {_kind(found.reward)} as reward; give a finite number")
    if not isinstance(found.info, Mapping):
        raise TypeError(f"{where} gave {_kind(found.info)} as info; give a mapping of numbers")
    info = {str(key): number for key, value in found.info.items() if (number := _number(value)) is not None}
    return StepResult(observation, reward, bool(found.done), info)


def drop_surrogates(text: str) -> str:
    """A text without halves of surrogate pairs, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def observation_text(observation: Observation) -> str:
    """An observation as one text: what messages say, line by line."""
    if isinstance(observation, str):
        return observation
    return "\n".join(str(each.get("content") or "") for each in observation)


def _is_message(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("role"), str) and "content" in message


def _number(value: Any) -> float | None:
    """A number, numpy's ones included; None for anything else."""
    if isinstance(value, bool | int | float):
        return float(value)
    try:
        return float(value.item())
    except (AttributeError, TypeError, ValueError):
        return None


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return repr(value) if isinstance(value, float) else f"a {type(value).__name__}"


# From the section `environment` to an environment, here or in a worker process.


@dataclass(frozen=True, slots=True)
class EnvironmentClassSpec:
    """A user's class as another process finds it, and its options."""

    name: str
    source: str  #: FILE.py:NAME or package.module:NAME
    options: dict[str, Any]


EnvironmentSpec = config.EnvironmentSection | EnvironmentClassSpec
"""What a worker process makes environments from."""


def build_environment_spec(section: config.EnvironmentSection) -> EnvironmentSpec:
    """How a worker process makes a section's environment.

    Raises ConfigError where it cannot find the class.
    """
    target = type(section).function
    if target is None:
        return section
    from rollmill.rewards.python import function_source

    source = function_source(section.name, target)
    if source is None:
        raise ConfigError(
            f"environment.processes: other processes cannot find the class of environment `{section.name}`; define it "
            "at the top level of a file, under the name it has there, or set processes: 0"
        )
    return EnvironmentClassSpec(section.name, source, section.arguments())


def make_environment(recipe: EnvironmentSpec) -> Any:
    """An object with reset, step and perhaps close.

    Raises:
        ConfigError: a library is missing, or does not know what the section asks for.
        Exception: whatever a user's class raises.
    """
    if isinstance(recipe, EnvironmentClassSpec):
        return import_object(recipe.source)(**recipe.options)
    target = type(recipe).function
    if target is not None:
        return target(**recipe.arguments())
    match recipe:  # imported here: a run pays for what it uses
        case config.GymnasiumSection():
            from rollmill.rollout.environments.gymnasium import GymnasiumEnvironment

            return GymnasiumEnvironment(recipe)
        case config.ReasoningGymSection():
            from rollmill.rollout.environments.reasoning_gym import ReasoningGymEnvironment

            return ReasoningGymEnvironment(recipe)
        case config.TextArenaSection():
            from rollmill.rollout.environments.textarena import TextArenaEnvironment

            return TextArenaEnvironment(recipe)
    raise AssertionError(f"no environment is built from {type(recipe).__name__}")
