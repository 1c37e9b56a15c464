"""Users' Python functions as rewards: plain ones inline, in processes or threads, async ones in an event loop."""

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

from rollmill.config.rewards.base import PythonReward
from rollmill.errors import ConfigError, RewardError
from rollmill.registry import find_reward
from rollmill.rewards.base import OK, TIMEOUT, RewardResult, RewardValue, Score
from rollmill.rewards.foreign_functions import PartsFunction, VerlFunction, adapt_function, unadapted
from rollmill.rewards.function_threads import FunctionThreads, FunctionTimeoutError, start_user_task
from rollmill.rewards.inline_calls import InlineCalls
from rollmill.rewards.resources import RewardResources
from rollmill.rewards.values import validate_result
from rollmill.rewards.worker_functions import PYTHON
from rollmill.types import Completion, Task
from rollmill.user_code import STORED
from rollmill_grading.grader_pool import GraderPool

RewardFunction = Callable[..., Any]


def build_python_reward(config: PythonReward, resources: RewardResources) -> PythonScorer | PythonGroupScorer:
    """Build the reward of a user's function. Raises ConfigError if it is missing or does not take the options."""
    function = load_reward_function(config)
    in_process = config.run_in != "thread" and not _is_async(function)
    source = function_source(config.function, unadapted(function)) if in_process else None
    inline = None
    if source is None:
        caller: Callable[[list[Any]], Awaitable[_FunctionResult]] = partial(
            _in_thread, config, function, resources.threads
        )
    else:
        pool = resources.pool(
            f"function {source} {config.processes}",
            lambda: GraderPool(config.processes, memory_bytes=0, quiet=False),
        )
        warm = partial(resources.will_load, pool, PYTHON, source)
        if config.run_in == "process":
            warm()
        else:
            inline = InlineCalls(config.function, function, warm)
        caller = partial(_in_process, config, source, pool)
    if getattr(function, "group", False):
        return PythonGroupScorer(config, caller, inline, wants_judged="judged" in _parameters(function))
    return PythonScorer(config, caller, inline)


def load_reward_function(config: PythonReward) -> RewardFunction:
    """Load the function of a `python` reward; one that was written for TRL or verl is adapted.

    Raises ConfigError if it is missing or does not take the options.
    """
    function = find_reward(config.function)
    try:
        function = adapt_function(function)
    except TypeError as error:
        raise ConfigError(f"{config.function}: {error}") from error
    if isinstance(function, VerlFunction) and (unknown := function.not_taken(config.options)):
        raise ConfigError(f"{config.function} takes no option `{unknown[0]}`; correct the reward's `options`")
    group = getattr(function, "group", False)
    judged = {"judged": None} if group and "judged" in _parameters(function) else {}
    parts = dict.fromkeys(function.asked) if isinstance(function, PartsFunction) else {}
    try:
        inspect.signature(function).bind(None, None, **(parts | config.options), **judged)
    except TypeError as error:
        what = "(task, completions)" if group else "(task, completion)"
        options = ", ".join(config.options) or "no options"
        raise ConfigError(
            f"{config.function} is called with {what} and {options}, which it does not take: {error}"
        ) from error
    except ValueError:  # a function written in C has no signature to check
        pass
    return function


def function_source(name: str, function: RewardFunction) -> str | None:
    """Return the import path of a function for another process: FILE.py:NAME, FILE.pkl:NAME or package.module:NAME, or
    None.

    `name` is its name in the run file. A function registered by name is looked up in its module.
    """
    source, _, attribute = name.rpartition(":")
    if source:
        return f"{Path(source).absolute()}:{attribute}" if source.endswith((".py", STORED)) else name
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if file is None or function.__module__ == "__main__" or getattr(module, function.__name__, None) is not function:
        return None
    return f"{file}:{function.__name__}"


@dataclass(frozen=True, slots=True)
class _FunctionResult:
    """The values that the function returned, if it did in time, and of each the numbers that are only logged."""

    values: list[RewardValue]
    details: list[dict[str, float]]
    in_time: bool
    queue_s: float = 0.0
    run_s: float | None = None


class PythonScorer:
    """A user's `(task, completion, **options) -> number | mapping | None`."""

    def __init__(
        self,
        config: PythonReward,
        caller: Callable[[list[Any]], Awaitable[_FunctionResult]],
        inline: InlineCalls | None = None,
    ) -> None:
        self._config, self._caller, self._inline = config, caller, inline

    def begin(self, task: Task, completion: Completion) -> Score | Awaitable[Score]:
        answer = _inline(self._config, self._inline, [task, completion])
        if answer is None:
            return self.score(task, completion)
        return Score(answer.values[0], OK, 0.0, answer.run_s, answer.details[0])

    async def score(self, task: Task, completion: Completion) -> Score:
        answer = await self._caller([task, completion])
        if not answer.in_time:
            return Score(self._config.timeout_reward, TIMEOUT, answer.queue_s, answer.run_s)
        return Score(answer.values[0], OK, answer.queue_s, answer.run_s, answer.details[0])


