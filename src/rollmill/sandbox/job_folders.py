"""Job folders on the machine's disk, for backends that cannot mount one."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress

from rollmill.sandbox.limits import SandboxLimits
from rollmill.sandbox.root_filesystem import PACKAGES, FilesystemView

_MOST_FILES = 16384


class JobFolders:
    """A folder for each job, named after its supervisor, and one with links to the allowed packages."""

    def __init__(self, view: FilesystemView) -> None:
        self.base = tempfile.mkdtemp(prefix="rollmill-sandbox-")
        self.packages = os.path.join(self.base, "packages")
        os.mkdir(self.packages)
        for inside, path in view.binds.items():
            if inside.startswith(PACKAGES + "/"):
                os.symlink(path, self.packages + inside.removeprefix(PACKAGES))

    def of(self, supervisor: int) -> str:
        """Return the path of a job's folder, which may not exist yet."""
        return os.path.join(self.base, str(supervisor))

    def remove(self, supervisor: int) -> None:
        """Remove a job's folder, if it exists."""
        if os.path.isdir(self.of(supervisor)):
            remove_tree(self.of(supervisor))

    def close(self) -> None:
        """Remove all of them."""
        remove_tree(self.base)


def remove_tree(folder: str) -> None:
    """Remove a folder of any depth, whatever its modes. No process uses it any more."""
    while True:
        folders = []
        for entry in _entries(folder):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                os.unlink(entry.path)
        if not folders:
            os.rmdir(folder)
            return
        for path in folders:  # move deep folders up, so that no path gets long
            for entry in _entries(path):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)
                    os.rename(entry.path, os.path.join(folder, secrets.token_hex(16)))
                else:
                    os.unlink(entry.path)
            os.rmdir(path)


def exceeds_disk_limit(folder: str, program: int, limits: SandboxLimits) -> bool:
    """True if files below a folder, and unnamed ones that a process holds open, exceed the disk limit.

    Also true if it cannot be measured: too long paths and folders without permissions.
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
            if size > limits.disk_mb << 20 or files > _MOST_FILES:
                return True
        return size + _unnamed(folder, program, limits) > limits.disk_mb << 20
    except (FileNotFoundError, NotADirectoryError):  # a folder that was removed just now
        return False
    except OSError:
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


def _entries(folder: str) -> list[os.DirEntry[str]]:
    os.chmod(folder, 0o700)
    with os.scandir(folder) as entries:
        return list(entries)
