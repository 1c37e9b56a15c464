"""The backend `landlock`: for kernels and containers without user namespaces.

Landlock restricts the files that a program may open, seccomp its system calls. It is a single process that cannot start
others, and it ends with its supervisor. `LandlockBackend.lacks` lists what it does not guarantee.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from rollmill_sandbox import kernel
from rollmill_sandbox.backend import IsolationBackend, enter_folder, use_current_folder
from rollmill_sandbox.job_folders import JobFolders, exceeds_disk_limit
from rollmill_sandbox.landlock import LandlockRuleset, landlock_version
from rollmill_sandbox.limits import SandboxLimits
from rollmill_sandbox.namespace_backend import build_filter_here
from rollmill_sandbox.program import set_limits
from rollmill_sandbox.protocol import Job
from rollmill_sandbox.root_filesystem import DEVICES, NOBODY, FilesystemView, can_become_nobody
from rollmill_sandbox.seccomp import build_filter

LEAST_VERSION = 3
"""Earlier Landlock versions (before Linux 6.2) let programs truncate files that they may only read."""
_SHARE = 10  # checking many files takes at most a tenth of the time


class LandlockBackend(IsolationBackend):
    """Landlock, seccomp and limits, in a separate folder on the machine's disk."""

    lacks = (
        "names, sizes and times of the machine's files can be found out by guessing; their contents cannot be read",
        "one process only: limits.processes has to be 1",
        "disk is looked at twenty times a second, so a program can go beyond its limit before it is killed",
        "chmod, chown, utime and sendmsg fail, and multiprocessing's locks; /tmp is closed, its folder is $TMPDIR",
        "threads are limited by memory alone when it stays root (where nobody else may read Python)",
        "the machine's name, its load, and numbers and processor times of its processes can be seen",
    )
    look_s = 0.05

    def __init__(self, view: FilesystemView) -> None:
        super().__init__(view)
        self._readable: LandlockRuleset
        self._next_look = 0.0
        self._suspected = False

    def prepare(self) -> str:
        self.landlock = landlock_version()
        if self.landlock < LEAST_VERSION:
            has = f"this kernel has version {self.landlock}" if self.landlock else "this kernel has none"
            raise OSError(f"it needs Landlock of version {LEAST_VERSION} (Linux 6.2); {has}")
        build_filter_here("alone")  # also keeps it for all programs
        kernel.become_subreaper()  # adopts programs whose supervisor was killed
        if os.geteuid() == 0 and _nobody_can_read(self.view):
            _become_nobody()
            kernel.set_dumpable(True)
        folders = self.folders = JobFolders(self.view)
        self._readable = LandlockRuleset(self.landlock, reads_only=True)
        for path in [*DEVICES, folders.base]:
            self._readable.allow_reading(path)
        for path in self.view.binds.values():
            _allow(self._readable, path, self.view.hidden)
        return folders.packages

    def enter(self, job: Job) -> None:
        if job.limits.processes > 1:
            raise OSError(
                f"limits.processes is {job.limits.processes}; the landlock backend runs one process. Set it to 1, or "
                "allow user namespaces"
            )
        kernel.set_dumpable(False)
        assert self.folders is not None
        enter_folder(self.folders, job)

    def confine(self, limits: SandboxLimits, session: bool) -> int | None:
        kernel.die_with_parent()
        folder = use_current_folder()
        most = _tasks() + 1 + limits.threads
        ruleset = LandlockRuleset(self.landlock)
        assert self.folders is not None
        for path in {*self.view.binds.values(), self.folders.packages}:
            ruleset.allow_reading(path)
        for device in DEVICES:
            ruleset.allow_writing(device)
        ruleset.allow_all(folder)
        kernel.drop_privileges()
        kernel.set_dumpable(True)  # the supervisor counts its open files
        self._readable.restrict()
        ruleset.restrict()
        set_limits(limits, most, session)
        kernel.install_filter(build_filter("alone", own_pid=os.getpid()))
        return None

    def signal_all(self, program: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(program, number)

    def full(self, program: int, limits: SandboxLimits) -> bool:
        if time.monotonic() < self._next_look:
            return False
        started = time.thread_time()
        found = exceeds_disk_limit(os.getcwd(), program, limits)
        self._next_look = time.monotonic() + max(self.look_s, _SHARE * (time.thread_time() - started))
        before, self._suspected = self._suspected, found
        return found and before  # a state that lasts for a moment ends no program


def _allow(rules: LandlockRuleset, path: str, hidden: list[str]) -> None:
    """Allow to read everything below a path, except hidden folders: of those only the names."""
    if path in hidden:
        return
    if not any(folder.startswith(path + "/") for folder in hidden):
        rules.allow_reading(path)
        return
    rules.allow_listing(path)
    for entry in os.scandir(path):
        _allow(rules, entry.path, hidden)


def _nobody_can_read(view: FilesystemView) -> bool:
    """True if root may become an ordinary user who can read the files of Python and of the packages."""
    if not can_become_nobody():
        return False
    pid = os.fork()
    if pid == 0:
        try:
            _become_nobody()
            os._exit(0 if all(os.access(path, os.R_OK) for path in view.binds.values()) else 1)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _tasks() -> int:
    """Return the number of processes and threads of the machine; those of this user are fewer."""
    with open("/proc/loadavg") as file:
        return int(file.read().split()[3].partition("/")[2])
