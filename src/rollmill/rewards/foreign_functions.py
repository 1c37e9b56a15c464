"""Reward functions that were written for TRL or verl, as rewards of rollmill. They are used unchanged.

Functions of all kinds may have the parameters `content` and `reasoning`, which hold the parts of the reply.

Both frameworks call by keyword, so the names of the parameters say which one a function is for:

- TRL (`GRPOTrainer(reward_funcs=...)`): `f(prompts, completions, completion_ids, **columns) -> list[float | None]`.
- verl (`custom_reward_function`): `f(data_source, solution_str, ground_truth, extra_info) -> float | dict`.

Grader processes import this module, so it imports little.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from rollmill.rewards.values import LoggedScore

if TYPE_CHECKING:
    from rollmill.types import Completion, Task

_ANSWERS = ("answer", "solution", "ground_truth")
"""Columns under which a function of `**columns` finds the task's answer, if its row has no column of that name."""
_OF_TRL = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")
_PARTS = ("content", "reasoning")
"""Parts of the reply that a function gets if it has a parameter of that name without a default."""
_NOT_HERE = ("trainer_state", "environments")
"""Arguments of TRL that have no counterpart here."""


def adapt_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward function `(task, completion)` that calls one of TRL or verl, or one that asks for parts of the
    reply; of any other function, itself.

    With the attribute `group = True` a function of TRL gets all completions of a task in one call, else one at a time.
    """
    parameters = _parameters(function)
    if "solution_str" in parameters and "ground_truth" in parameters:
        return VerlFunction(function, parameters)
    first = next(iter(parameters), "")
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    later = "completions" in parameters and first != "task" and not getattr(function, "group", False)
    if takes_any and (
        first in ("prompts", "completions") or later
    ):  # (item, completions) is a group function of rollmill
        return TRLFunction(function, parameters)
    asked = _asked_parts(dict(list(parameters.items())[2:]))
    return PartsFunction(function, asked) if asked else function


def unadapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Inverse of `adapt_function`."""
    return function.function if isinstance(function, TRLFunction | VerlFunction | PartsFunction) else function


