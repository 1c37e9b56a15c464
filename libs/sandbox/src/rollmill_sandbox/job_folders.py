"""Job folders on the machine's disk, for backends that cannot mount one."""

from __future__ import annotations

import os
import secrets
import stat
import sys
import tempfile
import time
from contextlib import suppress

from rollmill_sandbox.limits import INODES, SandboxLimits
from rollmill_sandbox.root_filesystem import PACKAGES, FilesystemView

_AT_ONCE = 200
"""Entries of a job's folder that are removed before the job ends; larger folders are moved away."""
_BACKLOG = 16
"""Folders that may wait for their removal. Beyond, jobs remove their own, and so wait for it."""
_TRIES, _BETWEEN_TRIES_S = 40, 0.05
"""Attempts to remove everything."""
_PF_EXITING = 0x4
"""Flag of a thread that runs no code of its program any more, in the ninth field of its `stat` (Linux, sched.h)."""


class JobFolders:
    """A folder for each job, named after its supervisor, and one with links to the allowed packages."""

    def __init__(self, view: FilesystemView) -> None:
        self.base = tempfile.mkdtemp(prefix="rollmill-sandbox-")
        self.packages = os.path.join(self.base, "packages")
        self._trash = os.path.join(self.base, "trash")
        os.mkdir(self.packages)
        os.mkdir(self._trash, 0o700)
        self._waiting, self._lifeline = os.pipe()
        for inside, path in view.binds.items():
            if inside.startswith(PACKAGES + "/"):
                os.symlink(path, self.packages + inside.removeprefix(PACKAGES))

    def of(self, supervisor: int) -> str:
        """Return the path of a job's folder, which may not exist yet."""
        return os.path.join(self.base, str(supervisor))

    def remove(self, supervisor: int) -> None:
        """Remove a job's folder, if it exists; move a large one away, so that the job need not wait for its removal."""
        folder = self.of(supervisor)
        if not os.path.isdir(folder):
            return
        if not remove_tree(folder, most=_AT_ONCE):
            if len(os.listdir(self._trash)) < _BACKLOG:
                os.rename(folder, os.path.join(self._trash, secrets.token_hex(8)))
            else:
                remove_tree(folder)

    def has_trash(self) -> bool:
        """True if folders wait for their removal."""
        return bool(os.listdir(self._trash))

    def sweep(self) -> None:
        """Remove folders that were moved away, also those that come meanwhile."""
        while names := os.listdir(self._trash):
            for name in names:
                remove_tree(os.path.join(self._trash, name))

    def close(self) -> None:
        """Remove all of them once every fork of this process has ended, in one that outlives this process."""
        pid = os.fork()
        if pid == 0:
            try:
                os.close(self._lifeline)
                while os.read(self._waiting, 1):  # until no fork holds the other end
                    pass
                remove_finally(self.base)
            finally:
                os._exit(0)
        os.close(self._waiting)
        os.close(self._lifeline)
        os.waitpid(pid, 0)


def remove_finally(folder: str) -> None:
    """Remove a folder whose processes have been killed; one that is just ending may still write there."""
    for _ in range(_TRIES):
        with suppress(OSError):
            remove_tree(folder)
            return
        time.sleep(_BETWEEN_TRIES_S)


def remove_tree(folder: str, most: int = sys.maxsize) -> bool:
    """Remove a folder of any depth and width, whatever its modes. No process uses it any more.

    Returns False, with something left, if it contains more than `most` files and folders.
    """
    os.chmod(folder, 0o700)
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    entered: list[str] = []
    waiting: list[list[str]] = []  # the folders of each level that are still there
    try:
        while True:
            if len(waiting) == len(entered):  # a folder that was entered just now
                most -= len(os.listdir(here))
                if most < 0:
                    return False
                waiting.append(_remove_files(here))
            elif waiting[-1]:
                entered.append(waiting[-1].pop())
                os.chmod(entered[-1], 0o700, dir_fd=here)
                here = _move(here, entered[-1])
            elif entered:
                here = _move(here, "..")
                waiting.pop()
                os.rmdir(entered.pop(), dir_fd=here)
            else:
                os.rmdir(folder)
                return True
    finally:
        os.close(here)


def _move(here: int, name: str) -> int:
    """Return a descriptor of a folder beside or above the one of `here`, and close that."""
    there = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
    os.close(here)
    return there


def _remove_files(here: int) -> list[str]:
    """Remove all files of a folder, and return the names of its folders."""
    folders = []
    with os.scandir(here) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=here)
    return folders


def exceeds_disk_limit(folder: str, program: int, limits: SandboxLimits) -> bool:
    """True if files below a folder, and unnamed ones that a process holds open, exceed the disk limit.

    Also true if it cannot be measured: too long paths and folders without permissions. Not if that is because the
    process is ending: then it can do nothing any more.
    """
    size = files = 0
    pending = [folder]
    try:
        while pending:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        files += 1
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
            if size > limits.disk_mb << 20 or files > INODES:
                return True
        return size + _unnamed(folder, program, limits) > limits.disk_mb << 20
    except (FileNotFoundError, NotADirectoryError):  # a folder that was removed just now
        return False
    except OSError:
        return not _is_ending(program)


def _is_ending(program: int) -> bool:
    """True if all threads of a process are on their way out. On a busy machine that can last."""
    threads = f"/proc/{program}/task"
    with suppress(FileNotFoundError, ProcessLookupError):  # of the folder: the process is gone
        listed = os.listdir(threads)
        for thread in listed:
            with suppress(FileNotFoundError, ProcessLookupError), open(f"{threads}/{thread}/stat", "rb") as file:
                if not int(file.read().rpartition(b")")[2].split()[6]) & _PF_EXITING:
                    return False
        # A thread that is not in the first list, since it began later, is in the second.
        return set(os.listdir(threads)) <= set(listed)
    return True


def _unnamed(folder: str, program: int, limits: SandboxLimits) -> int:
    """Return the bytes of files without a name. A mapped file that is not open counts as the maximum.

    Raises OSError if no thread can be inspected.
    """
    for task in os.listdir(f"/proc/{program}/task"):  # the first thread may have ended; the others share its open files
        with suppress(FileNotFoundError, ProcessLookupError):
            if (mapped := _mapped(folder, f"/proc/{program}/task/{task}/maps")) is not None:
                sizes = dict.fromkeys(mapped, limits.disk_mb << 20) | _open_sizes(f"/proc/{program}/task/{task}/fd")
                return sum(sizes.values())
    raise ProcessLookupError(program)


def _open_sizes(descriptors: str) -> dict[int, int]:
    """Return inode -> bytes of the unnamed files in a folder of descriptors."""
    sizes = {}
    with os.scandir(descriptors) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                found = entry.stat()
                if stat.S_ISREG(found.st_mode) and found.st_nlink == 0 and not _is_memory(entry.path):
                    sizes[found.st_ino] = found.st_blocks * 512
    return sizes


def _mapped(folder: str, maps: str) -> set[int] | None:
    """Return the inodes of unnamed files below a folder that a thread has mapped; None if it has ended."""
    with open(maps, "rb") as file:
        lines = file.read().splitlines()
    inside = f" {folder}/".encode()
    found = {int(line.split()[4]) for line in lines if line.endswith(b" (deleted)") and inside in line}
    return found if lines else None


def _is_memory(path: str) -> bool:
    return os.readlink(path).startswith("/memfd:")  # its stdin
