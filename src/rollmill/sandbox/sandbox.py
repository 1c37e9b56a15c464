"""The sandbox: runs untrusted Python programs with hard limits, several at once."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Literal, Self

import rollmill.sandbox.probe as probe
from rollmill.sandbox.errors import SandboxError
from rollmill.sandbox.limits import Limits, Result
from rollmill.sandbox.plain import run_plain
from rollmill.sandbox.process import Server
from rollmill.sandbox.root import PACKAGES
from rollmill.sandbox.slots import Slots
from rollmill.sandbox.view import view_of
from rollmill.sandbox.wire import Job, killed, pack_job, result_of

Backend = Literal["namespaces", "plain"]
GRACE_S = 20.0
"""Beyond a program's wall limit: to start it and to hand over its output."""
_CHUNK = 1 << 16
_TRIES = 2


class Sandbox:
    """Runs programs, each in a file system, process tree and network of its own that is gone when it ends.

    `packages` are the import names it may use beside the standard library. `jobs` programs run at once (the number of
    processor cores if 0), others wait. `backend="plain"` isolates nothing and is for trusted programs, or for machines
    that are thrown away; it is never chosen by itself. Works on Linux, as root and as an ordinary user.

    The first run starts a server process, probes it with hostile programs and raises SandboxError, which says what is
    missing, if no safe sandbox can be built or one of them gets through.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        packages: Sequence[str] = (),
        jobs: int = 0,
        backend: Backend = "namespaces",
    ) -> None:
        self.limits = limits or Limits()
        self.backend = backend
        self._view = view_of(packages)
        self._slots = Slots(jobs or os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._server: Server | None = None
        self._probed = self._closed = False

    async def run(
        self, program: str, stdin: str = "", files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> Result:
        """Run a program in a folder that holds `files` (relative path: content). A cancelled run is killed.

        Raises SandboxError if no sandbox can be built, or for a path in `files` that leads out of the folder.
        """
        job = self._job(program, stdin, files, limits)
        async with self._slots.turn_async():
            if self.backend == "plain":
                return await asyncio.to_thread(self._run_plain, job)
            for _ in range(_TRIES):
                started = time.monotonic()
                server = self._server
                if server is None or not self._probed or not server.alive:
                    server = await asyncio.to_thread(self._ready)
                reply = await _exchange_async(server, job)
                if reply is not None or server.alive:
                    return (reply and result_of(reply)) or killed(time.monotonic() - started)
        raise SandboxError(_died_twice())

    def run_sync(
        self, program: str, stdin: str = "", files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> Result:
        """`run` for callers without an event loop."""
        job = self._job(program, stdin, files, limits)
        with self._slots.turn():
            if self.backend == "plain":
                return self._run_plain(job)
            for _ in range(_TRIES):
                started = time.monotonic()
                server = self._ready()
                reply = _exchange(server, job)
                if reply is not None or server.alive:
                    return (reply and result_of(reply)) or killed(time.monotonic() - started)
        raise SandboxError(_died_twice())

    def pid(self) -> int | None:
        """The process id of the server; None before the first run and in the plain backend."""
        return self._server.pid if self._server else None

    def close(self) -> None:
        """End the server and every program; later runs raise SandboxError."""
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _job(self, program: str, stdin: str, files: Mapping[str, bytes] | None, limits: Limits | None) -> Job:
        limits = limits or self.limits
        for name in files or {}:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise SandboxError(f"file {name!r} is not a path inside the program's folder")
        if sum(map(len, (files or {}).values())) > limits.disk_mb << 20:
            raise SandboxError(f"the files of a program are larger than its disk limit of {limits.disk_mb} MiB")
        return Job(program, stdin.encode(errors="surrogatepass"), dict(files or {}), limits)

    def _ready(self) -> Server:
        """A live server that has passed the probe."""
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            if self._server is None or not self._server.alive:
                if sys.platform != "linux":
                    raise SandboxError(f"no safe sandbox on {sys.platform}: it needs Linux. {_ADVICE}")
                if self._server is not None:
                    self._server.close()
                    self._server = None
                try:
                    self._server = Server(self._view)
                except SandboxError as error:
                    raise SandboxError(f"{error}. {_ADVICE}") from None
            if not self._probed:
                reply = _exchange(self._server, Job(probe.PROGRAM, b"", {}, probe.LIMITS))
                probe.check((reply and result_of(reply)) or killed(0.0))
                self._probed = True
            return self._server

    def _run_plain(self, job: Job) -> Result:
        folders = {os.path.dirname(path) for inside, path in self._view.binds.items() if inside.startswith(PACKAGES)}
        return run_plain(job, sorted(folders))


_ADVICE = (
    "It needs Linux 5.12, seccomp, and user namespaces (user.max_user_namespaces above 0, and neither "
    "kernel.unprivileged_userns_clone nor AppArmor against them; in a container, a seccomp profile that lets `unshare` "
    'and `mount` through). backend="plain" runs programs without any isolation'
)


def _exchange(server: Server, job: Job) -> bytes | None:
    """What a job's socket delivers until it closes; None if the server or the job died before a reply."""
    seconds = job.limits.wall_s + GRACE_S
    caller = server.submit(seconds)
    if caller is None:
        return None
    received = bytearray()
    deadline = time.monotonic() + seconds
    with caller:
        try:
            caller.settimeout(seconds)
            with suppress(ConnectionError):  # it may have said why before it closed
                caller.sendall(pack_job(job))
            while True:
                caller.settimeout(max(deadline - time.monotonic(), 0.001))
                chunk = caller.recv(_CHUNK)
                if not chunk:
                    return bytes(received) or None
                received += chunk
        except TimeoutError:  # a server that is stopped, or a machine without a free moment
            server.close()
            return None
        except ConnectionError:
            return bytes(received) or None


async def _exchange_async(server: Server, job: Job) -> bytes | None:
    """`_exchange` for an event loop."""
    seconds = job.limits.wall_s + GRACE_S
    caller = server.submit(seconds)
    if caller is None:
        return None
    loop = asyncio.get_running_loop()
    received = bytearray()
    with caller:
        caller.setblocking(False)
        try:
            async with asyncio.timeout(seconds):
                with suppress(ConnectionError):
                    await loop.sock_sendall(caller, pack_job(job))
                while chunk := await loop.sock_recv(caller, _CHUNK):
                    received += chunk
            return bytes(received) or None
        except TimeoutError:
            server.close()
            return None
        except ConnectionError:
            return bytes(received) or None


def _died_twice() -> str:
    return "the sandbox's server died twice while a program ran; is the machine out of memory?"
