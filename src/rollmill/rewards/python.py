"""Users' Python functions as rewards."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from rollmill.config.rewards import PythonReward
from rollmill.core.errors import ConfigError
from rollmill.core.registry import reward_function
from rollmill.core.types import Completion, Task
from rollmill.rewards.base import OK, TIMEOUT, Judgement, Verdict, checked_value
from rollmill.rewards.resources import Resources
from rollmill.rewards.threads import StuckError, Threads

Function = Callable[..., Any]


def load_function(config: PythonReward) -> Function:
    """The function of a `python` reward. Raises ConfigError when it is missing or does not take the options."""
    function = reward_function(config.function)
    group = getattr(function, "group", False)
    try:
        inspect.signature(function).bind(None, None, **config.options)
    except TypeError as error:
        what = "(task, completions)" if group else "(task, completion)"
        options = ", ".join(config.options) or "no options"
        raise ConfigError(
            f"{config.function} is called with {what} and {options}, which it does not take: {error}"
        ) from error
    except ValueError:  # a function written in C has no signature to check
        pass
    return function


def python_reward(config: PythonReward, resources: Resources) -> PythonFunction | PythonGroupFunction:
    """The reward of a user's function. Raises ConfigError when it is missing or does not take the options."""
    function = load_function(config)
    kind = PythonGroupFunction if getattr(function, "group", False) else PythonFunction
    return kind(config, function, resources.threads)


class PythonFunction:
    """A user's `(task, completion, **options) -> number | mapping | None`, plain (in a thread) or async."""

    def __init__(self, config: PythonReward, function: Function, threads: Threads) -> None:
        self._config, self._function, self._threads = config, function, threads

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        found, in_time = await _call(self._config, self._function, self._threads, task, completion)
        return Verdict(checked_value(found), OK) if in_time else Verdict(self._config.timeout_reward, TIMEOUT)


class PythonGroupFunction:
    """A user's function with the attribute `group = True`: (task, completions, **options) -> a value for each."""

    def __init__(self, config: PythonReward, function: Function, threads: Threads) -> None:
        self._config, self._function, self._threads = config, function, threads

    async def judge_group(
        self, task: Task, completions: Sequence[Completion], judged: Sequence[Judgement]
    ) -> list[Verdict]:
        found, in_time = await _call(self._config, self._function, self._threads, task, list(completions))
        if not in_time:
            return [Verdict(self._config.timeout_reward, TIMEOUT)] * len(completions)
        if isinstance(found, str | bytes | dict) or not hasattr(found, "__iter__"):
            raise TypeError(f"returned {found!r:.80}; a group reward returns a list with one value per completion")
        return [Verdict(checked_value(value), OK) for value in found]


async def _call(config: PythonReward, function: Function, threads: Threads, *args: Any) -> Any:
    """What the function returned, and whether it did so in time."""
    call = partial(function, *args, **config.options)
    if _is_async(function):
        return await threads.run(_within(call, config.time_limit_s))
    started = asyncio.get_running_loop().time()
    try:
        found = await threads.call(config.function, call, config.time_limit_s)
    except StuckError:
        return None, False
    if not inspect.isawaitable(found):
        return found, True
    left = config.time_limit_s - (asyncio.get_running_loop().time() - started)
    return await threads.run(_within(lambda: found, max(left, 0.0)))


def _is_async(function: Function) -> bool:
    called = function if inspect.isroutine(function) else type(function).__call__
    return inspect.iscoroutinefunction(called)


async def _within(work: Callable[[], Awaitable[Any]], seconds: float) -> Any:
    """What the awaitable gives, and whether it did so in time."""
    task = asyncio.ensure_future(work())
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            return None, False
        if task.cancelled():
            raise RuntimeError("it cancelled itself")
        return task.result(), True
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)
