"""The fork server: a single-threaded process, preloaded and without rights, that starts a supervisor for each job.

It has its own root and shares one socket with the caller's process. It never reads a job.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from rollmill_sandbox import kernel
from rollmill_sandbox.backend import IsolationBackend, build_backend
from rollmill_sandbox.cgroups import Cgroup, CgroupManager
from rollmill_sandbox.job_supervisor import serve_job
from rollmill_sandbox.protocol import CONTROL, EARLY_BINDING, JobReply, pack_reply
from rollmill_sandbox.root_filesystem import FilesystemView
from rollmill_sandbox.warm_up import warm_up

PRELOADED = (
    *("abc", "array", "ast", "base64", "bisect", "calendar", "cmath", "collections", "collections.abc", "copy", "csv"),
    *("dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools"),
    *(
        "json",
        "math",
        "operator",
        "pathlib",
        "queue",
        "random",
        "re",
        "statistics",
        "string",
        "struct",
        "sys",
        "textwrap",
    ),
    *("threading", "time", "timeit", "traceback", "types", "typing", "uuid", "encodings.idna"),
)
"""Common imports of programs, preloaded once for all children."""
_LESS_URGENT = 10


def serve(descriptor: int, backend: IsolationBackend) -> NoReturn:
    """Serve until the caller's end of the control socket closes."""
    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # with a handler, process 1 of a job would receive it
    os.umask(0o022)
    try:
        for name in PRELOADED:
            importlib.import_module(name)
        groups, why_none = _groups(backend)
        packages = backend.prepare()
        if os.path.isdir(packages):
            sys.path.append(packages)
        warm_up()
        gc.collect()
        gc.disable()
        gc.freeze()  # children then copy fewer pages
    except OSError as error:
        control.sendall(json.dumps({"error": str(error)}).encode())
        sys.exit(1)
    folders = "" if backend.folders is None else backend.folders.base
    status = {
        "landlock": backend.landlock,
        "cgroups": groups.path if groups else "",
        "no_cgroups": why_none,
        "folders": folders,
    }
    control.sendall(json.dumps(status).encode())
    _JobStarter(control, backend, groups).serve()


@dataclass(frozen=True, slots=True)
class _Running:
    supervisor: int
    deadline: float
    group: Cgroup | None


class _JobStarter:
    """The loop of the server: starts a supervisor for each job, and clears up after it."""

    def __init__(self, control: socket.socket, backend: IsolationBackend, groups: CgroupManager | None) -> None:
        self._control, self._backend, self._groups = control, backend, groups
        self._jobs: dict[int, _Running] = {}  # by the descriptors of the supervisors
        self._sweeper: tuple[int, int] | None = None
        """The process that removes large folders, if there is one: its descriptor and its id."""
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> NoReturn:
        """Serve until the caller's end of the control socket closes."""
        while True:
            for ready, _ in self._poll.poll(1000 if self._jobs else None):
                if ready == self._control.fileno():
                    self._start_job()
                    continue
                self._poll.unregister(ready)
                os.close(ready)
                if ready in self._jobs:
                    self._clear_up(self._jobs.pop(ready))
                    self._sweep()
                elif self._sweeper is not None:
                    _, failed = os.waitpid(self._sweeper[1], 0)
                    self._sweeper = None
                    if not failed:
                        self._sweep()  # what came at its very end
            now = time.monotonic()
            for process, job in self._jobs.items():
                if now > job.deadline:  # normally its supervisor enforces the limit
                    signal.pidfd_send_signal(process, signal.SIGKILL)

    def _start_job(self) -> None:
        message, sockets, _, _ = socket.recv_fds(self._control, CONTROL.size, 1)
        if not message:
            self._shut_down()
        caller = socket.socket(fileno=sockets[0])
        try:
            group = self._groups.make() if self._groups else None
            pid = kernel.clone(self._backend.clone_flags)
        except OSError as error:
            _refuse(caller, error)
            return
        if pid == 0:
            self._control.close()
            self._backend.group = group
            serve_job(caller, self._backend)
        caller.close()
        if group is not None:
            group.close()
        process = os.pidfd_open(pid)
        self._jobs[process] = _Running(pid, time.monotonic() + CONTROL.unpack(message)[0], group)
        self._poll.register(process, select.POLLIN)

    def _clear_up(self, job: _Running) -> None:
        os.waitpid(job.supervisor, 0)
        with suppress(OSError):  # processes of a killed job may still be ending; `close` cleans up later
            self._backend.leave(job.supervisor)
        if self._groups is not None and job.group is not None:
            self._groups.remove(job.group)
        self._reap_orphans()

    def _reap_orphans(self) -> None:
        """Reap programs whose supervisor was killed; they are now this process's children (PR_SET_CHILD_SUBREAPER)."""
        known = {job.supervisor for job in self._jobs.values()} | ({self._sweeper[1]} if self._sweeper else set())
        peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, peek)) is not None and found.si_pid not in known:
                os.waitpid(found.si_pid, 0)

    def _sweep(self) -> None:
        """Start the process that removes large folders of jobs, so that neither a job nor this server waits for it."""
        folders = self._backend.folders
        if self._sweeper is not None or folders is None or not folders.has_trash():
            return
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self._control.close()
                os.nice(_LESS_URGENT)
                folders.sweep()
                status = 0
            finally:
                os._exit(status)
        self._sweeper = os.pidfd_open(pid), pid
        self._poll.register(self._sweeper[0], select.POLLIN)

    def _shut_down(self) -> NoReturn:
        for process, job in self._jobs.items():
            signal.pidfd_send_signal(process, signal.SIGKILL)
            os.waitpid(job.supervisor, 0)
        self._control.close()  # not for processes that outlive this one
        self._backend.close()
        os._exit(0)


def _groups(backend: IsolationBackend) -> tuple[CgroupManager | None, str]:
    """Return the control groups, or the reason why there are none."""
    if not backend.safe:
        return None, ""
    try:
        return CgroupManager(), ""
    except OSError as error:
        return None, str(error)


def _refuse(caller: socket.socket, error: OSError) -> None:
    with caller, suppress(OSError):
        caller.sendall(pack_reply(JobReply("broken", 1, 0.0, 0.0, 0.0, b"", str(error).encode())))


def main() -> NoReturn:
    """Run the server process: its arguments are the control socket, the backend and the view."""
    for name in EARLY_BINDING:
        del os.environ[name]
    found = json.loads(sys.argv[2])
    serve(int(sys.argv[1]), build_backend(found["backend"], FilesystemView(found["binds"], found["hidden"])))
