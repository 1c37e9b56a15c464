"""The backend `namespaces`: a separate file system and process tree for each job, removed when it ends.

The server and all jobs share one empty network, because no job can open a socket in it. A job's supervisor is process 1
of its namespaces. When it ends, for whatever reason, the kernel kills all remaining processes.
"""

from __future__ import annotations

import os
import platform
import selectors
from contextlib import suppress

from rollmill_sandbox import kernel
from rollmill_sandbox.allowed_syscalls import FilterKind
from rollmill_sandbox.backend import IsolationBackend, write_job_files
from rollmill_sandbox.file_locks import FileLockGate
from rollmill_sandbox.landlock import landlock_version, restrict_files
from rollmill_sandbox.limits import INODES, SandboxLimits
from rollmill_sandbox.program import set_limits
from rollmill_sandbox.protocol import Job
from rollmill_sandbox.root_filesystem import PACKAGES, FilesystemView, enter_root, map_user
from rollmill_sandbox.seccomp import build_filter

FOLDER = "/tmp"
_USER = 1000
_EVERY_CHILD = -1


class NamespaceBackend(IsolationBackend):
    """Namespaces, a separate root, seccomp, limits, and Landlock if the kernel has it."""

    clone_flags = (
        kernel.CLONE_NEWUSER
        | kernel.CLONE_NEWPID
        | kernel.CLONE_NEWIPC
        | kernel.CLONE_NEWUTS
        | kernel.CLONE_NEWCGROUP
        | kernel.CLONE_NEWNS
    )

    def __init__(self, view: FilesystemView) -> None:
        super().__init__(view)
        self._filters: dict[FilterKind, bytes] = {}
        self._without_locks = b""
        self._proc = -1

    def prepare(self) -> str:
        self._filters = {"one": build_filter_here("one"), "many": build_filter_here("many")}
        self._without_locks = build_filter("many", asks=False)
        self.landlock = landlock_version()
        self._proc = os.open("/proc", os.O_PATH)
        enter_root(self.view)
        return PACKAGES

    def enter(self, job: Job) -> None:
        map_user(self._proc, _USER, _USER, os.geteuid(), os.getegid())
        if job.limits.processes == 1:
            os.close(self._proc)
        kernel.set_dumpable(False)
        kernel.set_host_name("sandbox")
        options = f"mode=700,size={job.limits.disk_mb}m,nr_inodes={INODES}"
        kernel.mount("tmpfs", FOLDER, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        os.chdir(FOLDER)
        write_job_files(job)

    def confine(self, limits: SandboxLimits, session: bool) -> int | None:
        kernel.drop_privileges()
        if self.landlock:
            restrict_files(self.landlock, FOLDER)
        set_limits(limits, 1 + limits.processes + limits.threads, session)
        if limits.processes == 1:
            kernel.install_filter(self._filters["one"])
            return None
        selectors.DefaultSelector = selectors.PollSelector  # type: ignore[misc, assignment]  # epoll is refused
        kernel.set_dumpable(True)  # the supervisor tells its locks from others
        try:
            return kernel.install_asking_filter(self._filters["many"])
        except OSError:  # within another sandbox that asks, or on an older kernel
            kernel.install_filter(self._without_locks)
            return None

    def admit_locks(self, listener: int) -> FileLockGate:
        return FileLockGate(listener, self._proc, os.stat(FOLDER).st_dev)

    def signal_all(self, program: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(-1, number)  # all of the namespace but this process

    def reaps(self, program: int) -> int:
        return _EVERY_CHILD


def build_filter_here(kind: FilterKind) -> bytes:
    """Return the filter of a kind of programs on this machine. Raises OSError on other architectures."""
    try:
        return build_filter(kind)
    except KeyError:
        raise OSError(f"no system call table for {platform.machine()}; there are x86_64 and aarch64") from None
