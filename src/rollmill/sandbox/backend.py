"""What keeps programs in: one kind of walls for each backend."""

from __future__ import annotations

import math
import os
from typing import Literal

from rollmill.sandbox.cgroups import Cgroup
from rollmill.sandbox.limits import SandboxLimits
from rollmill.sandbox.protocol import Job
from rollmill.sandbox.root_filesystem import FilesystemView

BackendName = Literal["namespaces", "landlock", "plain"]


class IsolationBackend:
    """The walls of one backend. The server prepares them once; a job's supervisor enters; its program is confined.

    Each step raises OSError that says what the kernel refuses.
    """

    safe = True
    """Whether it isolates programs."""
    clone_flags = 0
    """The namespaces that a supervisor is started in."""
    landlock = 0
    """The version of Landlock in use."""
    lacks: tuple[str, ...] = ()
    """What this backend does not promise, for people."""
    look_s = math.inf
    """Seconds between two calls of `full`."""

    def __init__(self, view: FilesystemView) -> None:
        self.view = view
        self.group: Cgroup | None = None
        """The job's control group, in its supervisor, where there is one."""

    def prepare(self) -> str:
        """Make ready in the server; the folder where programs find packages."""
        raise NotImplementedError

    def enter(self, job: Job) -> None:
        """Move the supervisor into a folder of the job's own, with the job's files in it."""
        raise NotImplementedError

    def confine(self, limits: SandboxLimits, session: bool) -> None:
        """Take all rights from this process, which is the program's."""
        raise NotImplementedError

    def signal_all(self, program: int, number: int) -> None:
        """Send a signal to every process of the program."""
        raise NotImplementedError

    def reaps(self, program: int) -> int:
        """What the supervisor waits for at the end, in waitpid's terms."""
        return program

    def full(self, program: int, limits: SandboxLimits) -> bool:
        """Whether the program uses more disk than it may, where the kernel does not see to it. Called often."""
        return False

    def leave(self, supervisor: int) -> None:
        """Remove what a job has left. Called by its supervisor, and by the server when that has ended."""

    def close(self) -> None:
        """Remove what the server has left; every job has ended."""


def write_job_files(job: Job) -> None:
    """A job's files, into the current folder."""
    for name, content in job.files.items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)


def build_backend(backend: BackendName, view: FilesystemView) -> IsolationBackend:
    """The walls of a backend."""
    match backend:
        case "namespaces":
            from rollmill.sandbox.namespace_backend import NamespaceBackend

            return NamespaceBackend(view)
        case "landlock":
            from rollmill.sandbox.landlock_backend import LandlockBackend

            return LandlockBackend(view)
        case "plain":
            from rollmill.sandbox.plain_backend import PlainBackend

            return PlainBackend(view)
