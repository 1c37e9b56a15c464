"""Runs the code of jobs in the server before it serves, so that each job finds it warm.

A job's processes are forks of the server. What runs for the first time in a fork builds caches, adapts byte code and
copies the pages in which these are, in every job again. Here it runs in the server, with a program of our own.
"""

from __future__ import annotations

import linecache
import os
import random
import signal
import socket
import sys
import threading

from rollmill_sandbox import kernel, program
from rollmill_sandbox.backend import IsolationBackend
from rollmill_sandbox.job_supervisor import start_program
from rollmill_sandbox.landlock import build_rules, landlock_version
from rollmill_sandbox.limits import SandboxLimits
from rollmill_sandbox.protocol import Job, pack_job, pack_reply, read_job
from rollmill_sandbox.root_filesystem import FilesystemView
from rollmill_sandbox.watchdog import watch_program

_PROGRAM = "def f(x):\n    return x * 7\nprint(f(6))"
_TIMES = 10
"""CPython adapts byte code after eight calls."""


class _Rehearsal(IsolationBackend):
    """Isolates nothing; only for the program above."""

    def confine(self, limits: SandboxLimits, session: bool) -> None:
        kernel.die_with_parent()

    def signal_all(self, program: int, number: int) -> None:
        os.kill(program, number)


def warm_up() -> None:
    """Open the streams of programs, and run everything of a job that has no lasting effect.

    Raises OSError if the program could not be run.
    """
    _open_streams()
    backend = _Rehearsal(FilesystemView({}, []))
    backend.landlock = landlock_version()
    job = pack_job(Job(_PROGRAM, b"", {}, SandboxLimits()))
    for _ in range(_TIMES):
        caller, supervisor = socket.socketpair()
        with caller, supervisor:
            caller.sendall(job)
            supervisor.settimeout(30.0)
            received = read_job(supervisor.recv)
            running, _ = start_program(received, backend)
            reply = watch_program(running, received.limits, backend, supervisor.fileno())
            if reply.stdout != b"42\n":
                raise OSError(f"a program cannot be run here: {reply.outcome} {reply.stderr.decode(errors='replace')}")
            supervisor.sendall(pack_reply(reply))
        os.close(running.stdout)
        os.close(running.stderr)
        if backend.landlock:
            build_rules(backend.landlock, "/tmp").close()
        random.seed()
        threading._after_fork()  # type: ignore[attr-defined]
    _run_here()


def _open_streams() -> None:
    """Open Python's standard streams on files of the kinds that programs get, so that no program has to do it.

    Its own were opened on /dev/null, and would be treated as such. Standard error is a pipe to the caller already.
    """
    empty = os.memfd_create("stdin", os.MFD_CLOEXEC)
    reader, writer = os.pipe()
    os.dup2(empty, 0)
    os.dup2(writer, 1)
    for descriptor in (empty, reader, writer):
        os.close(descriptor)
    program.open_streams()


def _run_here() -> None:
    """Run the program in this process, and put back what that changes."""
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    for _ in range(_TIMES):
        names = program.start_main(_PROGRAM).__dict__
        exec(compile(_PROGRAM.replace("print", "repr"), program.PROGRAM_NAME, "exec", dont_inherit=True), names)
        program.flush_all()
        sys.path[:] = path
    sys.argv, sys.modules["__main__"] = argv, main
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    linecache.clearcache()
