"""One kind of process for all code that may hang or crash: it calls functions by their import path, and can be killed.

It is started afresh (not forked from a process that holds torch) and dies with its parent. Its owner shares out calls
and starts the next one: GraderPool for calls of which each stands alone, or a worker that holds environments.

Messages are frames, a 4-byte big-endian length and a body: pickle towards the process, JSON back, because output of a
process that runs untrusted code is not trusted. The other side is grader_worker.py.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmill_grading.errors import GradingError, RemoteFunctionError, WorkerDiedError

START_TIMEOUT_S = 120.0
"""Longest wait for a fresh process to import what a function needs."""
_LARGEST_REPLY = 16 << 20
_LONGEST_POLL_MS = 2**31 - 1
_CHUNK = 1 << 16
_WATCH_S = 0.5
_PROGRAM = Path(__file__).with_name("grader_worker.py")


@dataclass(frozen=True, slots=True)
class WorkerFunction:
    """A function that grader processes call, by its import path, so that only they import it.

    Args:
        name: names the grader in errors.
        path: `module:function`. It is called once in a process with the job's `setup`, imports what answers would wait
            for, and returns the function that takes a job's payload and returns what JSON holds.
    """

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class GraderResult:
    """`outcome` is "ok" (then `value` is the grader's answer), "timeout" or "memory".

    `queue_s` is the time in seconds until a process was free, `run_s` the time it then took; None if none ran.
    """

    outcome: str
    value: Any = 0.0
    queue_s: float = 0.0
    run_s: float | None = None


class WorkerProcess:
    """A process that handles one call at a time, and its two pipes, owned by the thread that started it.

    The kernel ties a child's life to that thread.

    Args:
        memory_bytes: limit of its address space; 0: none.
        quiet: discard its output.
    """

    def __init__(self, *, memory_bytes: int = 0, quiet: bool = False) -> None:
        command = [sys.executable, "-P", str(_PROGRAM), str(os.getpid()), str(memory_bytes)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            env=environment,
            start_new_session=True,
        )
        assert self._popen.stdin is not None
        os.set_blocking(self._popen.stdin.fileno(), False)  # `_send` waits no longer than its deadline
        self.ended = False  #: killed, or known to have ended
        self._loaded: set[tuple[str, str]] = set()  # (path, setup)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        """True if it is still running."""
        return not self.ended and self._popen.poll() is None

    def load(self, function: WorkerFunction, setup: str = "") -> None:
        """Load a function, unless the process has. Raises GradingError, and ends it, if it cannot be loaded."""
        loaded = (function.path, setup)
        if loaded in self._loaded:
            return
        found = self._request("load", loaded, START_TIMEOUT_S, None)
        if found is None or "value" not in found:
            self.end()
            why = found.get("error", "it ran out of memory") if found else f"it took longer than {START_TIMEOUT_S:g} s"
            raise GradingError(f"the {function.name} grader cannot start: {why}")
        self._loaded.add(loaded)

    def call(
        self,
        function: WorkerFunction,
        payload: Any,
        time_limit_s: float,
        setup: str = "",
        watch: Callable[[], str | None] | None = None,
    ) -> GraderResult:
        """Return a function's result; it is loaded first, with `setup`. The limit does not count that.

        The process is ended at the time limit, also if it does not read the payload, and when it is out of memory.

        Args:
            watch: called twice a second while waiting; a text that it returns is the reason to stop waiting.

        Raises:
            WorkerDiedError: the process has ended, or is ended: it sent an invalid reply, or `watch` returned a reason.
            GradingError: the function cannot be loaded, or raised.
        """
        self.load(function, setup)
        found = self._request("call", (function.path, setup, payload), time_limit_s, watch)
        if found is None or "outcome" in found:
            self.end()
            return GraderResult("timeout" if found is None else "memory")
        if "traceback" in found:
            raise GradingError(found["error"]) from RemoteFunctionError(found["traceback"])
        if "error" in found:
            raise GradingError(f"the {function.name} grader raised {found['error']}")
        return GraderResult("ok", found["value"])

    def _request(
        self, kind: str, payload: Any, time_limit_s: float, watch: Callable[[], str | None] | None
    ) -> dict[str, Any] | None:
        """Send a request and return the process's reply; None at the time limit."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        body = pickle.dumps((kind, payload))
        deadline = time.monotonic() + time_limit_s
        if not self._send(struct.pack("!I", len(body)) + body, deadline):
            return None
        received = b""
        while len(received) < 4 or len(received) < 4 + struct.unpack("!I", received[:4])[0]:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if not _ready(self._popen.stdout.fileno(), select.POLLIN, left if watch is None else min(left, _WATCH_S)):
                if watch is not None and (reason := watch()) is not None:
                    self.end()
                    raise WorkerDiedError(reason)
                continue
            chunk = os.read(self._popen.stdout.fileno(), _CHUNK)
            if not chunk or len(received) > _LARGEST_REPLY:
                raise WorkerDiedError(self.end())
            received += chunk
        try:
            found: dict[str, Any] = json.loads(received[4:])
        except ValueError:
            self.end()
            raise WorkerDiedError("it sent an invalid reply") from None
        return found

    def _send(self, data: bytes, deadline: float) -> bool:
        """Write to the process, which may be stopped and not read; False at the deadline."""
        assert self._popen.stdin is not None
        pipe, rest = self._popen.stdin.fileno(), memoryview(data)
        while rest:
            if (left := deadline - time.monotonic()) <= 0:
                return False
            try:
                if _ready(pipe, select.POLLOUT, left):
                    rest = rest[os.write(pipe, rest) :]
            except BrokenPipeError:
                raise WorkerDiedError(self.end()) from None
        return True

    def kill(self) -> None:
        """Kill it and its child processes."""
        if self._popen.returncode is None:  # not waited for, so its id cannot be reused
            with contextlib.suppress(ProcessLookupError):  # another thread has just waited for it
                os.killpg(self._popen.pid, signal.SIGKILL)

    def end(self) -> str:
        """Kill it, wait for its end and close its pipes. Return its exit status, as text. May be called twice."""
        self.ended = True  # while one thread waits for a process, `poll` reports it as running to others
        self.kill()
        status = self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # unread input of a dead process
                pipe.close()
        return f"exit status {status}"


def _ready(descriptor: int, event: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, event | select.POLLHUP)
    return bool(poll.poll(min(seconds * 1000, _LONGEST_POLL_MS)))
