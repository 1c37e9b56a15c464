"""Process 1 of a job's namespaces. It reads the job, starts the program without any rights, watches it and replies.

When it ends, for whatever reason, the kernel kills all that is left in the namespaces.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
from fcntl import F_ADD_SEALS, fcntl
from typing import NoReturn

from rollmill.sandbox import kernel
from rollmill.sandbox.landlock import restrict_files
from rollmill.sandbox.limits import Limits
from rollmill.sandbox.program import run_program, set_limits
from rollmill.sandbox.root import map_user
from rollmill.sandbox.seccomp import build_filter
from rollmill.sandbox.supervisor import Watched, watch
from rollmill.sandbox.wire import Ending, Job, pack_ending, read_job

NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
    | kernel.CLONE_NEWNS
)
FOLDER = "/tmp"
_USER = 1000
_JOB_LIMIT_S = 30.0
"""Longest wait for a caller that has begun to send a job."""
_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # against further seals, shrinking, growing, writing


def serve_job(caller: socket.socket, proc: int, landlock: int, filters: dict[bool, bytes]) -> NoReturn:
    """Serve the one job of this process. `proc` is an open /proc, `landlock` its version, `filters` by `forks`."""
    try:
        kernel.die_with_parent()
        caller.settimeout(_JOB_LIMIT_S)
        job = read_job(caller.recv)
        map_user(proc, _USER, _USER, os.geteuid(), os.getegid())
        os.close(proc)
        kernel.set_dumpable(False)
        kernel.set_host_name("sandbox")
        _make_folder(job)
        ending = _run(job, caller.fileno(), landlock, filters[job.limits.processes > 1])
    except (EOFError, TimeoutError):  # the caller went away
        os._exit(1)
    except OSError as error:
        ending = Ending("broken", 1, 0.0, 0.0, 0.0, b"", str(error).encode())
    try:
        caller.settimeout(_JOB_LIMIT_S)
        caller.sendall(pack_ending(ending))
    except OSError:
        os._exit(1)
    os._exit(0)


def _make_folder(job: Job) -> None:
    options = f"mode=700,size={job.limits.disk_mb}m,nr_inodes=16384"
    kernel.mount("tmpfs", FOLDER, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    os.chdir(FOLDER)
    for name, content in job.files.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)


def _run(job: Job, caller: int, landlock: int, filter_code: bytes) -> Ending:
    stdin = _sealed(job.stdin)
    (stdout, stdout_end), (stderr, stderr_end), (failed, failed_end) = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        for number, descriptor in enumerate((stdin, stdout_end, stderr_end, failed_end)):
            os.dup2(descriptor, number, inheritable=False)
        os.closerange(4, 1 << 16)
        _confine(job.limits, landlock, filter_code, failed=3)
        run_program(job.program)
    for descriptor in (stdin, stdout_end, stderr_end, failed_end):
        os.close(descriptor)
    failure = os.read(failed, 4096)  # nothing, when the program is confined
    if failure:
        return Ending("broken", 1, 0.0, 0.0, 0.0, b"", failure)
    return watch(Watched(pid, stdout, stderr), job.limits, _end_all, reaps=-1, caller=caller)


def _confine(limits: Limits, landlock: int, filter_code: bytes, failed: int) -> None:
    """From here on the process has no rights; it ends at once if that fails, and says why on `failed`."""
    try:
        for number in range(3):
            os.set_inheritable(number, True)
        os.setsid()
        kernel.drop_privileges()
        if landlock:
            restrict_files(landlock, FOLDER)
        set_limits(limits, supervisors=1)
        kernel.install_filter(filter_code)
    except BaseException as error:
        os.write(failed, f"cannot confine it: {error}".encode())
        os._exit(1)
    os.close(failed)


def _sealed(content: bytes) -> int:
    """A read-only file without a name."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl(descriptor, F_ADD_SEALS, _SEALS)
    return descriptor


def _end_all() -> None:
    """Kill every process of the namespace but this one."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return


def both_filters() -> dict[bool, bytes]:
    """The filters of programs that may fork, and of those that may not. Raises OSError on other architectures."""
    try:
        return {forks: build_filter(forks) for forks in (False, True)}
    except KeyError:
        raise OSError(f"no system call table for {platform.machine()}; there are x86_64 and aarch64") from None
