"""The environment protocol, validation of its return values, and building environments from configuration."""

from __future__ import annotations

import base64
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollmill.config.environments import EnvironmentSection
from rollmill.data.content_parts import content_text
from rollmill.data.images import encode_png
from rollmill.errors import ConfigError, EpisodeError
from rollmill.registry import build_component, import_object
from rollmill.types import Task
from rollmill.user_code import function_source

Observation = str | Sequence[Mapping[str, Any]]
"""The policy's input: a text, or chat messages in OpenAI's format, whose contents may be lists of parts with pictures.

An environment may also return a picture (an image of Pillow, or pixels: uint8 [H, W, 3]), or a list of texts and
pictures, which becomes a message of the user.
"""


_FRAMES = ("video", "frames")


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of an action. `observation` is the policy's next input; `info` has numbers to log."""

    observation: Observation
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """An environment, used by one rollout for one episode at a time. Methods are plain or async; `close` is optional.

    Plain methods run outside of the event loop and may block; those of one object never run at the same time.
    """

    def reset(self, task: Task, seed: int) -> Observation | Awaitable[Observation]:
        """Start an episode of a task; return the first observation. It depends only on task and seed."""
        ...

    def step(self, action: str) -> StepResult | Awaitable[StepResult]:
        """Perform the policy's action."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Free its resources; may be called at any time, more than once."""
        ...


class EnvironmentTimeoutError(EpisodeError):
    """A call took longer than environment.time_limit_s."""


class EnvironmentCrashError(EpisodeError):
    """The environment's process has ended."""


def validate_observation(found: Any, where: str) -> Observation:
    """Convert an observation to plain types: a text, or a list of messages, with pictures as `data:` URLs.

    Raises TypeError naming `where`, the class and method, for anything else.
    """
    if isinstance(found, str):
        return drop_surrogates(found)
    if isinstance(found, Sequence) and all(isinstance(each, Mapping) and _is_message(each) for each in found):
        return [{**each, "content": _plain_content(each["content"], where)} for each in found]
    if _is_picture(found) or (isinstance(found, Sequence) and all(_is_part(each) for each in found)):
        parts = found if isinstance(found, Sequence) else [found]
        return [{"role": "user", "content": _plain_content(parts, where)}]
    raise TypeError(
        f"{where} gave {_kind(found)} as observation; give a text, a picture, a list of texts and pictures, or a list "
        "of messages (role, content)"
    )


def picture_parts(found: Any, where: str) -> list[dict[str, Any]] | None:
    """A picture, or a list of texts and pictures, as content parts with `data:` URLs; None for anything else, such as
    numbers and arrays of numpy that are no pixels (uint8 with 2 or 3 dimensions).

    Raises TypeError naming `where` for pixels of another shape than a picture's.
    """

    def shows(value: Any) -> bool:
        pixels = str(getattr(value, "dtype", "")) == "uint8" and getattr(value, "ndim", 0) in (2, 3)
        return _is_picture(value) and (pixels or not hasattr(value, "dtype"))

    listed = found if isinstance(found, list | tuple) else [found]
    if not any(map(shows, listed)) or not all(isinstance(each, str) or shows(each) for each in listed):
        return None
    return [_plain_part(each, where) for each in listed]


def _is_picture(value: Any) -> bool:
    return type(value).__module__.startswith("PIL.") or hasattr(value, "__array_interface__")


def _is_part(value: Any) -> bool:
    return isinstance(value, str) or _is_picture(value) or (isinstance(value, Mapping) and "type" in value)


def _plain_content(content: Any, where: str) -> Any:
    """Contents of a message that other processes can read. Raises TypeError for what is no picture."""
    return (
        [_plain_part(part, where) for part in content]
        if isinstance(content, Sequence) and not isinstance(content, str)
        else content
    )


def _plain_part(part: Any, where: str) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": drop_surrogates(part)}
    if isinstance(part, Mapping):
        listed = {key: [_plain_picture(each, where) for each in value] for key, value in part.items() if key in _FRAMES}
        return {key: _plain_picture(value, where) for key, value in part.items()} | listed
    return {"type": "image", "image": _plain_picture(part, where)}


def _plain_picture(value: Any, where: str) -> Any:
    """A picture as `data:` URL; other values as they are."""
    if not _is_picture(value):
        return value
    try:
        return f"data:image/png;base64,{base64.b64encode(encode_png(value, where)).decode()}"
    except ValueError as error:
        raise TypeError(str(error)) from error


def validate_step(found: Any, where: str) -> StepResult:
    """Convert a step's result to plain types, with only the numbers of its `info`.

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
    """Replace halves of surrogate pairs, which tokenizers do not accept."""
    return text.encode("utf-8", "replace").decode()


def observation_text(observation: Observation) -> str:
    """An observation as one text: the messages' contents, line by line."""
    if isinstance(observation, str):
        return observation
    return "\n".join(content_text(each.get("content")) for each in observation)


def has_pictures(observation: Observation) -> bool:
    """True if a message has parts that are no texts."""
    contents = [] if isinstance(observation, str) else [each.get("content") for each in observation]
    return any(part.get("type") != "text" for each in contents if isinstance(each, list) for part in each)


def _is_message(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("role"), str) and "content" in message


def _number(value: Any) -> float | None:
    """Convert to float, numpy numbers included; None for anything else."""
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


@dataclass(frozen=True, slots=True)
class EnvironmentClassSpec:
    """A user's environment class, importable by another process, and its options."""

    name: str
    source: str  #: FILE.py:NAME or package.module:NAME
    options: dict[str, Any]


EnvironmentSpec = EnvironmentSection | EnvironmentClassSpec
"""Specification from which a worker process makes environments."""


def build_environment_spec(section: EnvironmentSection) -> EnvironmentSpec:
    """Build the specification of a section's environment for a worker process.

    Raises ConfigError if that process cannot import the class.
    """
    target = type(section).function
    if target is None:
        return section
    source = function_source(section.name, target)
    if source is None:
        raise ConfigError(
            f"environment.processes: other processes cannot find the class of environment `{section.name}`; define it "
            "at the top level of a file, under the name it has there, or set processes: 0"
        )
    return EnvironmentClassSpec(section.name, source, section.arguments())


def make_environment(spec: EnvironmentSpec) -> Any:
    """Create an environment: an object with reset, step and perhaps close.

    Raises:
        ConfigError: a library is missing, or does not support the configuration.
        Exception: whatever a user's class raises.
    """
    if isinstance(spec, EnvironmentClassSpec):
        return import_object(spec.source)(**spec.options)
    return build_component(spec)
