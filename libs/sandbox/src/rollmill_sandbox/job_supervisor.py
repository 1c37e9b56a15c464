"""The supervisor of a job: reads the job, starts the program without any rights, watches it and replies."""

from __future__ import annotations

import gc
import os
import signal
import socket
from fcntl import F_ADD_SEALS, fcntl
from typing import NoReturn

from rollmill_sandbox import kernel
from rollmill_sandbox.backend import IsolationBackend
from rollmill_sandbox.program import run_program
from rollmill_sandbox.protocol import Job, JobReply, pack_reply, read_job
from rollmill_sandbox.repl import serve_repl
from rollmill_sandbox.session_server import SessionServer
from rollmill_sandbox.watchdog import RunningProgram, reap, watch_program

_CHANNEL = 3
_JOB_LIMIT_S = 30.0
"""Timeout of a caller that is sending a job."""
_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # against further seals, shrinking, growing, writing


def serve_job(caller: socket.socket, backend: IsolationBackend) -> NoReturn:
    """Run the single job of this process. The server has disabled garbage collection, for a program's supervisor."""
    program: RunningProgram | None = None
    status = 1
    try:
        kernel.die_with_parent()
        caller.settimeout(_JOB_LIMIT_S)
        job = read_job(caller.recv)
        if backend.group is not None:
            backend.group.join(job.limits)
        backend.enter(job)
        program, channel = start_program(job, backend)
        if channel is not None:
            gc.enable()
            SessionServer(caller, channel, program, job, backend).serve()
        else:
            reply, program = watch_program(program, job.limits, backend, caller.fileno()), None
            caller.settimeout(_JOB_LIMIT_S)
            caller.sendall(pack_reply(reply))
        status = 0
    except (EOFError, TimeoutError, ConnectionError):  # the caller disconnected
        pass
    except OSError as error:
        _send_error(caller, error)
    finally:
        try:
            if program is not None:
                backend.signal_all(program.pid, signal.SIGKILL)
                reap(program.pid, backend.reaps(program.pid))
            backend.leave(os.getpid())
        finally:
            os._exit(status)


def start_program(job: Job, backend: IsolationBackend) -> tuple[RunningProgram, socket.socket | None]:
    """Start the program; for a session also return this side's end of its channel.

    Raises OSError if it cannot be confined.
    """
    session = job.idle_s > 0
    stdin = _sealed(job.stdin)
    (stdout, stdout_end), (stderr, stderr_end) = os.pipe(), os.pipe()
    theirs = [stdin, stdout_end, stderr_end]
    channel = None
    if session:
        channel, channel_end = socket.socketpair()
        theirs.append(channel_end.detach())
    confined, confined_end = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            _confine(job, backend, confined_end)
            for number, descriptor in enumerate(theirs):
                os.dup2(descriptor, number, inheritable=number < 3)
            os.closerange(len(theirs), 1 << 16)
            gc.enable()
            if session:
                serve_repl(_CHANNEL, job.limits.output_bytes)
            run_program(job.program)
        finally:
            os._exit(1)
    for descriptor in theirs:
        os.close(descriptor)
    confined_end.close()
    failure, listeners, _, _ = socket.recv_fds(confined, 4096, 1)  # nothing, or a listener, if the program is confined
    confined.close()
    if failure and not listeners:
        raise OSError(failure.decode())
    gate = backend.admit_locks(listeners[0]) if listeners else None
    return RunningProgram(pid, stdout, stderr, gate), channel


def _confine(job: Job, backend: IsolationBackend, supervisor: socket.socket) -> None:
    """Drop all rights of this process; if that fails, send the error to the supervisor and exit."""
    try:
        os.setsid()
        if (listener := backend.confine(job.limits, job.idle_s > 0)) is not None:
            socket.send_fds(supervisor, [b"listener"], [listener])
    except BaseException as error:
        supervisor.send(f"cannot confine it: {error}".encode())
        os._exit(1)


def _sealed(content: bytes) -> int:
    """Return a read-only file without a name."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl(descriptor, F_ADD_SEALS, _SEALS)
    return descriptor


def _send_error(caller: socket.socket, error: OSError) -> None:
    try:
        caller.settimeout(_JOB_LIMIT_S)
        caller.sendall(pack_reply(JobReply("broken", 1, 0.0, 0.0, 0.0, b"", str(error).encode())))
    except OSError:
        return
