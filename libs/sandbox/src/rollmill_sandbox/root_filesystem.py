"""The file system of programs: the interpreter and its libraries, read-only, and nothing else of the machine."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from rollmill_sandbox.kernel import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWUSER,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    make_read_only,
    mount,
    pivot_root_here,
    set_dumpable,
    unshare,
)

PACKAGES = "/packages"
"""The folder of allowed packages inside."""
NOBODY = 65534
"""The user that root switches to."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_NEW_ROOT = "/tmp"  # any folder that exists everywhere: it is covered in this process's namespace only


@dataclass(frozen=True, slots=True)
class FilesystemView:
    """The visible part of the machine's files, read-only."""

    binds: dict[str, str]
    """Path inside: path on the machine."""
    hidden: list[str]
    """Folders below them that appear empty."""


def enter_root(view: FilesystemView) -> None:
    """Move this process (one thread) into a separate root and an empty network, and from root to an ordinary user.

    Raises OSError with what the kernel refuses. Needs Linux 5.12 and, for an ordinary user, user namespaces.
    """
    privileged = os.geteuid() == 0 and can_become_nobody()
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWNS | CLONE_NEWNET | (0 if privileged else CLONE_NEWUSER))
    if not privileged:
        proc = os.open("/proc", os.O_PATH)
        map_user(proc, NOBODY, NOBODY, uid, gid)
        os.close(proc)
    mount("none", "/", "none", MS_REC | MS_PRIVATE)
    _build(view)
    if privileged:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        set_dumpable(True)  # or the kernel keeps /proc/self/uid_map for root


def map_user(proc: int, inside_uid: int, inside_gid: int, uid: int, gid: int) -> None:
    """Map this process's user and group in its new user namespace. `proc` is an open /proc."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside_uid} {uid} 1"),
        ("gid_map", f"{inside_gid} {gid} 1"),
    ):
        descriptor = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(descriptor, text.encode())
        os.close(descriptor)


def can_become_nobody() -> bool:
    """Return False for the root of a user namespace that maps root alone; it is an ordinary user outside."""
    with open("/proc/self/uid_map") as users, open("/proc/self/setgroups") as groups:
        starts = [(int(start), int(count)) for start, _, count in (line.split() for line in users)]
        return groups.read().strip() == "allow" and any(first <= NOBODY < first + many for first, many in starts)


def _build(view: FilesystemView) -> None:
    binds = view.binds | {device: device for device in DEVICES}
    opened = {inside: os.open(path, os.O_PATH) for inside, path in binds.items()}  # before the new root covers one
    proc = os.open("/proc/self/fd", os.O_PATH)
    mount("tmpfs", _NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.chdir(_NEW_ROOT)
    for inside in sorted(binds):
        descriptor = opened[inside]
        _place(inside, stat.S_ISDIR(os.fstat(descriptor).st_mode))
        mount(f"/proc/self/fd/{descriptor}", f".{inside}", "none", MS_BIND | MS_REC)
        os.close(descriptor)
    os.close(proc)
    for folder in view.hidden:
        mount("tmpfs", f".{folder}", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=4k")
    os.makedirs("./tmp", exist_ok=True)
    os.symlink("/tmp", "./dev/shm")  # the C library's folder for semaphores
    pivot_root_here()
    make_read_only("/")


def _place(inside: str, folder: bool) -> None:
    """Create an empty folder or file to mount on."""
    path = f".{inside}"
    if folder:
        os.makedirs(path, mode=0o755, exist_ok=True)
    elif not os.path.exists(path):
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
