"""System calls that Python lacks. Each raises OSError with the name of the call."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 3, 4, 22
_PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 24, 36, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL, _SECCOMP_MODE_FILTER = 4, 2
_CAPABILITY_VERSION_3 = 0x20080522
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR = 442
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _AT_RECURSIVE, _AT_FDCWD = 1, 2, 0x8000, -100
_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
if sys.platform == "linux":
    _libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    _libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0)  # what the first call builds is then there in every child
_CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
_NO_CAPABILITIES = (ctypes.c_uint32 * 6)()


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def clone(flags: int) -> int:
    """Fork into new namespaces: 0 in the child, the process id in the parent. The caller has one thread."""
    return syscall("clone", _SYS_CLONE[platform.machine()], flags | signal.SIGCHLD, 0, 0, 0, 0)


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _checked("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Call mount(2)."""
    words = [word.encode() for word in (source, target, kind, options)]
    _checked(f"mount on {target}", _libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]))


def pivot_root_here() -> None:
    """Make the current folder the root of the mount namespace, and leave the old root behind."""
    syscall("pivot_root", _SYS_PIVOT_ROOT[platform.machine()], b".", b".")
    _checked("umount of the old root", _libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")


def make_read_only(target: str) -> None:
    """Make a mount and all below it read-only, without set-uid programs (Linux 5.12)."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    syscall("mount_setattr", _SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, 32)


def die_with_parent() -> None:
    """Receive SIGKILL when the parent ends."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> None:
    """Adopt all descendants whose parent ends."""
    _prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def set_dumpable(dumpable: bool) -> None:
    """Set whether processes of the same user may inspect this one through /proc and ptrace."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, int(dumpable))


def set_host_name(name: str) -> None:
    """Call sethostname(2)."""
    _checked("sethostname", _libc.sethostname(name.encode(), ctypes.c_size_t(len(name))))


def drop_privileges() -> None:
    """Give up every capability and every way to gain one."""
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)
    _prctl("PR_CAP_AMBIENT_CLEAR_ALL", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    prctl, capability = _libc.prctl, 0
    while prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    _checked("capset", _libc.capset(_CAPABILITY_HEADER, _NO_CAPABILITIES))


def install_filter(code: bytes) -> None:
    """Install a seccomp filter on this process; `code` is an array of struct sock_filter."""
    program = _FilterProgram(len(code) // 8, code)
    _prctl("PR_SET_SECCOMP", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def install_asking_filter(code: bytes) -> int:
    """Install a seccomp filter, and return a descriptor for whoever admits the calls that it asks about.

    Raises OSError if a process above has such a filter already, or the kernel has none (before Linux 5.5).
    """
    program = _FilterProgram(len(code) // 8, code)
    number = _SYS_SECCOMP[platform.machine()]
    return syscall("seccomp", number, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.byref(program))


def syscall(name: str, number: int, *arguments: Any) -> int:
    """Make a system call by number."""
    found: int = _libc.syscall(
        ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    )
    _checked(name, found)
    return found


def _prctl(name: str, option: int, value: int, pointer: int = 0) -> None:
    _checked(f"prctl({name})", _libc.prctl(option, value, pointer, 0, 0))


def _checked(name: str, found: int) -> None:
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
