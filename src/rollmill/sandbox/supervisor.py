"""Watches one program: gathers its output, keeps the wall and output limits, ends its processes, names the outcome."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from resource import struct_rusage

from rollmill.sandbox.limits import Limits
from rollmill.sandbox.wire import Ending

_CHUNK = 1 << 16


@dataclass(slots=True)
class Watched:
    """A running program: its process and the read ends of its pipes."""

    pid: int
    stdout: int
    stderr: int
    started: float = field(default_factory=time.monotonic)


def watch(program: Watched, limits: Limits, end_all: Callable[[], None], reaps: int, caller: int = -1) -> Ending:
    """Wait for the program's end and describe it.

    `end_all` kills every process of the program. `reaps` is what to wait for in waitpid's terms: -1 in a process that
    has no other children, else the program's process id. `caller` is a socket whose hang-up cancels the program.
    """
    gathered: dict[int, bytearray] = {program.stdout: bytearray(), program.stderr: bytearray()}
    process = os.pidfd_open(program.pid)
    poll = select.poll()
    for descriptor in (program.stdout, program.stderr, process):
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.POLLIN)
    if caller >= 0:
        poll.register(caller, 0)
    stopped = ""
    running = True
    while running and not stopped:
        left = program.started + limits.wall_s - time.monotonic()
        ready = {descriptor for descriptor, _ in poll.poll(max(left, 0) * 1000 + 1)} if left > 0 else set()
        for descriptor in ready & gathered.keys():
            if not _gather(descriptor, gathered[descriptor]):
                poll.unregister(descriptor)
        running = process not in ready
        if sum(map(len, gathered.values())) > limits.output_bytes:
            stopped = "output"
        elif caller in ready:
            stopped = "killed"
        elif left <= 0:
            stopped = "timeout"
    seconds = time.monotonic() - program.started
    end_all()
    status, cpu, peak = _reap(program.pid, reaps)
    os.close(process)
    for descriptor, bytes_so_far in gathered.items():
        while sum(map(len, gathered.values())) <= limits.output_bytes and _gather(descriptor, bytes_so_far):
            pass
    if sum(map(len, gathered.values())) > limits.output_bytes:
        stopped = stopped or "output"
    stdout, stderr = bytes(gathered[program.stdout]), bytes(gathered[program.stderr])
    outcome = stopped or _outcome(status, cpu, stderr, limits)
    stdout = stdout[: limits.output_bytes]
    stderr = stderr[: limits.output_bytes - len(stdout)]
    return Ending(outcome, status, seconds, cpu, peak, stdout, stderr)


def _gather(descriptor: int, into: bytearray) -> bool:
    """Read what is there; False at the end of the stream, or where a pipe that is still open holds nothing."""
    try:
        chunk = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return False
    into += chunk
    return bool(chunk)


def _reap(program: int, reaps: int) -> tuple[int, float, float]:
    """The program's exit status, the CPU seconds of all its processes and the largest resident memory of one, MiB."""
    status, cpu, peak = 0, 0.0, 0.0
    while True:
        try:
            pid, found, usage = os.wait4(reaps, 0)
        except ChildProcessError:
            return status, cpu, peak
        cpu, peak = cpu + _cpu(usage), max(peak, usage.ru_maxrss / 1024)
        if pid == program:
            status = os.waitstatus_to_exitcode(found)


def _cpu(usage: struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def _outcome(status: int, cpu: float, stderr: bytes, limits: Limits) -> str:
    if status == 0:
        return "ok"
    if status == -signal.SIGXCPU or (status == -signal.SIGKILL and cpu >= limits.cpu_s):
        return "timeout"
    if status > 0:
        last = stderr[-4096:].rstrip().rpartition(b"\n")[2]
        return "memory" if last.startswith((b"MemoryError", b"numpy._core._exceptions._ArrayMemoryError")) else "error"
    return "killed"
