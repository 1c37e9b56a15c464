"""Notices from another process that training makes no progress, and shows what its threads are doing.

The watchdog looks at counters of finished work (`progress.py`), which the process shares: a blocked event loop, a lock
that nobody gives back and a server that never answers look the same, and a heartbeat does not count.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import psutil

import rollmill
from rollmill.errors import RollmillError, user_code_frame
from rollmill.files import explain_write_errors
from rollmill.progress import does_uncounted_work, progress_counters

DUMP_SIGNAL = signal.SIGRTMAX - 2
"""The process that trains writes the stacks of its threads when it gets this signal: nothing else uses it."""
_DUMP_S, _LOOK_S = 3.0, 0.05
_BUSY = 0.01
"""Share of a processor whose use counts as progress where work has no counters; a heartbeat uses far less."""
_BUSY_BYTES = 2**20
_THREAD = re.compile(r"^(?:Current thread|Thread) ", re.MULTILINE)
_OWN = str(Path(rollmill.__file__).parent)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


class StallWatchdog:
    """Measures for how long a process has made no progress.

    Time in which this process itself was stopped, with the machine or by Ctrl-Z, does not count.

    Args:
        limit_s: seconds without progress that are a stall.
        longest_look_s: at most so much time between two looks counts.
    """

    def __init__(self, pid: int, limit_s: float, longest_look_s: float) -> None:
        self._pid, self._limit_s, self._longest_look_s = pid, limit_s, longest_look_s
        self._counters, self._looked, self.quiet_s = progress_counters(), time.monotonic(), 0.0
        self._used: tuple[float, int] | None = None

    def is_stalled(self) -> bool:
        """Look at the counters; True once nothing has changed for `limit_s`."""
        now, counters = time.monotonic(), progress_counters()
        self.quiet_s += min(now - self._looked, self._longest_look_s)
        self._looked = now
        if counters != self._counters:
            self._counters, self.quiet_s, self._used = counters, 0.0, None
        if self.quiet_s < self._limit_s / 2 or not does_uncounted_work():
            return self.quiet_s >= self._limit_s
        if self._used is None:
            self._used, self.quiet_s = _use_of_resources(self._pid), self._limit_s / 2
        if self.quiet_s < self._limit_s:
            return False
        before, self._used = self._used, _use_of_resources(self._pid)
        busy = self._used[0] - before[0] > _BUSY * self._limit_s / 2 or self._used[1] - before[1] > _BUSY_BYTES
        self.quiet_s = self._limit_s / 2 if busy else self.quiet_s
        return not busy


def _use_of_resources(pid: int) -> tuple[float, int]:
    """Processor seconds and bytes read and written of a process and its descendants."""
    seconds, count = 0.0, 0
    try:
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            times, moved = each.cpu_times(), each.io_counters()
            seconds += times.user + times.system
            count += moved.read_chars + moved.write_chars + moved.read_bytes + moved.write_bytes
    except psutil.Error:  # one has just ended
        pass
    return seconds, count


def memory_file() -> IO[bytes]:
    """Return a file without a name; in memory where the system can do that, so that no full disk matters."""
    return os.fdopen(os.memfd_create("rollmill"), "w+b") if sys.platform == "linux" else TemporaryFile()


def dump_stacks(pid: int, written: IO[bytes]) -> str:
    """Return the stacks of the threads of a process that has called `faulthandler.register(DUMP_SIGNAL, written)`.

    Empty if it cannot write them, for example because it was stopped.
    """
    os.kill(pid, DUMP_SIGNAL)
    ends, size = time.monotonic() + _DUMP_S, 0
    while time.monotonic() < ends:
        time.sleep(_LOOK_S)
        before, size = size, os.fstat(written.fileno()).st_size
        if size and size == before:
            break
    return read_stacks(written)


def read_stacks(written: IO[bytes]) -> str:
    """Return what a process has written into its file of stacks."""
    return os.pread(written.fileno(), 2**20, 0).decode(errors="replace").strip()


def blocked_in(stacks: str) -> str:
    """Return FILE:LINE (FUNCTION) of users' code that rollmill has called, from a dump of stacks; or an empty text.

    The thread that runs the event loop is the last one of a dump, so threads are searched from the end.
    """
    for thread in reversed(_THREAD.split(stacks)):
        for file, line, function in _FRAME.findall(thread):  # from the innermost
            if file.startswith(_OWN):
                break
            if user_code_frame(file):
                return f"{file}:{line} ({function})"
    return ""


def write_stacks(run_dir: Path, kind: str, why: str, stacks: str) -> str:
    """Write stacks to the next file KIND-N.txt of the run directory. Returns `; the stacks of its threads are in FILE`,
    or why they are not, for the end of a message; empty if there are none."""
    if not stacks:
        return ""
    number = 1
    while (path := run_dir / f"{kind}-{number}.txt").exists():
        number += 1
    try:
        with explain_write_errors(path):
            path.write_text(f"{why}\n\n{stacks}\n")
    except RollmillError as error:  # the message is worth more than the stacks
        return f"; the stacks of its threads are lost: {str(error).rstrip('.')}"
    return f"; the stacks of its threads are in {path}"
