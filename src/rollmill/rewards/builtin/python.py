"""Users' Python functions as rewards: plain ones inline, in processes or threads, async ones in an event loop."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from rollmill.config.rewards import Reward
from rollmill.errors import ConfigError, RewardError
from rollmill.rewards.base import OK, TIMEOUT, RewardResult, RewardValue, Score
from rollmill.rewards.values import validate_result
from rollmill.types import Completion, Task

if TYPE_CHECKING:
    from rollmill.rewards.function_threads import FunctionThreads
    from rollmill.rewards.inline_calls import InlineCalls
    from rollmill.rewards.resources import RewardResources
    from rollmill_grading.grader_pool import GraderPool

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _FunctionResult:
    """The values that the function returned, if it did in time, and of each the numbers that are only logged."""

    values: list[RewardValue]
    details: list[dict[str, float]]
    in_time: bool
    queue_s: float = 0.0
    run_s: float | None = None


class PythonReward(Reward):
    """A user's function `(task, completion) -> float | dict | None`, plain or async; or one written for TRL or verl."""

    name: Literal["python"]
    function: str
    """`FILE.py:NAME`, `package.module:NAME`, or the name of a reward registered by a plugin; `FILE.pkl:NAME` of a
    function that the Python interface has stored."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function."""
    time_limit_s: float = Field(60.0, gt=0)
    """Timeout of one call; the outcome is then `timeout`."""
    run_in: Literal["auto", "process", "thread"] = "auto"
    """Isolation of a plain function. Processes do not slow down rollouts and can be killed; each has its own copy of
    the file's global variables. `auto`: in the run's own process as long as calls are quick (50 ms at most, 1 ms on
    average), then in processes. An async function runs in an event loop of this process."""
    processes: int = Field(4, ge=1)
    """Maximum number of processes for this function; each starts on first use."""
    _caller: Callable[[list[Any]], Awaitable[_FunctionResult]]
    _inline: InlineCalls | None
    _in_groups: bool
    _wants_judged: bool

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        if re.fullmatch(r".+\.(py|pkl):\w+|[\w.]+(:\w+)?", value) is None:
            text = "expected FILE.py:NAME, package.module:NAME or the name a plugin registers"
            raise ValueError(f"{text}, found `{value}`")
        return value

    @property
    def part_name(self) -> str:
        return PurePath(self.function).name.rpartition(":")[2]

    @property
    def scope(self) -> Literal["completion", "group"]:  # type: ignore[override]
        """Says what the function takes, once it is loaded (`prepare`)."""
        return "group" if self._in_groups else "completion"

    def setup(self, resources: RewardResources) -> None:
        """Load the function. Raises ConfigError if it is missing or does not take the options."""
        from rollmill.rewards.foreign_functions import unadapted
        from rollmill.rewards.inline_calls import InlineCalls
        from rollmill.rewards.worker_functions import PYTHON
        from rollmill_grading.grader_pool import GraderPool

        function = load_reward_function(self)
        self._in_groups = getattr(function, "group", False)
        self._wants_judged = self._in_groups and "judged" in _parameters(function)
        self._inline = None
        in_process = self.run_in != "thread" and not _is_async(function)
        source = function_source(self.function, unadapted(function)) if in_process else None
        if source is None:
            self._caller = partial(_in_thread, self, function, resources.threads)
            return
        pool = resources.pool(
            f"function {source} {self.processes}",
            lambda: GraderPool(self.processes, memory_bytes=0, quiet=False),
        )
        warm = partial(resources.will_load, pool, PYTHON, source)
        if self.run_in == "process":
            warm()
        else:
            self._inline = InlineCalls(self.function, function, warm)
        self._caller = partial(_in_process, self, source, pool)

    def begin(self, task: Task, completion: Completion) -> Score | Awaitable[Score]:
        answer = self._call_inline([task, completion])
        if answer is None:
            return self.score(task, completion)
        return Score(answer.values[0], OK, 0.0, answer.run_s, answer.details[0])

    async def score(self, task: Task, completion: Completion) -> Score:
        answer = await self._caller([task, completion])
        if not answer.in_time:
            return Score(self.timeout_reward, TIMEOUT, answer.queue_s, answer.run_s)
        return Score(answer.values[0], OK, answer.queue_s, answer.run_s, answer.details[0])

    async def score_group(
        self, task: Task, completions: Sequence[Completion], judged: Sequence[RewardResult]
    ) -> list[Score]:
        """Call a function with the attribute `group = True`: (task, completions, **options) -> a value for each.

        A function with a parameter `judged` receives the results of the single-completion rewards: for each completion
        a mapping of their parts.
        """
        arguments = [task, list(completions), *([[each.parts for each in judged]] if self._wants_judged else [])]
        answer = self._call_inline(arguments) or await self._caller(arguments)
        if not answer.in_time:
            return [Score(self.timeout_reward, TIMEOUT, answer.queue_s, answer.run_s)] * len(completions)
        found = zip(answer.values, answer.details, strict=True)
        return [Score(value, OK, answer.queue_s, answer.run_s, details) for value, details in found]

    def _call_inline(self, arguments: list[Any]) -> _FunctionResult | None:
        """Call the function here, if it is quick."""
        if self._inline is None:
            return None
        read = partial(validate_result, in_groups=isinstance(arguments[1], list))
        try:
            found = self._inline.call(*_with_options(self, arguments), read)
        except _NOT_COPIED as error:
            raise _not_copied(error) from error
        if found is None:
            return None
        (values, details), seconds = found
        return _FunctionResult(values, details, in_time=True, run_s=seconds)


def load_reward_function(config: PythonReward) -> RewardFunction:
    """Load the function of a `python` reward; one that was written for TRL or verl is adapted.

    Raises ConfigError if it is missing or does not take the options.
    """
    from rollmill.registry import find_reward
    from rollmill.rewards.foreign_functions import PartsFunction, VerlFunction, adapt_function

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
    from rollmill.user_code import STORED

    source, _, attribute = name.rpartition(":")
    if source:
        return f"{Path(source).absolute()}:{attribute}" if source.endswith((".py", STORED)) else name
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if file is None or function.__module__ == "__main__" or getattr(module, function.__name__, None) is not function:
        return None
    return f"{file}:{function.__name__}"


async def _in_process(config: PythonReward, source: str, pool: GraderPool, arguments: list[Any]) -> _FunctionResult:
    from rollmill.rewards.worker_functions import PYTHON

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
    import asyncio

    from rollmill.rewards.function_threads import FunctionTimeoutError

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
    import asyncio

    from rollmill.rewards.function_threads import start_user_task

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