def _asked_parts(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    return [name for name in _PARTS if name in parameters and _is_required(parameters[name])]


def _part(name: str, completion: Completion) -> str | None:
    reply = completion.parsed_reply
    return reply.content if name == "content" else reply.reasoning


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return {}


class PartsFunction:
    """A reward function `(task, completion)` with parameters `content` or `reasoning`: of a group lists, one entry per
    completion. Options of these names go first."""

    def __init__(self, function: Callable[..., Any], asked: Sequence[str]) -> None:
        self.function, self.asked, self.group = function, asked, bool(getattr(function, "group", False))
        self.is_async = inspect.iscoroutinefunction(function)
        self.__signature__ = inspect.signature(function)

    def __call__(self, task: Task, completion: Any, **options: Any) -> Any:
        """Score one completion, or with `group` all completions of the task."""
        parts = {
            name: [_part(name, each) for each in completion] if self.group else _part(name, completion)
            for name in self.asked
        }
        return self.function(task, completion, **(parts | options))


class TRLFunction:
    """A reward function of TRL. What it passes to `log_metric` is logged; `log_extra` has no effect here.

    Raises TypeError for a function that needs what only TRL has.
    """

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> None:
        self.function, self.group = function, bool(getattr(function, "group", False))
        self.is_async = inspect.iscoroutinefunction(function)
        required = [name for name, each in parameters.items() if _is_required(each)]
        if impossible := [name for name in required if name in _NOT_HERE]:
            raise TypeError(f"it needs `{impossible[0]}`, which only TRL has; give the parameter a default")
        self._asked = _asked_parts(parameters)
        self._columns = [name for name in required if name not in (*_OF_TRL, *_PARTS)]

    def __call__(self, task: Task, completion: Any, **options: Any) -> Any:
        """Score one completion, or with `group` all completions of the task. The result of an async function is
        awaited by the caller."""
        completions: Sequence[Completion] = completion if self.group else [completion]
        logged: dict[str, float] = {}
        found = self.function(**self._arguments(task, completions, logged, options))
        if inspect.isawaitable(found):
            return self._awaited(found, len(completions), logged)
        return self._scores(found, len(completions), logged)

    async def _awaited(self, found: Awaitable[Any], count: int, logged: dict[str, float]) -> Any:
        return self._scores(await found, count, logged)

    def _arguments(
        self, task: Task, completions: Sequence[Completion], logged: dict[str, float], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        chat, count = not isinstance(task.prompt, str), len(completions)
        texts = [each.text for each in completions]
        return {
            **{name: [_part(name, each) for each in completions] for name in self._asked},
            **{name: [value] * count for name, value in self._values(task, options).items()},
            "prompts": [task.prompt] * count,
            "completions": [[{"role": "assistant", "content": text}] for text in texts] if chat else texts,
            "completion_ids": [each.token_ids.tolist() for each in completions],
            "trainer_state": None,
            "log_extra": lambda column, values: None,
            "log_metric": lambda name, value: logged.update({str(name): float(value)}),
            **options,
        }

    def _values(self, task: Task, options: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of the task's row; of those that it has used for the answer, the answer."""
        found = dict.fromkeys(_ANSWERS, task.answer) | dict(task.metadata)
        missing = [name for name in self._columns if name not in found and name not in options]
        if len(missing) == 1 and task.answer is not None:
            return found | {missing[0]: task.answer}
        if missing:
            raise ValueError(
                f"it needs the column `{missing[0]}`, which the task {task.id} does not have: it has "
                f"{', '.join(sorted(task.metadata)) or 'none'}, and its answer"
            )
        return found

    def _scores(self, found: Any, count: int, logged: dict[str, float]) -> Any:
        if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__iter__"):
            raise TypeError(
                f"returned {found!r:.80}; a reward function of TRL returns a list, one value per completion"
            )
        values = [None if each is None else _plain(each) for each in found]
        if len(values) != count:
            raise ValueError(f"returned {len(values)} values for {count} completions")
        scores = [LoggedScore(each, dict(logged)) for each in values]
        return scores if self.group else scores[0]


class VerlFunction:
    """A reward function of verl. Of a result with several numbers `score` is the reward, and the others are logged."""

    group = False

    def __init__(self, function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> None:
        self.function, self.is_async = function, inspect.iscoroutinefunction(function)
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        self._taken = None if takes_any else frozenset(parameters)
        self._asked = _asked_parts(parameters)

    def not_taken(self, options: Mapping[str, Any]) -> list[str]:
        """Options that the function does not take."""
        return [] if self._taken is None else [name for name in options if name not in self._taken]

    def __call__(self, task: Task, completion: Completion, **options: Any) -> Any:
        """Score one completion. The result of an async function is awaited by the caller."""
        extra = task.metadata.get("extra_info", task.metadata)
        arguments = {
            "data_source": task.metadata.get("data_source", task.taskset),
            "solution_str": completion.text,
            "ground_truth": task.answer,
            "extra_info": dict(extra) if isinstance(extra, Mapping) else extra,
        }
        known = {name: value for name, value in arguments.items() if self._taken is None or name in self._taken}
        parts = {name: _part(name, completion) for name in self._asked}
        found = self.function(**(parts | known | options))
        return self._awaited(found) if inspect.isawaitable(found) else self._score(found)

    async def _awaited(self, found: Awaitable[Any]) -> LoggedScore:
        return self._score(await found)

    def _score(self, found: Any) -> LoggedScore:
        if not isinstance(found, Mapping):
            return LoggedScore(_plain(found[0] if isinstance(found, tuple | list) and found else found))
        if "score" not in found:
            raise ValueError(f"returned {found!r:.80}; a mapping of a reward function of verl has the key `score`")
        others = {key: value for key, value in found.items() if key != "score"}
        logged = {str(key): float(value) for key, value in others.items() if isinstance(value, Real)}
        return LoggedScore(_plain(found["score"]), logged)


def _plain(value: Any) -> Any:
    """The number in a tensor of one element; anything else unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _is_required(parameter: inspect.Parameter) -> bool:
    named = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return named and parameter.default is inspect.Parameter.empty
