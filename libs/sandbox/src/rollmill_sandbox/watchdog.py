"""Watches one program: collects its output, enforces its limits, ends its processes, and returns the outcome."""

from __future__ import annotations

import math
import os
import select
import signal
import time
from dataclasses import dataclass, field

from rollmill_sandbox.backend import IsolationBackend
from rollmill_sandbox.file_locks import FileLockGate
from rollmill_sandbox.limits import SandboxLimits
from rollmill_sandbox.protocol import JobReply

DISK_FULL = b"killed: it uses more disk than allowed\n"
"""Added to a program's stderr if the supervisor, not the kernel, enforces the disk limit."""
FOREIGN_LOCK = b"killed: it locked a file outside of its folder\n"
_CHUNK = 1 << 16


@dataclass(slots=True)
class RunningProgram:
    """A running program: its process and the read ends of its pipes."""

    pid: int
    stdout: int
    stderr: int
    locks: FileLockGate | None = None
    """The gate of its locks of files, if its supervisor admits them."""
    started: float = field(default_factory=time.monotonic)


def watch_program(program: RunningProgram, limits: SandboxLimits, backend: IsolationBackend, caller: int) -> JobReply:
    """Wait for the program's end and return its reply. `caller` is a socket whose hang-up cancels the program."""
    gathered: dict[int, bytearray] = {program.stdout: bytearray(), program.stderr: bytearray()}
    process = os.pidfd_open(program.pid)
    poll = select.poll()
    for descriptor in (program.stdout, program.stderr, process):
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.POLLIN)
    poll.register(caller, 0)
    if program.locks is not None:
        poll.register(program.locks, select.POLLIN)
    stopped = ""
    running = True
    while running and not stopped:
        left = program.started + limits.wall_s - time.monotonic()
        look_s = min(left, backend.look_s, program.locks.look_s() if program.locks is not None else math.inf)
        ready = {descriptor for descriptor, _ in poll.poll(look_s * 1000 + 1)} if left > 0 else set()
        for descriptor in ready & gathered.keys():
            if not gather(descriptor, gathered[descriptor]):
                poll.unregister(descriptor)
        running = process not in ready
        if sum(map(len, gathered.values())) > limits.output_bytes:
            stopped = "output"
        elif caller in ready:
            stopped = "killed"
        elif left <= 0:
            stopped = "timeout"
        elif running and backend.full(program.pid, limits) and not has_ended(process):
            stopped = "error"
            gathered[program.stderr] += DISK_FULL
        elif program.locks is not None and program.locks.answer():
            stopped = "killed"
            gathered[program.stderr] += FOREIGN_LOCK
    seconds = time.monotonic() - program.started
    backend.signal_all(program.pid, signal.SIGKILL)
    status, cpu, peak = reap(program.pid, backend.reaps(program.pid))
    os.close(process)
    for descriptor, bytes_so_far in gathered.items():
        while sum(map(len, gathered.values())) <= limits.output_bytes and gather(descriptor, bytes_so_far):
            pass
    if sum(map(len, gathered.values())) > limits.output_bytes:
        stopped = stopped or "output"
    stdout, stderr = bytes(gathered[program.stdout]), bytes(gathered[program.stderr])
    ran_out = status == -signal.SIGKILL and backend.group is not None and backend.group.ran_out()
    outcome = stopped or ("memory" if ran_out else _outcome(status, cpu, stderr, limits))
    stdout = stdout[: limits.output_bytes]
    stderr = stderr[: limits.output_bytes - len(stdout)]
    return JobReply(outcome, status, seconds, cpu, peak, stdout, stderr)


def has_ended(process: int) -> bool:
    """True if the process of a pidfd has ended: then it cannot be inspected any more."""
    return bool(select.select([process], [], [], 0)[0])


def gather(descriptor: int, into: bytearray) -> bool:
    """Read the available bytes; False at the end of the stream, or if a pipe that is still open is empty."""
    try:
        chunk = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return False
    into += chunk
    return bool(chunk)


def reap(program: int, reaps: int) -> tuple[int, float, float]:
    """Reap the program's processes.

    Returns its exit status, the CPU seconds of all processes and the largest resident memory of one, MiB.
    """
    status, cpu, peak = 0, 0.0, 0.0
    while True:
        try:
            pid, found, usage = os.wait4(reaps, 0)
        except ChildProcessError:
            return status, cpu, peak
        cpu += usage.ru_utime + usage.ru_stime
        peak = max(peak, usage.ru_maxrss / 1024)
        if pid == program:
            status = os.waitstatus_to_exitcode(found)


def _outcome(status: int, cpu: float, stderr: bytes, limits: SandboxLimits) -> str:
    if status == 0:
        return "ok"
    if status == -signal.SIGXCPU or (status == -signal.SIGKILL and cpu >= limits.cpu_s):
        return "timeout"
    if status > 0:
        last = stderr[-4096:].rstrip().rpartition(b"\n")[2]
        return "memory" if last.startswith((b"MemoryError", b"numpy._core._exceptions._ArrayMemoryError")) else "error"
    return "killed"