class PythonGroupScorer:
    """A user's function with the attribute `group = True`: (task, completions, **options) -> a value for each.

    A function with a parameter `judged` receives the results of the single-completion rewards: for each completion a
    mapping of their parts.
    """

    def __init__(
        self,
        config: PythonReward,
        caller: Callable[[list[Any]], Awaitable[_FunctionResult]],
        inline: InlineCalls | None = None,
        *,
        wants_judged: bool,
    ) -> None:
        self._config, self._caller, self._inline, self._wants_judged = config, caller, inline, wants_judged

    async def score_group(
        self, task: Task, completions: Sequence[Completion], judged: Sequence[RewardResult]
    ) -> list[Score]:
        arguments = [task, list(completions), *([[each.parts for each in judged]] if self._wants_judged else [])]
        answer = _inline(self._config, self._inline, arguments) or await self._caller(arguments)
        if not answer.in_time:
            return [Score(self._config.timeout_reward, TIMEOUT, answer.queue_s, answer.run_s)] * len(completions)
        found = zip(answer.values, answer.details, strict=True)
        return [Score(value, OK, answer.queue_s, answer.run_s, details) for value, details in found]


def _inline(config: PythonReward, inline: InlineCalls | None, arguments: list[Any]) -> _FunctionResult | None:
    """Call the function here, if it is quick."""
    if inline is None:
        return None
    read = partial(validate_result, in_groups=isinstance(arguments[1], list))
    try:
        found = inline.call(*_with_options(config, arguments), read)
    except _NOT_COPIED as error:
        raise _not_copied(error) from error
    if found is None:
        return None
    (values, details), seconds = found
    return _FunctionResult(values, details, in_time=True, run_s=seconds)


async def _in_process(config: PythonReward, source: str, pool: GraderPool, arguments: list[Any]) -> _FunctionResult:
    try:
        reply = await pool.ask(PYTHON, _with_options(config, arguments), config.time_limit_s, setup=source)
    except _NOT_COPIED as error:
        raise _not_copied(error) from error
    if reply.outcome not in (OK, TIMEOUT):
        raise RewardError(f"it ran out of {reply.outcome}")
    values, details = reply.value if reply.outcome == OK else ([], [])
    return _FunctionResult(values, details, reply.outcome == OK, reply.queue_s, reply.run_s)


async def _in_thread(
    config: PythonReward, function: RewardFunction, threads: FunctionThreads, arguments: list[Any]
) -> _FunctionResult:
    """Run plain functions in a thread, awaitables in the event loop of `threads`."""
    positional, options = _with_options(config, arguments)
    call, loop = partial(function, *positional, **options), asyncio.get_running_loop()
    started = loop.time()
    if _is_async(function):
        found, in_time = await threads.run(config.function, _within(call, config.time_limit_s), config.time_limit_s)
    else:
        try:
            found, in_time = await threads.call(config.function, call, config.time_limit_s), True
        except FunctionTimeoutError:
            found, in_time = None, False
        if inspect.isawaitable(found):
            left = config.time_limit_s - (loop.time() - started)
            work = _within(lambda: found, max(left, 0.0))
            found, in_time = await threads.run(config.function, work, config.time_limit_s)
    values, details = validate_result(found, isinstance(arguments[1], list)) if in_time else ([], [])
    return _FunctionResult(values, details, in_time)


_NOT_COPIED = (TypeError, AttributeError, PicklingError)


def _not_copied(error: Exception) -> RewardError:
    return RewardError(f"the task cannot be sent to another process ({error}); set run_in: thread")


def _with_options(config: PythonReward, arguments: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Split into positional and keyword arguments; a third one is `judged`."""
    return arguments[:2], config.options | ({"judged": arguments[2]} if len(arguments) == 3 else {})


def _parameters(function: RewardFunction) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:
        return []


def _is_async(function: RewardFunction) -> bool:
    if getattr(function, "is_async", False):
        return True
    called = function if inspect.isroutine(function) else type(function).__call__
    return inspect.iscoroutinefunction(called)


async def _within(work: Callable[[], Awaitable[Any]], seconds: float) -> Any:
    """Return the awaitable's result, and whether it came in time."""
    task = start_user_task(work())
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
