"""The backend `plain`: an ordinary process with limits. It isolates nothing, and its results have `safe` False."""

from __future__ import annotations

import os
from contextlib import suppress

from rollmill_sandbox import kernel
from rollmill_sandbox.backend import IsolationBackend, enter_folder, use_current_folder
from rollmill_sandbox.job_folders import JobFolders
from rollmill_sandbox.limits import SandboxLimits
from rollmill_sandbox.program import set_limits
from rollmill_sandbox.protocol import Job


class PlainBackend(IsolationBackend):
    """Lets a program read and write whatever this user can, and use the network.

    `disk_mb` limits each file, `processes` nothing; a process that leaves its program's process group outlives it.
    """

    safe = False
    lacks = ("everything: a program can do what this user can",)

    def prepare(self) -> str:
        self.folders = JobFolders(self.view)
        return self.folders.packages

    def enter(self, job: Job) -> None:
        assert self.folders is not None
        enter_folder(self.folders, job)

    def confine(self, limits: SandboxLimits, session: bool) -> int | None:
        kernel.die_with_parent()
        use_current_folder()
        set_limits(limits, None, session)
        return None

    def signal_all(self, program: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(program, number)

    def leave(self, supervisor: int) -> None:
        with suppress(OSError):  # a process that has left its program may still write there
            super().leave(supervisor)
