"""The sandbox of rollmill's rewards, tools and commands: the library's, with errors that rollmill tells its users."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

import rollmill_sandbox
from rollmill.errors import SandboxError
from rollmill_sandbox import BackendChoice, ProgramResult, Sandbox, SandboxLimits, SandboxSession


@contextmanager
def sandbox_errors() -> Iterator[None]:
    """Raise the library's errors as `rollmill.errors.SandboxError`: it imports nothing of rollmill, also no base."""
    try:
        yield
    except rollmill_sandbox.SandboxError as error:
        raise SandboxError(str(error)) from error


class ProgramSandbox(Sandbox):
    """A sandbox whose errors end a run, or a command, with their message."""

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        packages: Sequence[str] = (),
        jobs: int = 0,
        sessions: int = 64,
        backend: BackendChoice = "auto",
    ) -> None:
        with sandbox_errors():
            super().__init__(limits, packages=packages, jobs=jobs, sessions=sessions, backend=backend)

    async def run(
        self,
        program: str,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ProgramResult:
        with sandbox_errors():
            return await super().run(program, stdin, files, limits)

    def run_sync(
        self,
        program: str,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ProgramResult:
        with sandbox_errors():
            return super().run_sync(program, stdin, files, limits)

    @asynccontextmanager
    async def session(
        self, files: Mapping[str, bytes] | None = None, limits: SandboxLimits | None = None, idle_s: float = 600.0
    ) -> AsyncIterator[SandboxSession]:
        with sandbox_errors():
            async with super().session(files, limits, idle_s) as opened:
                yield opened
