"""Tool that runs the policy's Python programs in the sandbox."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from rollmill.config.tools import PythonTool
from rollmill.program_sandbox import ProgramSandbox
from rollmill.rollout.tools.function_tool import FunctionTool
from rollmill.rollout.tools.pool import ToolFactory, ToolPool
from rollmill.rollout.tools.toolbox import Tool, ToolError
from rollmill.types import Task
from rollmill_sandbox import Sandbox, SandboxLimits, SandboxSession, SessionExecution

_OUTPUT_BYTES = 1 << 18


def build_python_tool(section: PythonTool, pool: ToolPool) -> ToolFactory:
    """Build the tool, with a sandbox that all rollouts share."""
    sandbox = ProgramSandbox(
        packages=section.packages, jobs=section.jobs, sessions=section.sessions, backend=section.sandbox
    )
    pool.close_later(sandbox.close)
    made = FunctionTool(python)

    def open_(task: Task, stack: AsyncExitStack) -> Tool:
        interpreter = PythonInterpreter(section, sandbox, stack)

        async def call(arguments: dict[str, Any]) -> str:
            return await interpreter.run(**made.checked(arguments))

        return made.tool(section.policy_name, section.description, call)

    return open_


def python(code: str) -> str:
    """Run Python code. What it prints comes back, and the value of its last line where that is an expression.

    Args:
        code: a program.
    """
    raise NotImplementedError  # the policy sees signature and docstring; PythonInterpreter runs the code


class PythonInterpreter:
    """Runs the Python programs of one rollout. Its session starts with the first program.

    Args:
        stack: closes the session at the end of the rollout.
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
        """Run a program; return its output and value. Raises ToolError if it fails."""
        async with self._turn:
            if self._config.state == "call":
                async with self._sandbox.session(limits=self._limits) as session:
                    return self._format_output(await session.execute(code))
            if self._session is None or self._session.ended:
                opened = self._sandbox.session(limits=self._limits, idle_s=86_400.0)
                self._session = await self._stack.enter_async_context(opened)
            return self._format_output(await self._session.execute(code))

    def _format_output(self, found: SessionExecution) -> str:
        printed = "\n".join(each for each in (found.stdout.rstrip("\n"), found.value) if each)
        if found.outcome == "ok":
            return printed
        lost = "" if self._config.state == "call" else "; the interpreter has ended, and its names are lost"
        failure = {
            "error": found.stderr.strip() or "the program failed",
            "timeout": f"the program was still running after {self._config.time_limit_s:g} s{lost}",
            "memory": f"out of memory ({self._config.memory_mb} MiB){lost}",
            "output": f"too much output{lost}",
        }.get(found.outcome, f"the program was killed{lost}")
        raise ToolError("\n".join(each for each in (printed, failure) if each))
