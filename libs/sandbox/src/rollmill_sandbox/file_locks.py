"""Locks of files (`fcntl`) between the processes of a program: few, and of its own files only.

A process that asks for a lock waits until its supervisor admits the call (user notification of seccomp); then the
kernel makes it. No limit of the kernel counts the memory of locks, so the supervisor counts the calls, each as the two
locks that it can add, and when they are many, the locks that are there. A call that was admitted just before may still
be under way, one for each task of the program.

The supervisor cannot see which file a call will reach, since another thread may exchange it. So it looks afterwards,
and kills a program that has locked a file of the machine.
"""

from __future__ import annotations

import errno
import math
import os
import select
import struct
import time
from contextlib import suppress
from fcntl import ioctl

LOCKS, LOCK_BYTES = 2000, 256
"""Locks that a program may have, and the memory of one."""
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND
_NOTIFICATION_BYTES = 80
_ANSWER = struct.Struct("<QqiI")
_CONTINUE = 1
_ADDED = 2
"""Locks that a call can add: one that splits another leaves three."""
_LOOK_S, _LATER_LOOK_S = 0.05, 1.0
"""Seconds from a call to a look at the program's locks, and between further ones."""


class FileLockGate:
    """Admits a program's locks, in its supervisor.

    `listener` is the descriptor of its filter, `proc` an open /proc from outside, `device` that of its folder.
    """

    def __init__(self, listener: int, proc: int, device: int) -> None:
        self._listener, self._proc = listener, proc
        self._device = f"{os.major(device):02x}:{os.minor(device):02x}"
        self._processes = os.stat("self/ns/pid", dir_fd=proc).st_ino
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._most = 0
        """The most locks that there can be."""
        self._next_look = math.inf

    def fileno(self) -> int:
        """Return the descriptor that is readable when a process asks."""
        return self._listener

    def look_s(self) -> float:
        """Return the seconds until `answer` has to be called, whether a process asks or not."""
        return max(0.0, self._next_look - time.monotonic())

    def answer(self) -> bool:
        """Admit or refuse the lock that a process asks for, if one does; True if the program has to be killed."""
        if time.monotonic() >= self._next_look and self._count():
            return True
        if not any(events & select.POLLIN for _, events in self._poll.poll(0)):
            return False
        notification = bytearray(_NOTIFICATION_BYTES)
        with suppress(FileNotFoundError):  # the call has been interrupted
            ioctl(self._listener, _RECEIVE, notification)
            if self._most + _ADDED > LOCKS and self._count():
                return True
            number = int.from_bytes(notification[:8], "little")
            if self._most + _ADDED > LOCKS:
                ioctl(self._listener, _SEND, _ANSWER.pack(number, 0, -errno.ENOLCK, 0))
                return False
            self._next_look = min(self._next_look, time.monotonic() + _LOOK_S)
            self._most += _ADDED
            ioctl(self._listener, _SEND, _ANSWER.pack(number, 0, 0, _CONTINUE))
        return False

    def _count(self) -> bool:
        """Count the program's locks; True if one is of a file outside of its folder."""
        found, self._next_look = 0, time.monotonic() + _LATER_LOOK_S
        with open("locks", opener=lambda name, flags: os.open(name, flags, dir_fd=self._proc)) as file:
            lines = [line.replace("->", "").split() for line in file]
        inside: dict[str, bool] = {}
        for _, _, _, _, process, place, *_ in lines:
            if place.startswith(self._device + ":"):
                found += 1
            elif inside.setdefault(process, self._is_inside(process)):
                return True
        self._most = found
        return False

    def _is_inside(self, process: str) -> bool:
        """True if a process is the program's; it has ended, or is another user's, if it cannot be read."""
        with suppress(OSError):
            return os.stat(f"{process}/ns/pid", dir_fd=self._proc).st_ino == self._processes
        return False
