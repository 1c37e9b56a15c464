"""What a program may use, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ProgramOutcome = Literal["ok", "error", "timeout", "memory", "output", "killed"]
"""How a program ended.

ok: exit status 0. error: another exit status. timeout: the wall or CPU limit. memory: a MemoryError that nobody caught.
output: more output than the limit. killed: a signal that is not a limit's, for example a segmentation fault; in a
session, whose interpreter has to go on, every other end of its process too, and messages that are not a session's.
"""

Ended = Literal["ended"]
"""What a session answers after it has come to its end."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """The limits of one program, or of a session and each of its executions."""

    wall_s: float = 10.0
    """Seconds from its start until it is killed."""
    cpu_s: int = 10
    """CPU seconds of each process; whole seconds, because that is the kernel's unit."""
    memory_mb: int = 512
    """Address space of each process, MiB."""
    disk_mb: int = 64
    """Size of its only writable folder (current, $HOME and $TMPDIR), and of each file in it, MiB. `files` count."""
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
    """How a program ended and what it wrote."""

    outcome: ProgramOutcome
    exit_code: int
    """The exit status; minus the signal that ended it otherwise."""
    stdout: str
    """Up to the limit; bytes that are not UTF-8 are replaced by U+FFFD."""
    stderr: str
    seconds: float
    """From the program's start to its end."""
    cpu_seconds: float
    """Of all its processes."""
    peak_mb: float
    """The largest resident memory of one process, MiB. About 15 MiB of it are the interpreter's."""
    safe: bool = True
    """False where the program ran in the `plain` backend, which isolates nothing."""


@dataclass(frozen=True, slots=True)
class SessionExecution:
    """How one execution in a session ended, and what came out of it."""

    outcome: ProgramOutcome | Ended
    """After ok and error the session goes on. After anything else it has ended, and further executions are `ended`."""
    value: str | None
    """`repr` of the last statement, if that is an expression and not None. It is what the program says it is."""
    stdout: str
    stderr: str
    """With the traceback, if the outcome is error."""
    seconds: float
    """In the sandbox; without the time that the caller's `host` took."""
    safe: bool = True
    """False in the `plain` backend, which isolates nothing."""
