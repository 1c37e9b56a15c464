"""The fork server: a single-threaded process, preloaded and without rights, that starts a jail for each job.

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

from rollmill.sandbox import kernel
from rollmill.sandbox.backend import IsolationBackend, build_backend
from rollmill.sandbox.cgroups import Cgroup, CgroupManager
from rollmill.sandbox.job_supervisor import serve_job
from rollmill.sandbox.protocol import CONTROL, JobReply, pack_reply
from rollmill.sandbox.root_filesystem import FilesystemView

PRELOADED = (
    *("abc", "array", "ast", "base64", "bisect", "calendar", "cmath", "collections", "collections.abc", "copy", "csv"),
    *("dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools"),
    *("json", "math", "operator", "queue", "random", "re", "statistics", "string", "struct", "sys", "textwrap"),
    *("threading", "time", "timeit", "traceback", "types", "typing", "uuid", "encodings.idna"),
)
"""Common imports of programs, preloaded once for all children."""


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
        gc.freeze()  # children then copy fewer pages
    except OSError as error:
        control.sendall(json.dumps({"error": str(error)}).encode())
        sys.exit(1)
    status = {"landlock": backend.landlock, "cgroups": groups.path if groups else "", "no_cgroups": why_none}
    control.sendall(json.dumps(status).encode())
    jobs: dict[int, _Running] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll(1000 if jobs else None):
            if ready != control.fileno():
                poll.unregister(ready)
                _remove_job(jobs.pop(ready), ready, backend, groups)
                _reap_orphans(jobs)
                continue
            message, sockets, _, _ = socket.recv_fds(control, CONTROL.size, 1)
            if not message:
                _shut_down(jobs, backend)
            caller = socket.socket(fileno=sockets[0])
            try:
                group = groups.make() if groups else None
                pid = kernel.clone(backend.clone_flags)
            except OSError as error:
                _refuse(caller, error)
                continue
            if pid == 0:
                control.close()
                backend.group = group
                serve_job(caller, backend)
            caller.close()
            if group is not None:
                group.close()
            process = os.pidfd_open(pid)
            jobs[process] = _Running(pid, time.monotonic() + CONTROL.unpack(message)[0], group)
            poll.register(process, select.POLLIN)
        now = time.monotonic()
        for process, job in jobs.items():
            if now > job.deadline:  # normally its supervisor enforces the limit
                signal.pidfd_send_signal(process, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Running:
    supervisor: int
    deadline: float
    group: Cgroup | None


def _remove_job(job: _Running, process: int, backend: IsolationBackend, groups: CgroupManager | None) -> None:
    os.close(process)
    os.waitpid(job.supervisor, 0)
    with suppress(OSError):  # processes of a killed job may still be ending; `close` cleans up later
        backend.leave(job.supervisor)
    if groups is not None and job.group is not None:
        groups.remove(job.group)


def _reap_orphans(jobs: dict[int, _Running]) -> None:
    """Reap programs whose supervisor was killed; they are now this process's children (PR_SET_CHILD_SUBREAPER)."""
    known = {job.supervisor for job in jobs.values()}
    peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, peek)) is not None and found.si_pid not in known:
            os.waitpid(found.si_pid, 0)


def _groups(backend: IsolationBackend) -> tuple[CgroupManager | None, str]:
    """Return the control groups, or the reason why there are none."""
    if not backend.safe:
        return None, ""
    try:
        return CgroupManager(), ""
    except OSError as error:
        return None, str(error)


def _shut_down(jobs: dict[int, _Running], backend: IsolationBackend) -> NoReturn:
    for process, job in jobs.items():
        signal.pidfd_send_signal(process, signal.SIGKILL)
        os.waitpid(job.supervisor, 0)
    backend.close()
    os._exit(0)


def _refuse(caller: socket.socket, error: OSError) -> None:
    with caller, suppress(OSError):
        caller.sendall(pack_reply(JobReply("broken", 1, 0.0, 0.0, 0.0, b"", str(error).encode())))


def main() -> NoReturn:
    """Run the server process: its arguments are the control socket, the backend and the view."""
    found = json.loads(sys.argv[2])
    serve(int(sys.argv[1]), build_backend(found["backend"], FilesystemView(found["binds"], found["hidden"])))
