"""The seccomp filter of a program, in classic BPF (linux/filter.h, linux/seccomp.h)."""

from __future__ import annotations

import errno
import platform
import struct

from rollmill.sandbox.syscalls import (
    CLONE,
    CLONE3,
    CLOSE_RANGE,
    DENIED,
    DENIED_ALONE,
    FCNTL,
    FIRST_UNKNOWN,
    FORKS,
    IOCTL,
    KILL,
    PRCTL,
    PRLIMIT64,
    SCHEDULING,
    SOCKETPAIR,
    TGKILL,
)

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; both architectures are little endian
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_PR_SET_PDEATHSIG = 1
_OWNERS_BY_FCNTL = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: the kernel sends the owner of a file any signal
_OWNERS_BY_IOCTL = (0x8901, 0x8902, 0x5412)  # FIOSETOWN, SIOCSPGRP; TIOCSTI types into a terminal
_CLONE_THREAD, _CLONE_FILES = 0x00010000, 0x00000400
_CLOSE_RANGE_UNSHARE = 2
_AF_UNIX = 1
_CLONE_NEW = 0x7E020080  # user, pid, net, ipc, uts, cgroup, mount, time


def build_filter(forks: bool, machine: str = "", alone: int = 0) -> bytes:
    """Return the filter as an array of struct sock_filter. A denied call fails with EPERM, an unknown one with ENOSYS.

    `forks`: new processes are allowed; threads, which share their open files, always are. `machine` is "x86_64" or
    "aarch64", by default this machine's; KeyError for another. `clone3` fails with ENOSYS, because a filter cannot read
    its flags, and the C library then uses `clone`. `alone` is the process id of a program without namespaces: it may
    send signals only to itself, start nothing, change no users and no file attributes, and not outlive its parent.
    """
    machine = machine or platform.machine()
    column = _COLUMN[machine]
    code = [
        _step(_LOAD, _ARCH),
        _step(_EQUAL, AUDIT_ARCH[machine], 1, 0),
        _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, _NUMBER),
        *_if(_AT_LEAST, FIRST_UNKNOWN, _ERRNO | errno.ENOSYS),  # the x32 calls too: they start at 2**30
        *_if(_EQUAL, CLONE3[column], _ERRNO | errno.ENOSYS),
    ]
    denied = DENIED | ({} if forks else FORKS) | (DENIED_ALONE if alone else {})
    for numbers in denied.values():
        if numbers[column] >= 0:
            code += _if(_EQUAL, numbers[column], _ERRNO | errno.EPERM)
    on_clone = _if(_ANY_BIT, _CLONE_NEW, _ERRNO | errno.EPERM)
    if not forks:
        for flag in (_CLONE_THREAD, _CLONE_FILES):
            on_clone += [_step(_ANY_BIT, flag, 1, 0), _step(_RETURN, _ERRNO | errno.EPERM)]
        code += _with_argument(
            CLOSE_RANGE[column], _if(_ANY_BIT, _CLOSE_RANGE_UNSHARE, _ERRNO | errno.EPERM), argument=2
        )
    code += _with_argument(CLONE[column], on_clone)
    code += _with_argument(PRLIMIT64[column], _unless(0))  # its own limits only
    code += _with_argument(SOCKETPAIR[column], _unless(_AF_UNIX))  # others would load modules of the kernel
    for call, commands in ((FCNTL, _OWNERS_BY_FCNTL), (IOCTL, _OWNERS_BY_IOCTL)):
        refusals = [step for command in commands for step in _if(_EQUAL, command, _ERRNO | errno.EPERM)]
        code += _with_argument(call[column], refusals, argument=1)
    if alone:
        for call in (KILL, TGKILL):
            code += _with_argument(call[column], _unless(alone))
        for call in SCHEDULING.values():
            code += _with_argument(call[column], _unless(0))
        code += _with_argument(PRCTL[column], _if(_EQUAL, _PR_SET_PDEATHSIG, _ERRNO | errno.EPERM))
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _with_argument(number: int, then: list[bytes], argument: int = 0) -> list[bytes]:
    """Run `then` with the low half of an argument loaded, for one system call; it is allowed if that falls through."""
    return [
        _step(_EQUAL, number, 0, len(then) + 2),
        _step(_LOAD, _FIRST_ARGUMENT + 8 * argument),
        *then,
        _step(_RETURN, _ALLOW),
    ]


def _unless(value: int) -> list[bytes]:
    return [_step(_EQUAL, value, 1, 0), _step(_RETURN, _ERRNO | errno.EPERM)]


def _if(test: int, value: int, answer: int) -> list[bytes]:
    return [_step(test, value, 0, 1), _step(_RETURN, answer)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
