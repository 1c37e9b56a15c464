"""Long-lived grader processes with a hard time limit, for libraries that evaluate a model's text and users' functions.

Symbolic algebra on such text can run for hours while holding the interpreter lock, so it happens in processes that the
parent kills. They are started afresh (not forked from a process that holds torch) and die with their parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollmill.errors import RewardError

# A process that does one thing at a time for its parent, which can kill it: graders, and environments.
#
# Messages are frames, a 4-byte big-endian length and a body: pickle towards the process, JSON back, since what comes
# out
# of a process that runs others' code is not to be trusted. The other side is `serve` in grader_worker.py.

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


MEMORY_BYTES = 2 << 30
"""Address space of one grader process that evaluates a model's text."""
START_TIMEOUT_S = 120.0
"""Longest wait for a fresh process to import its grading library."""
_WORKER = Path(__file__).with_name("grader_worker.py")


@dataclass(frozen=True, slots=True)
class GraderResult:
    """`outcome` is "ok" (then `value` is the grader's answer), "timeout" or "memory".

    `queued` is how many seconds no process was free, `worked` how many it took then; None where none was asked.
    """

    outcome: str
    value: Any = 0.0
    queue_s: float = 0.0
    run_s: float | None = None


@dataclass(slots=True)
class _Job:
    kind: str
    payload: Any
    time_limit_s: float
    setup: str
    reply: Future[GraderResult] = field(default_factory=Future)
    asked: float = field(default_factory=time.perf_counter)


class GraderPool:
    """Up to `workers` grader processes, started when first needed, that take jobs first come, first served.

    `memory_bytes` limits the address space of each, 0 does not. `quiet` discards what they print.
    """

    def __init__(self, workers: int = 1, *, memory_bytes: int = MEMORY_BYTES, quiet: bool = True) -> None:
        assert workers >= 1
        self._workers = workers
        self.memory_bytes, self.quiet = memory_bytes, quiet
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._lanes: list[_GraderThread] = []
        self._waiting = 0
        self._closed = False

    async def ask(self, kind: str, payload: Any, time_limit_s: float, setup: str = "") -> GraderResult:
        """What a grader process says of `payload`. The limit counts from when a process starts on it.

        `kind` is a handler of grader_worker.py, `setup` what it loads once per process; `payload` must pickle. Raises
        RewardError when the grader itself fails: it cannot start, it raised, or two processes in a row died on this
        payload.
        """
        return await asyncio.wrap_future(self.submit(kind, payload, time_limit_s, setup))

    def submit(self, kind: str, payload: Any, time_limit_s: float, setup: str = "") -> Future[GraderResult]:
        """`ask` for callers without an event loop."""
        job = _Job(kind, payload, time_limit_s, setup)
        with self._lock:
            if self._closed:
                raise RewardError("the graders are closed; judge before closing")
            self._waiting += 1
            if self._waiting > sum(lane.idle for lane in self._lanes) and len(self._lanes) < self._workers:
                self._lanes.append(_GraderThread(self))
            self._jobs.put(job)
        return job.reply

    def pids(self) -> list[int]:
        """Process ids of the live grader processes."""
        processes = [lane.process for lane in self._lanes]
        return [process.pid for process in processes if process is not None]

    def take(self, lane: _GraderThread) -> _Job | None:
        """The next job for a lane; None when the pool closes."""
        job = self._jobs.get()
        with self._lock:
            self._waiting -= job is not None
            lane.idle = False
        return job

    def close(self) -> None:
        """Kill the processes and wait until they are gone; jobs under way end in RewardError, others are cancelled."""
        with self._lock:
            self._closed = True
            lanes, self._lanes = self._lanes, []
            with contextlib.suppress(queue.Empty):  # a lane may take the last job at this moment
                while (job := self._jobs.get_nowait()) is not None:
                    job.reply.cancel()
        for lane in lanes:
            lane.closing = True
            self._jobs.put(None)
            lane.kill()
        for lane in lanes:
            lane.thread.join()


class _GraderThread:
    """A thread that owns one grader process. (The kernel ties a child's life to the thread that started it.)"""

    def __init__(self, pool: GraderPool) -> None:
        self._pool = pool
        self.process: WorkerProcess | None = None
        self.idle = True
        self.closing = False
        self.thread = threading.Thread(target=self._serve, name="rollmill-grader", daemon=True)
        self.thread.start()

    def kill(self) -> None:
        process = self.process  # which the lane's thread may end meanwhile
        if process is not None:
            process.kill()

    def _serve(self) -> None:
        try:
            while (job := self._pool.take(self)) is not None:
                if job.reply.set_running_or_notify_cancel():
                    self._serve_one(job)
                self.idle = True
        finally:
            self._end_process()

    def _serve_one(self, job: _Job) -> None:
        began = time.perf_counter()
        try:
            reply = self._graded(job)
        except Exception as error:
            self.idle = True  # before the answer is known, or whoever asks again then would start another process
            job.reply.set_exception(error)
            return
        self.idle = True
        job.reply.set_result(replace(reply, queue_s=began - job.asked, run_s=time.perf_counter() - began))

    def _graded(self, job: _Job) -> GraderResult:
        for _ in range(2):
            try:
                return self._asked(job)
            except WorkerDiedError as death:
                self._end_process()
                died = death
                if self.closing:
                    raise RewardError("the graders were closed while this answer was judged") from None
        raise RewardError(f"the {job.kind} grader died twice on this answer ({died}); is the machine out of memory?")

    def _asked(self, job: _Job) -> GraderResult:
        if self.process is None:
            self.process = WorkerProcess(_WORKER, [str(self._pool.memory_bytes)], quiet=self._pool.quiet)
        if self.closing:  # `close` sets this before it kills the process it sees
            raise WorkerDiedError("closed")
        if (job.kind, job.setup) not in self.process.loaded:
            found = self.process.ask("load", (job.kind, job.setup), START_TIMEOUT_S)
            if found is None or "error" in found:
                self._end_process()
                why = found["error"] if found else f"it took longer than {START_TIMEOUT_S:g} s"
                raise RewardError(f"the {job.kind} grader cannot start: {why}")
            self.process.loaded.add((job.kind, job.setup))
        found = self.process.ask(job.kind, (job.setup, job.payload), job.time_limit_s)
        if found is None or "outcome" in found:
            self._end_process()
            return GraderResult("timeout" if found is None else "memory")
        if "error" in found:
            if "traceback" in found:
                raise RewardError(found["error"]) from RemoteFunctionError(found["traceback"])
            raise RewardError(f"the {job.kind} grader raised {found['error']}")
        return GraderResult("ok", found["value"])

    def _end_process(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.end()


class RemoteFunctionError(Exception):
    """An exception of a user's function in another process, with its traceback as text."""

    def __str__(self) -> str:
        return f"in a reward process:\n{self.args[0]}"
