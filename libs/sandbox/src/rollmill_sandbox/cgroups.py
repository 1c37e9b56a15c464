"""Control groups (version 2), if this user may create them: limits on all processes of a job together.

They add to the kernel's limits on each process, and are omitted if no group can be created.
https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from rollmill_sandbox.limits import SandboxLimits
from rollmill_sandbox.root_filesystem import NOBODY

CONTROLLERS = ("memory", "pids")
_SUPERVISOR_MB = 64
_TASKS = 2
"""The supervisor, and a process that is just ending."""


class CgroupError(OSError):
    """No group can be created here; the message has the reason."""


@dataclass(slots=True)
class Cgroup:
    """The group of one job: its open files, by name, which stay valid in other namespaces."""

    folder: str
    files: dict[str, int]

    def join(self, limits: SandboxLimits) -> None:
        """Set the limits and move this process into the group."""
        memory = (limits.processes * limits.memory_mb + limits.disk_mb + _SUPERVISOR_MB) << 20
        tasks = limits.processes + limits.threads + _TASKS
        for name, value in (("memory.max", memory), ("pids.max", tasks), ("cgroup.procs", 0)):
            if name in self.files:
                os.write(self.files[name], str(value).encode())

    def ran_out(self) -> bool:
        """True if the kernel killed one of its processes for exceeding the memory limit."""
        events = os.pread(self.files["memory.events"], 4096, 0) if "memory.events" in self.files else b""
        return count_oom_kills(events.decode()) > 0

    def close(self) -> None:
        """Close its files."""
        for descriptor in self.files.values():
            os.close(descriptor)
        self.files.clear()


class CgroupManager:
    """A folder of groups: one for the server, and one for each job. Raises OSError if it cannot be created."""

    def __init__(self, controllers: tuple[str, ...] = CONTROLLERS) -> None:
        home = find_parent_cgroup(_read("/proc/self/cgroup"), _read("/proc/self/mountinfo"), controllers)
        self.path = f"{home}/rollmill-{os.getpid()}"
        self._files = {"cgroup.procs": os.O_WRONLY} | {f"{name}.max": os.O_WRONLY for name in controllers}
        self._files |= {"memory.events": os.O_RDONLY} if "memory" in controllers else {}
        self._count = 0
        os.makedirs(f"{self.path}/server")
        _write(f"{self.path}/cgroup.subtree_control", " ".join(f"+{name}" for name in controllers))
        _write(f"{self.path}/server/cgroup.procs", str(os.getpid()))
        if os.geteuid() == 0:
            for below in (".", "cgroup.procs", "server", "server/cgroup.procs"):
                os.chown(f"{self.path}/{below}", NOBODY, NOBODY)
        self._folder = os.open(self.path, os.O_PATH)  # the path itself is not visible in another root

    def make(self) -> Cgroup:
        """Create a group, without limits yet."""
        self._count += 1
        name = f"job-{self._count}"
        os.mkdir(name, dir_fd=self._folder)
        return Cgroup(
            name, {file: os.open(f"{name}/{file}", how, dir_fd=self._folder) for file, how in self._files.items()}
        )

    def remove(self, group: Cgroup) -> None:
        """Remove the group of a job that has ended."""
        with suppress(OSError):  # a process that is still ending; remove_groups comes later
            os.rmdir(group.folder, dir_fd=self._folder)


def remove_groups(path: str) -> None:
    """Remove the groups of a server, after its end."""
    with suppress(OSError):
        for entry in [entry for entry in os.scandir(path) if entry.is_dir()]:
            os.rmdir(entry.path)
        os.rmdir(path)


def count_oom_kills(events: str) -> int:
    """Return the number of killed processes in the text of memory.events."""
    return sum(int(line.split()[1]) for line in events.splitlines() if line.startswith("oom_kill "))


def find_parent_cgroup(own: str, mounts: str, controllers: tuple[str, ...] = CONTROLLERS) -> str:
    """Return the nearest group above this process that delegates controllers and is writable by this user.

    `own` is the text of /proc/self/cgroup, `mounts` that of /proc/self/mountinfo. Raises CgroupError.
    """
    paths = [line.removeprefix("0::") for line in own.splitlines() if line.startswith("0::")]
    points = [line.split() for line in mounts.splitlines() if " - cgroup2 " in line]
    if not paths or not points:
        raise CgroupError("no control groups of version 2 are mounted here")
    root, point = points[0][3], points[0][4]
    relative = os.path.relpath(paths[0], root)
    if ".." in paths[0].split("/") or relative.startswith(".."):
        raise CgroupError(f"this process's group {paths[0]} is not below {point}")
    here = folder = os.path.normpath(os.path.join(point, relative))
    while True:
        with suppress(OSError):
            offered = _read(f"{folder}/cgroup.subtree_control").split()
            if set(controllers) <= set(offered) and os.access(folder, os.W_OK):
                return folder
        if folder == point:
            break
        folder = os.path.dirname(folder)
    raise CgroupError(f"no group above {here} delegates {' and '.join(controllers)} to groups that this user can make")


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
