"""The sandbox: runs untrusted Python programs with hard limits, several at once."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Self

from rollmill_sandbox.backend import BackendName
from rollmill_sandbox.backend_selection import BackendChoice, start_server
from rollmill_sandbox.client import ForkServer
from rollmill_sandbox.errors import SandboxError
from rollmill_sandbox.exchange import submit_job, submit_job_async
from rollmill_sandbox.kernel_memory import SHARE_OF_PROGRAMS, SHARE_OF_SESSIONS, count_slots
from rollmill_sandbox.limits import ProgramResult, SandboxLimits
from rollmill_sandbox.protocol import Job, killed_result, pack_job
from rollmill_sandbox.semaphore import FairSemaphore
from rollmill_sandbox.session import SandboxSession
from rollmill_sandbox.visible_files import build_filesystem_view

_TRIES = 2


class Sandbox:
    """Runs programs in isolation from each other; nothing of a program is left when it ends.

    `packages` are the import names they may use besides the standard library. `jobs` programs run at once (0: the
    number of CPU cores), others wait. `sessions` can be open at once; they wait for a slot among `jobs` only while they
    execute. Fewer run, and are open, at once where their limits allow them to take so much memory of the kernel that
    the worst of them would not fit into this machine, and no control group counts it (`kernel_memory_mb`).

    `backend="auto"` is the first of namespaces and landlock that works here. `plain` isolates nothing, is for trusted
    programs or disposable machines, and is never chosen automatically. Works on Linux, as root and as an ordinary user.

    The first run starts a server process and probes it with hostile attempts. It raises SandboxError with the reason if
    no safe sandbox can be built or an attempt succeeds.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        packages: Sequence[str] = (),
        jobs: int = 0,
        sessions: int = 64,
        backend: BackendChoice = "auto",
    ) -> None:
        self.limits = limits or SandboxLimits()
        self.backend = backend
        self._view = build_filesystem_view(packages)
        self._slots = FairSemaphore(jobs or os.cpu_count() or 1)
        self._session_slots = FairSemaphore(sessions)
        self._in_session: ContextVar[bool] = ContextVar("in_session", default=False)
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._closed = False

    async def run(
        self,
        program: str,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ProgramResult:
        """Run a program in a folder that holds `files` (relative path: content). A cancelled run is killed.

        Raises SandboxError if no sandbox can be built, or for a path in `files` outside of the folder.
        """
        job = self._job(program, stdin, files, limits)
        async with self._slots.turn_async(self._count_slots(job.limits)):
            for _ in range(_TRIES):
                started = time.monotonic()
                server = await self._ready_async()
                result = await submit_job_async(server, job)
                if result is not None or server.alive:
                    return result or killed_result(time.monotonic() - started, server.safe)
        raise SandboxError(_DIED_TWICE)

    def run_sync(
        self,
        program: str,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: SandboxLimits | None = None,
    ) -> ProgramResult:
        """Run a program as `run` does, for callers without an event loop. Several threads may call it at once."""
        job = self._job(program, stdin, files, limits)
        with self._slots.turn(self._count_slots(job.limits)):
            for _ in range(_TRIES):
                started = time.monotonic()
                server = self._ready()
                result = submit_job(server, job)
                if result is not None or server.alive:
                    return result or killed_result(time.monotonic() - started, server.safe)
        raise SandboxError(_DIED_TWICE)

    @asynccontextmanager
    async def session(
        self, files: Mapping[str, bytes] | None = None, limits: SandboxLimits | None = None, idle_s: float = 600.0
    ) -> AsyncIterator[SandboxSession]:
        """Open an interpreter that executes programs one after another in a folder with `files`, and keeps its state.

        The limits apply to each execution, except for memory, disk, processes and threads, which apply to the session.
        It ends after the `async with`, after `idle_s` idle seconds, and with this process. A session waits for a slot
        among `sessions`; one that the same task opens inside another one does not, so that tasks with several sessions
        cannot deadlock.

        Raises SandboxError as `run`.
        """
        if idle_s <= 0:
            raise ValueError(f"idle_s is {idle_s:g}; it has to be above 0")
        job = replace(self._job("", "", files, limits), idle_s=idle_s)
        async with self._session_turn(job.limits):
            session = await self._open(job)
            try:
                yield session
            finally:
                session.close()

    def pid(self) -> int | None:
        """Return the process id of the server; None before the first run."""
        return self._server.pid if self._server else None

    def chosen(self) -> BackendName:
        """Return the backend in use. Starts the server if no program has run yet."""
        return self._ready().backend

    def without_cgroups(self) -> str:
        """Return why there are no limits on all processes of a program together; empty if there are.

        Starts the server as well.
        """
        return self._ready().no_cgroups

    def close(self) -> None:
        """Stop the server and every program; later runs raise SandboxError."""
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _job(self, program: str, stdin: str, files: Mapping[str, bytes] | None, limits: SandboxLimits | None) -> Job:
        limits = limits or self.limits
        for name in files or {}:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise SandboxError(f"file {name!r} is not a path inside the program's folder")
        if sum(map(len, (files or {}).values())) > limits.disk_mb << 20:
            raise SandboxError(f"the files of a program are larger than its disk limit of {limits.disk_mb} MiB")
        return Job(program, stdin.encode(errors="surrogatepass"), dict(files or {}), limits)

    def _count_slots(self, limits: SandboxLimits) -> int:
        return 1 if self._counts_kernel_memory() else count_slots(limits, self._slots.count, SHARE_OF_PROGRAMS)

    def _counts_kernel_memory(self) -> bool:
        """True if control groups limit it; unknown, and False, until the server has started."""
        return self._server is not None and bool(self._server.cgroups)

    def _ready(self) -> ForkServer:
        """Return a live server that has passed the probe."""
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            if self._server is None or not self._server.alive:
                if self._server is not None:
                    self._server.close()
                    self._server = None
                self._server = start_server(self.backend, self._view)
            return self._server

    async def _ready_async(self) -> ForkServer:
        server = self._server
        return server if server is not None and server.alive else await asyncio.to_thread(self._ready)

    @asynccontextmanager
    async def _session_turn(self, limits: SandboxLimits) -> AsyncIterator[None]:
        if self._in_session.get():
            yield
            return
        slots = 1 if self._counts_kernel_memory() else count_slots(limits, self._session_slots.count, SHARE_OF_SESSIONS)
        async with self._session_slots.turn_async(slots):
            self._in_session.set(True)
            try:
                yield
            finally:
                self._in_session.set(False)

    async def _open(self, job: Job) -> SandboxSession:
        for _ in range(_TRIES):
            server = await self._ready_async()
            caller = server.submit(math.inf)
            if caller is None:
                continue
            caller.setblocking(False)
            session = SandboxSession(caller, job.limits, self._slots, server.safe)
            try:
                if await session.ready(pack_job(job)):
                    return session
            except BaseException:
                session.close()
                raise
            session.close()
        raise SandboxError(_DIED_TWICE)


_DIED_TWICE = "the sandbox's server died twice while a program ran; is the machine out of memory?"
