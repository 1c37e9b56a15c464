"""The backend `plain`: an ordinary process with limits. It isolates nothing, and its results have `safe` False."""

from __future__ import annotations

import os
from contextlib import suppress

from rollmill.sandbox import kernel
from rollmill.sandbox.backend import IsolationBackend, write_job_files
from rollmill.sandbox.job_folders import JobFolders
from rollmill.sandbox.limits import SandboxLimits
from rollmill.sandbox.program import set_limits
from rollmill.sandbox.protocol import Job
from rollmill.sandbox.root_filesystem import FilesystemView


class PlainBackend(IsolationBackend):
    """Lets a program read and write whatever this user can, and use the network.

    `disk_mb` limits each file, `processes` nothing; a process that leaves its program's process group outlives it.
    """

    safe = False
    lacks = ("everything: a program can do what this user can",)

    def __init__(self, view: FilesystemView) -> None:
        super().__init__(view)
        self._folders: JobFolders

    def prepare(self) -> str:
        self._folders = JobFolders(self.view)
        return self._folders.packages

    def enter(self, job: Job) -> None:
        os.mkdir(self._folders.of(os.getpid()), 0o700)
        os.chdir(self._folders.of(os.getpid()))
        write_job_files(job)

    def confine(self, limits: SandboxLimits, session: bool) -> None:
        kernel.die_with_parent()
        folder = os.getcwd()
        os.environ.update(HOME=folder, TMPDIR=folder)
        set_limits(limits, None, session)

    def signal_all(self, program: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(program, number)

    def leave(self, supervisor: int) -> None:
        self._folders.remove(supervisor)

    def close(self) -> None:
        with suppress(OSError):  # a process that has left its program may still write there
            self._folders.close()
