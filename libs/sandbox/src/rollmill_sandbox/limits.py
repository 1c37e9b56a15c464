"""Limits of programs, and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProgramOutcome = Literal["ok", "error", "timeout", "memory", "output", "killed"]
"""The outcome of a program.

ok: exit status 0. error: another exit status. timeout: the wall or CPU limit. memory: an uncaught MemoryError. output:
more output than the limit. killed: a signal other than a limit's, for example a segmentation fault; in a session also
every other end of its interpreter's process, and invalid messages.
"""

Ended = Literal["ended"]
"""The outcome of executions in a session that has ended."""


OPEN_FILES = 64
"""Open files of each process. They bound what the kernel holds for it: a socket may contain 208 KiB."""
INODES = 16_384
"""Files and folders of a program."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The limits of one program, or of a session and each of its executions.

    Raises ValueError for a limit that is not above 0; `threads` may be 0.
    """

    wall_s: float = 10.0
    """Seconds from its start until it is killed."""
    cpu_s: int = 10
    """CPU seconds of each process; an integer, as in the kernel."""
    memory_mb: int = 512
    """Address space of each process, MiB."""
    disk_mb: int = 64
    """Size of its only writable folder (current, $HOME and $TMPDIR), and of each file in it, MiB. Includes `files`."""
    output_bytes: int = 1 << 20
    """Bytes of stdout and stderr together; in a session also of a value, and of a message to `host`."""
    processes: int = 1
    """Processes at once; at 1 it may not fork."""
    threads: int = 64
    """Threads of all its processes at once, beyond one for each process."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s", "memory_mb", "disk_mb", "output_bytes", "processes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"Limits.{name} is {getattr(self, name)}; it has to be above 0")


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The outcome of a program and its output."""

    outcome: ProgramOutcome
    exit_code: int
    """The exit status, or minus the signal that ended it."""
    stdout: str
    """Standard output up to the limit; bytes that are not UTF-8 are replaced by U+FFFD."""
    stderr: str
    seconds: float
    """Wall time."""
    cpu_seconds: float
    """CPU time of all its processes."""
    peak_mb: float
    """The largest resident memory of one process, MiB, including about 15 MiB of the interpreter."""
    safe: bool = True
    """False in the `plain` backend, which isolates nothing."""


@dataclass(frozen=True, slots=True)
class SessionExecution:
    """The outcome of one execution in a session, and its output."""

    outcome: ProgramOutcome | Ended
    """After ok and error the session continues.

    After anything else it has ended, and further executions are `ended`.
    """
    value: str | None
    """`repr` of the last statement, if that is an expression and not None. Not trusted: the program controls it."""
    stdout: str
    stderr: str
    """Includes the traceback if the outcome is error."""
    seconds: float
    """Wall time in the sandbox, without the caller's `host`."""
    safe: bool = True
    """False in the `plain` backend, which isolates nothing."""
