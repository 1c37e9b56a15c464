"""The interface of isolation backends."""

from __future__ import annotations

import math
import os
import tempfile
from typing import Literal

from rollmill_sandbox.cgroups import Cgroup
from rollmill_sandbox.file_locks import FileLockGate
from rollmill_sandbox.job_folders import JobFolders
from rollmill_sandbox.limits import SandboxLimits
from rollmill_sandbox.protocol import Job
from rollmill_sandbox.root_filesystem import FilesystemView

BackendName = Literal["namespaces", "landlock", "plain"]


class IsolationBackend:
    """The isolation of programs. The server prepares it once; a job's supervisor enters it; its program is confined.

    Each step raises OSError with what the kernel refuses.
    """

    safe = True
    """True if it isolates programs."""
    clone_flags = 0
    """The namespaces of a supervisor."""
    landlock = 0
    """The version of Landlock in use."""
    lacks: tuple[str, ...] = ()
    """Guarantees that this backend does not give, for users."""
    look_s = math.inf
    """Seconds between two calls of `full`."""

    def __init__(self, view: FilesystemView) -> None:
        self.view = view
        self.folders: JobFolders | None = None
        """The folders of jobs on the machine's disk, if the backend has any."""
        self.group: Cgroup | None = None
        """The job's control group, in its supervisor, if there is one."""

    def prepare(self) -> str:
        """Prepare the server, and return the folder in which programs find packages."""
        raise NotImplementedError

    def enter(self, job: Job) -> None:
        """Move the supervisor into a separate folder with the job's files."""
        raise NotImplementedError

    def confine(self, limits: SandboxLimits, session: bool) -> int | None:
        """Drop all rights of this process, which then runs the program.

        Returns the descriptor on which the supervisor admits its locks of files, if it does.
        """
        raise NotImplementedError

    def admit_locks(self, listener: int) -> FileLockGate:
        """Return the gate of the program's locks, in its supervisor."""
        raise NotImplementedError

    def signal_all(self, program: int, number: int) -> None:
        """Send a signal to every process of the program."""
        raise NotImplementedError

    def reaps(self, program: int) -> int:
        """Return the processes that the supervisor waits for at the end, in waitpid's terms."""
        return program

    def full(self, program: int, limits: SandboxLimits) -> bool:
        """True if the program exceeds its disk limit, if the kernel does not enforce it. Called often."""
        return False

    def leave(self, supervisor: int) -> None:
        """Clean up after a job. Called by its supervisor, and by the server after its end."""
        if self.folders is not None:
            self.folders.remove(supervisor)

    def close(self) -> None:
        """Clean up after the server; every job has ended."""
        if self.folders is not None:
            self.folders.close()


def enter_folder(folders: JobFolders, job: Job) -> None:
    """Create the folder of this supervisor's job, with its files, and move into it."""
    os.mkdir(folders.of(os.getpid()), 0o700)
    os.chdir(folders.of(os.getpid()))
    write_job_files(job)


def use_current_folder() -> str:
    """Make the current folder the program's home and folder for temporary files, and return it."""
    folder = os.getcwd()
    os.environ.update(HOME=folder, TMPDIR=folder)
    tempfile.tempdir = None  # the server's, which is kept after its first use
    return folder


def write_job_files(job: Job) -> None:
    """Write a job's files into the current folder."""
    for name, content in job.files.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)


def build_backend(backend: BackendName, view: FilesystemView) -> IsolationBackend:
    """Build the isolation of a backend."""
    match backend:
        case "namespaces":
            from rollmill_sandbox.namespace_backend import NamespaceBackend

            return NamespaceBackend(view)
        case "landlock":
            from rollmill_sandbox.landlock_backend import LandlockBackend

            return LandlockBackend(view)
        case "plain":
            from rollmill_sandbox.plain_backend import PlainBackend

            return PlainBackend(view)
