"""Python programs of a policy, run in the sandbox."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from rollmill.config.tools import PythonTool
from rollmill.rollout.tools.toolbox import ToolError
from rollmill.sandbox import Sandbox, SandboxLimits, SandboxSession, SessionExecution

_OUTPUT_BYTES = 1 << 18


def python(code: str) -> str:
    """Run Python code. What it prints comes back, and the value of its last line where that is an expression.

    Args:
        code: a program.
    """
    raise NotImplementedError  # its signature and docstring are what the policy sees; an Interpreter runs it


class PythonInterpreter:
    """What executes the programs of one rollout. An interpreter starts with the first of them.

    Args:
        stack: closes what was opened, at the end of the rollout.
    """

    def __init__(self, config: PythonTool, sandbox: Sandbox, stack: AsyncExitStack) -> None:
        self._config, self._sandbox, self._stack = config, sandbox, stack
        self._limits = SandboxLimits(
            wall_s=config.time_limit_s,
            cpu_s=int(config.time_limit_s) + 1,
            memory_mb=config.memory_mb,
            output_bytes=_OUTPUT_BYTES,
        )
        self._session: SandboxSession | None = None
        self._turn = asyncio.Lock()

    async def run(self, code: str) -> str:
        """What a program prints, and its value. Raises ToolError with what went wrong."""
        async with self._turn:
            if self._config.state == "call":
                async with self._sandbox.session(limits=self._limits) as session:
                    return self._told(await session.execute(code))
            if self._session is None or self._session.ended:
                opened = self._sandbox.session(limits=self._limits, idle_s=86_400.0)
                self._session = await self._stack.enter_async_context(opened)
            return self._told(await self._session.execute(code))

    def _told(self, found: SessionExecution) -> str:
        printed = "\n".join(each for each in (found.stdout.rstrip("\n"), found.value) if each)
        if found.outcome == "ok":
            return printed
        lost = "" if self._config.state == "call" else "; the interpreter has ended, and its names are lost"
        says = {
            "error": found.stderr.strip() or "the program failed",
            "timeout": f"the program was still running after {self._config.time_limit_s:g} s{lost}",
            "memory": f"out of memory ({self._config.memory_mb} MiB){lost}",
            "output": f"too much output{lost}",
        }.get(found.outcome, f"the program was killed{lost}")
        raise ToolError("\n".join(each for each in (printed, says) if each))
