"""A process that does one thing at a time for its parent, which can kill it: graders, and environments.

Messages are frames, a 4-byte big-endian length and a body: pickle towards the process, JSON back, since what comes out
of a process that runs others' code is not to be trusted. The other side is `serve` in grader_worker.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_LARGEST_REPLY = 16 << 20
_LONGEST_POLL_MS = 2**31 - 1
_CHUNK = 1 << 16
_WATCH_S = 0.5


class WorkerDiedError(Exception):
    """A process ended by itself, or was killed from outside."""


class WorkerProcess:
    """One process and its two pipes, owned by the thread that made it. (The kernel ties a child's life to that thread.)

    Args:
        program: the file to run, with this interpreter and what it finds on `sys.path`.
        arguments: of the program, behind this process's id.
        quiet: discard what it prints.
    """

    def __init__(self, program: Path, arguments: Sequence[str] = (), *, quiet: bool = False) -> None:
        command = [sys.executable, "-P", str(program), str(os.getpid()), *arguments]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            env=environment,
            start_new_session=True,
        )
        self._over = False  # killed, or known to have ended
        self.loaded: set[tuple[str, str]] = set()  #: what it was told to load

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return not self._over and self._popen.poll() is None

    def ask(
        self, kind: str, payload: Any, time_limit_s: float, watch: Callable[[], str | None] | None = None
    ) -> dict[str, Any] | None:
        """The process's reply, None when it does not come in time.

        Args:
            watch: asked twice a second while the reply is awaited; a text is the reason to wait no longer.

        Raises:
            WorkerDiedError: the process ended, sent something that is no reply, or `watch` gave a reason.
        """
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        body = pickle.dumps((kind, payload))
        deadline = time.monotonic() + time_limit_s
        try:
            self._popen.stdin.write(struct.pack("!I", len(body)) + body)
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise WorkerDiedError(self._ending()) from None
        received = b""
        while len(received) < 4 or len(received) < 4 + struct.unpack("!I", received[:4])[0]:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if not _readable(self._popen.stdout.fileno(), left if watch is None else min(left, _WATCH_S)):
                if watch is not None and (reason := watch()) is not None:
                    raise WorkerDiedError(reason)
                continue
            chunk = os.read(self._popen.stdout.fileno(), _CHUNK)
            if not chunk or len(received) > _LARGEST_REPLY:
                raise WorkerDiedError(self._ending())
            received += chunk
        try:
            found: dict[str, Any] = json.loads(received[4:])
        except ValueError:
            raise WorkerDiedError("it sent something that is no reply") from None
        return found

    def kill(self) -> None:
        """Kill it and whatever it started."""
        if self._popen.returncode is None:  # not waited for, so nothing else can have its number
            with contextlib.suppress(ProcessLookupError):  # another thread has just waited for it
                os.killpg(self._popen.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it, wait until it is gone and close its pipes."""
        self._ending()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what a dead process has not read
                pipe.close()

    def _ending(self) -> str:
        self._over = True  # while one thread waits for a process, `poll` tells others that it runs
        self.kill()
        return f"exit status {self._popen.wait()}"


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(min(seconds * 1000, _LONGEST_POLL_MS)))
