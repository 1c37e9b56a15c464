"""Builds tools from the section `tools`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from rollmill.concurrency import FunctionThreads
from rollmill.config.tools import ToolSection
from rollmill.errors import ConfigError, WorkflowError
from rollmill.registry import build_component
from rollmill.rollout.tools.function_tool import FunctionTool
from rollmill.rollout.tools.toolbox import MALFORMED_CALLS, UNKNOWN_CALLS, Tool, Toolbox
from rollmill.rollout.workflow import Rollout

ToolFactory = Callable[[Rollout, AsyncExitStack], Tool | Sequence[Tool]]
"""Creates a tool, or several, for one rollout; their resources are closed with the stack."""


class ToolPool:
    """The tools of a stage: built once, opened for each rollout.

    Raises ConfigError: two have the same name, a library is missing, or documents cannot be read.
    """

    def __init__(self, sections: Sequence[ToolSection]) -> None:
        self._sections = list(sections)
        self._threads = FunctionThreads("tool", WorkflowError)
        self._closing: list[Callable[[], None]] = [self._threads.close]
        self._counters: dict[str, float] = {}
        self._result_chars: dict[str, int] = {}
        for section in sections:
            if not section.many:
                self.add_name(section.policy_name, section)
        self._counters |= {MALFORMED_CALLS: 0.0, UNKNOWN_CALLS: 0.0}
        try:
            self._open: list[ToolFactory] = [
                build_component(section, self).open
                if (function := type(section).function) is None
                else self.in_threads(section, FunctionTool(function), section.arguments())
                for section in sections
            ]
        except BaseException:
            self.close()
            raise

    def add_name(self, name: str, section: ToolSection) -> None:
        """Add the name of a tool. Raises ConfigError if another one has it."""
        if name in self._result_chars:
            raise ConfigError(f"tools: two are called `{name}`; give one of them another name with `called`")
        self._result_chars[name] = section.result_chars
        self._counters |= {f"{name}/{key}": 0.0 for key in ("calls", "errors", "seconds")}

    @asynccontextmanager
    async def one(self, rollout: Rollout) -> AsyncIterator[Toolbox]:
        """Open the tools for one rollout."""
        async with AsyncExitStack() as stack:
            made = [open_(rollout, stack) for open_ in self._open]
            tools = [tool for each in made for tool in ([each] if isinstance(each, Tool) else each)]
            folder = rollout.policy.folder if rollout.policy is not None and rollout.policy.sees else None
            yield Toolbox(tools, self._result_chars, self._counters, folder=folder)

    def counters(self) -> dict[str, float]:
        """Sums so far: NAME/calls, NAME/errors, NAME/seconds, malformed and unknown."""
        return dict(self._counters)

    def close(self) -> None:
        """Stop processes and threads; may be called twice."""
        while self._closing:
            self._closing.pop()()

    def close_later(self, close: Callable[[], None]) -> None:
        """Call `close` when the pool is closed."""
        self._closing.append(close)

    def in_threads(self, section: ToolSection, made: FunctionTool, options: dict[str, Any]) -> ToolFactory:
        """Build a tool that runs in threads, as it may be slow; `options` are its keyword-only parameters."""
        name, limit = section.policy_name, section.time_limit_s

        def open_(rollout: Rollout, stack: AsyncExitStack) -> Tool:
            return made.tool(name, section.description, made.caller(rollout.task, options, self._threads, limit))

        return open_
