"""Users' Python functions as rewards: plain ones inline, in processes or threads, async ones in an event loop."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from rollmill.config.rewards import Reward
from rollmill.errors import ConfigError
from rollmill.rewards.base import OK, TIMEOUT, RewardResult, Score
from rollmill.rewards.foreign_functions import PartsFunction, VerlFunction, adapt_function, unadapted
from rollmill.types import Completion, Task
from rollmill.user_code import function_source

if TYPE_CHECKING:
    from rollmill.rewards.function_calls import ProcessCalls, ThreadCalls
    from rollmill.rewards.resources import RewardResources
    from rollmill_grading.worker_process import GraderResult

RewardFunction = Callable[..., Any]


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
    _calls: ProcessCalls | ThreadCalls
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
        from rollmill.rewards.function_calls import PYTHON, ProcessCalls, ThreadCalls
        from rollmill_grading.grader_pool import GraderPool

        function = load_reward_function(self)
        self._in_groups = getattr(function, "group", False)
        self._wants_judged = self._in_groups and "judged" in _parameters(function)
        is_async = _is_async(function)
        in_process = self.run_in != "thread" and not is_async
        source = function_source(self.function, unadapted(function)) if in_process else None
        if source is None:
            self._calls = ThreadCalls(self.function, function, resources.threads, self.time_limit_s, is_async=is_async)
            return
        pool = resources.pool(
            f"function {source} {self.processes}",
            lambda: GraderPool(self.processes, memory_bytes=0, quiet=False),
        )
        warm = partial(resources.will_load, pool, PYTHON, source)
        quick = self.run_in == "auto"
        self._calls = ProcessCalls(self.function, function, pool, source, self.time_limit_s, quick=quick, warm=warm)

    def begin(self, task: Task, completion: Completion) -> Score | Awaitable[Score]:
        result = self._calls.inline([task, completion], self.options)
        return self.score(task, completion) if result is None else self._scores(result, 1)[0]

    async def score(self, task: Task, completion: Completion) -> Score:
        return self._scores(await self._calls.call([task, completion], self.options), 1)[0]

    async def score_group(
        self, task: Task, completions: Sequence[Completion], judged: Sequence[RewardResult]
    ) -> list[Score]:
        """Call a function with the attribute `group = True`: (task, completions, **options) -> a value for each.

        A function with a parameter `judged` receives the results of the single-completion rewards: for each completion
        a mapping of their parts.
        """
        arguments = [task, list(completions)]
        options = self.options | ({"judged": [each.parts for each in judged]} if self._wants_judged else {})
        result = self._calls.inline(arguments, options) or await self._calls.call(arguments, options)
        return self._scores(result, len(completions))

    def _scores(self, result: GraderResult, count: int) -> list[Score]:
        if result.outcome == TIMEOUT:
            return [Score(self.timeout_reward, TIMEOUT, result.queue_s, result.run_s)] * count
        found = zip(*result.value, strict=True)
        return [Score(value, OK, result.queue_s, result.run_s, details) for value, details in found]


def load_reward_function(config: PythonReward) -> RewardFunction:
    """Load the function of a `python` reward; one that was written for TRL or verl is adapted.

    Raises ConfigError if it is missing or does not take the options.
    """
    from rollmill.registry import find_reward

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
