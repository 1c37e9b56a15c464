"""Builds tools from the section `tools`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from rollmill.config.tools import CalculatorTool, PythonTool, SearchTool, ToolSection
from rollmill.errors import ConfigError, WorkflowError
from rollmill.rewards.function_threads import FunctionThreads
from rollmill.rollout.tools.function_tool import FunctionTool
from rollmill.rollout.tools.toolbox import MALFORMED_CALLS, UNKNOWN_CALLS, Tool, Toolbox
from rollmill.rollout.workflow import Rollout
from rollmill.types import Task

ToolFactory = Callable[[Task, AsyncExitStack], Tool]
"""Creates a tool for one rollout; its resources are closed with the stack."""


class ToolPool:
    """The tools of a stage: built once, opened for each rollout.

    Raises ConfigError: two have the same name, a library is missing, or documents cannot be read.
    """

    def __init__(self, sections: Sequence[ToolSection]) -> None:
        self._sections = list(sections)
        self._threads = FunctionThreads("tool", WorkflowError)
        self._closing: list[Callable[[], None]] = [self._threads.close]
        self._counters: dict[str, float] = {}
        names = [section.policy_name for section in sections]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"tools: two are called `{name}`; give one of them another name with `called`")
            self._counters |= {f"{name}/{key}": 0.0 for key in ("calls", "errors", "seconds")}
        self._counters |= {MALFORMED_CALLS: 0.0, UNKNOWN_CALLS: 0.0}
        self._open = [self._opener(section) for section in sections]
        self._result_chars = {section.policy_name: section.result_chars for section in sections}

    @asynccontextmanager
    async def one(self, rollout: Rollout) -> AsyncIterator[Toolbox]:
        """Open the tools for one rollout."""
        async with AsyncExitStack() as stack:
            tools = [make(rollout.task, stack) for make in self._open]
            yield Toolbox(tools, self._result_chars, self._counters)

    def counters(self) -> dict[str, float]:
        """Sums so far: NAME/calls, NAME/errors, NAME/seconds, malformed and unknown."""
        return dict(self._counters)

    def close(self) -> None:
        """Stop processes and threads; may be called twice."""
        while self._closing:
            self._closing.pop()()

    def _opener(self, section: ToolSection) -> ToolFactory:
        function = type(section).function
        if function is not None:
            return self._in_threads(section, FunctionTool(function), section.arguments())
        match section:
            case CalculatorTool():
                from rollmill.rollout.tools.calculator import calculator

                return _inline_tool(section, FunctionTool(calculator), calculator)
            case PythonTool():
                return self._python(section)
            case SearchTool():
                from rollmill.rollout.tools.search import BM25Index, search

                return self._in_threads(
                    section,
                    FunctionTool(search),
                    {"index": BM25Index(section.path, section.passage_words), "top_k": section.top_k},
                )
        raise AssertionError(f"no tool is built from {type(section).__name__}")

    def _in_threads(self, section: ToolSection, made: FunctionTool, options: dict[str, Any]) -> ToolFactory:
        """Build a tool that runs in threads, as it may be slow; `options` are its keyword-only parameters."""
        name, limit = section.policy_name, section.time_limit_s

        def open_(task: Task, stack: AsyncExitStack) -> Tool:
            return made.tool(name, section.description, made.caller(task, options, self._threads, limit))

        return open_

    def _python(self, section: PythonTool) -> ToolFactory:
        from rollmill.rollout.tools.python import PythonInterpreter, python
        from rollmill.sandbox import Sandbox

        sandbox = Sandbox(
            packages=section.packages, jobs=section.jobs, sessions=section.sessions, backend=section.sandbox
        )
        self._closing.append(sandbox.close)
        made = FunctionTool(python)

        def open_(task: Task, stack: AsyncExitStack) -> Tool:
            interpreter = PythonInterpreter(section, sandbox, stack)

            async def call(arguments: dict[str, Any]) -> str:
                return await interpreter.run(**made.checked(arguments))

            return made.tool(section.policy_name, section.description, call)

        return open_


def _inline_tool(section: ToolSection, made: FunctionTool, work: Callable[..., str]) -> ToolFactory:
    """Build a fast tool without state, which runs in the event loop."""

    async def call(arguments: dict[str, Any]) -> str:
        return work(**made.checked(arguments))

    tool = made.tool(section.policy_name, section.description, call)
    return lambda task, stack: tool
