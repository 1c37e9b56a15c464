"""Tool that runs the policy's Python programs in the sandbox."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PrivateAttr

from rollmill.config.tools import ToolSection
from rollmill.rollout.tools.toolbox import ToolError

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from rollmill.rollout.tools.function_tool import FunctionTool
    from rollmill.rollout.tools.pool import ToolPool
    from rollmill.rollout.tools.toolbox import Tool
    from rollmill.rollout.workflow import Rollout
    from rollmill_sandbox import Sandbox, SandboxSession, SessionExecution

_OUTPUT_BYTES = 1 << 18


class PythonTool(ToolSection):
    """Python programs in the sandbox."""

    name: Literal["python"] = "python"
    state: Literal["rollout", "call"] = "rollout"
    """Lifetime of variables: all calls of a rollout share an interpreter, or each call has a fresh one."""
    packages: list[str] = []
    """Import names of packages that programs may use besides the standard library, and their dependencies."""
    memory_mb: int = Field(512, ge=32)
    """Address space of each process, MiB."""
    jobs: int = Field(0, ge=0)
    """Maximum number of concurrent programs. 0: one per CPU core."""
    sessions: int = Field(64, ge=1)
    """Maximum number of concurrent interpreters, one per rollout; other rollouts wait. Only with `state: rollout`."""
    sandbox: Literal["auto", "namespaces", "landlock", "plain"] = "auto"
    """Isolation of programs; `auto` is the first backend that works on this machine. `plain` isolates nothing."""
    _sandbox: Sandbox = PrivateAttr()
    _function: FunctionTool = PrivateAttr()

    def unused_keys(self) -> dict[str, str]:
        text = "not honoured with state `call`, which keeps none; it is with `rollout`"
        return {"sessions": text} if self.state == "call" else {}

    def setup(self, pool: ToolPool) -> None:
        """Make the sandbox that all rollouts share."""
        from rollmill.program_sandbox import ProgramSandbox
        from rollmill.rollout.tools.function_tool import FunctionTool

        self._sandbox = ProgramSandbox(
            packages=self.packages, jobs=self.jobs, sessions=self.sessions, backend=self.sandbox
        )
        pool.close_later(self._sandbox.close)
        self._function = FunctionTool(python)

    def open(self, rollout: Rollout, stack: AsyncExitStack) -> Tool:
        interpreter = PythonInterpreter(self, self._sandbox, stack)

        async def call(arguments: dict[str, Any]) -> str:
            return await interpreter.run(**self._function.checked(arguments))

        return self._function.tool(self.policy_name, self.description, call)


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
        from rollmill_sandbox import SandboxLimits

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
