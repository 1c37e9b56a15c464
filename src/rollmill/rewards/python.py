"""Users' Python functions as rewards: plain ones in processes or threads, async ones in an event loop of their own."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import PicklingError
from typing import Any

from rollmill.config.rewards import PythonReward
from rollmill.core.errors import ConfigError, RewardError
from rollmill.core.registry import reward_function
from rollmill.core.types import Completion, Task
from rollmill.rewards.base import OK, TIMEOUT, Judgement, Value, Verdict, checked_answer
from rollmill.rewards.grader import GraderPool
from rollmill.rewards.resources import Resources
from rollmill.rewards.threads import StuckError, Threads

Function = Callable[..., Any]


def python_reward(config: PythonReward, resources: Resources) -> PythonFunction | PythonGroupFunction:
    """The reward of a user's function. Raises ConfigError when it is missing or does not take the options."""
    function = load_function(config)
    source = None if config.run_in == "thread" or _is_async(function) else source_of(config.function, function)
    if source is None:
        caller: Callable[[list[Any]], Awaitable[_Answer]] = partial(_in_thread, config, function, resources.threads)
    else:
        pool = resources.shared(f"function {source}", lambda: GraderPool(config.processes, memory_bytes=0, quiet=False))
        caller = partial(_in_process, config, source, pool)
    if getattr(function, "group", False):
        return PythonGroupFunction(config, caller, wants_judged="judged" in _parameters(function))
    return PythonFunction(config, caller)


def load_function(config: PythonReward) -> Function:
    """The function of a `python` reward. Raises ConfigError when it is missing or does not take the options."""
    function = reward_function(config.function)
    group = getattr(function, "group", False)
    judged = {"judged": None} if group and "judged" in _parameters(function) else {}
    try:
        inspect.signature(function).bind(None, None, **config.options, **judged)
    except TypeError as error:
        what = "(task, completions)" if group else "(task, completion)"
        options = ", ".join(config.options) or "no options"
        raise ConfigError(
            f"{config.function} is called with {what} and {options}, which it does not take: {error}"
        ) from error
    except ValueError:  # a function written in C has no signature to check
        pass
    return function


def source_of(name: str, function: Function) -> str | None:
    """Where another process finds a function: FILE.py:NAME or package.module:NAME; None where it cannot.

    `name` is how the run file calls it. What is registered by name is looked for in its module.
    """
    source, _, attribute = name.rpartition(":")
    if source:
        return f"{Path(source).absolute()}:{attribute}" if source.endswith(".py") else name
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if file is None or function.__module__ == "__main__" or getattr(module, function.__name__, None) is not function:
        return None
    return f"{file}:{function.__name__}"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the function returned, if it did so in time."""

    value: Any
    in_time: bool
    queued: float = 0.0
    worked: float | None = None


class PythonFunction:
    """A user's `(task, completion, **options) -> number | mapping | None`."""

    def __init__(self, config: PythonReward, caller: Callable[[list[Any]], Awaitable[_Answer]]) -> None:
        self._config, self._caller = config, caller

    async def judge(self, task: Task, completion: Completion) -> Verdict:
        answer = await self._caller([task, completion])
        if not answer.in_time:
            return Verdict(self._config.timeout_reward, TIMEOUT, answer.queued, answer.worked)
        return Verdict(answer.value, OK, answer.queued, answer.worked)


class PythonGroupFunction:
    """A user's function with the attribute `group = True`: (task, completions, **options) -> a value for each.

    One with a parameter `judged` is given what the rewards of single completions said: for each completion a mapping
    of their parts.
    """

    def __init__(
        self, config: PythonReward, caller: Callable[[list[Any]], Awaitable[_Answer]], *, wants_judged: bool
    ) -> None:
        self._config, self._caller, self._wants_judged = config, caller, wants_judged

    async def judge_group(
        self, task: Task, completions: Sequence[Completion], judged: Sequence[Judgement]
    ) -> list[Verdict]:
        arguments = [task, list(completions)]
        answer = await self._caller(arguments + ([[each.parts for each in judged]] if self._wants_judged else []))
        if not answer.in_time:
            return [Verdict(self._config.timeout_reward, TIMEOUT, answer.queued, answer.worked)] * len(completions)
        values: list[Value] = answer.value
        return [Verdict(value, OK, answer.queued, answer.worked) for value in values]


async def _in_process(config: PythonReward, source: str, pool: GraderPool, arguments: list[Any]) -> _Answer:
    options = dict(config.options)
    if len(arguments) == 3:
        options["judged"] = arguments.pop()
    try:
        reply = await pool.ask("python", (arguments, options), config.time_limit_s, setup=source)
    except (TypeError, AttributeError, PicklingError) as error:
        raise RewardError(f"the task cannot be sent to another process ({error}); set run_in: thread") from error
    if reply.outcome not in (OK, TIMEOUT):
        raise RewardError(f"it ran out of {reply.outcome}")
    return _Answer(reply.value, reply.outcome == OK, reply.queued, reply.worked)


async def _in_thread(config: PythonReward, function: Function, threads: Threads, arguments: list[Any]) -> _Answer:
    """Plain functions in a thread; awaitables in the event loop of `threads`."""
    options = dict(config.options)
    if len(arguments) == 3:
        options["judged"] = arguments.pop()
    call, loop = partial(function, *arguments, **options), asyncio.get_running_loop()
    started = loop.time()
    if _is_async(function):
        found, in_time = await threads.run(_within(call, config.time_limit_s))
    else:
        try:
            found, in_time = await threads.call(config.function, call, config.time_limit_s), True
        except StuckError:
            found, in_time = None, False
        if inspect.isawaitable(found):
            left = config.time_limit_s - (loop.time() - started)
            awaitable = found
            found, in_time = await threads.run(_within(lambda: awaitable, max(left, 0.0)))
    return _Answer(checked_answer(found, isinstance(arguments[1], list)) if in_time else None, in_time)


def _parameters(function: Function) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:
        return []


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
