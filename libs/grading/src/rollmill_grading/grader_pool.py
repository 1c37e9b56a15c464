"""Long-lived grader processes with a hard time limit, for libraries that evaluate a model's text and users' functions.

Symbolic algebra on such text can run for hours while holding the interpreter lock, so it happens in processes that the
parent kills. They are started afresh (not forked from a process that holds torch) and die with their parent.

Messages are frames, a 4-byte big-endian length and a body: pickle towards the process, JSON back, because output of a
process that runs untrusted code is not trusted. The other side is `serve` in grader_worker.py.
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

from rollmill_grading.errors import GraderProcessLostError, GradingError, RemoteFunctionError, WorkerDiedError

_LARGEST_REPLY = 16 << 20
_LONGEST_POLL_MS = 2**31 - 1
_CHUNK = 1 << 16
_WATCH_S = 0.5


class WorkerProcess:
    """A process that handles one request at a time, and its two pipes, owned by the thread that started it.

    The kernel ties a child's life to that thread.

    Args:
        program: the file to run, with this interpreter and this `sys.path`.
        arguments: further arguments, after this process's id.
        quiet: discard its output.
    """

    def __init__(self, program: Path, arguments: Sequence[str] = (), *, quiet: bool = False) -> None:
        command = [sys.executable, "-P", str(program), str(os.getpid()), *arguments]
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
        self._ended = False  # killed, or known to have ended
        self.loaded: set[tuple[str, str]] = set()  #: (path, setup) pairs that it has loaded

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        """True if it is still running."""
        return not self._ended and self._popen.poll() is None

    def ask(
        self, kind: str, payload: Any, time_limit_s: float, watch: Callable[[], str | None] | None = None
    ) -> dict[str, Any] | None:
        """Send a request and return the process's reply; None at the time limit, also if it does not read the request.

        Args:
            watch: called twice a second while waiting; a text that it returns is the reason to stop waiting.

        Raises:
            WorkerDiedError: the process ended, sent an invalid reply, or `watch` returned a reason.
        """
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
                    raise WorkerDiedError(reason)
                continue
            chunk = os.read(self._popen.stdout.fileno(), _CHUNK)
            if not chunk or len(received) > _LARGEST_REPLY:
                raise WorkerDiedError(self._ending())
            received += chunk
        try:
            found: dict[str, Any] = json.loads(received[4:])
        except ValueError:
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
                raise WorkerDiedError(self._ending()) from None
        return True

    def kill(self) -> None:
        """Kill it and its child processes."""
        if self._popen.returncode is None:  # not waited for, so its id cannot be reused
            with contextlib.suppress(ProcessLookupError):  # another thread has just waited for it
                os.killpg(self._popen.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it, wait for its end and close its pipes."""
        self._ending()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # unread input of a dead process
                pipe.close()

    def _ending(self) -> str:
        self._ended = True  # while one thread waits for a process, `poll` reports it as running to others
        self.kill()
        return f"exit status {self._popen.wait()}"


def _ready(descriptor: int, event: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, event | select.POLLHUP)
    return bool(poll.poll(min(seconds * 1000, _LONGEST_POLL_MS)))


MEMORY_BYTES = 2 << 30
"""Address space of one grader process that evaluates a model's text."""
START_TIMEOUT_S = 120.0
"""Longest wait for a fresh process to import its grading library."""
_LOAD_ONLY = object()
"""Payload of a job that only loads."""
_WORKER = Path(__file__).with_name("grader_worker.py")


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


@dataclass(slots=True)
class _Job:
    function: WorkerFunction
    payload: Any
    time_limit_s: float
    setup: str
    reply: Future[GraderResult] = field(default_factory=Future)
    queued_at: float = field(default_factory=time.perf_counter)


class GraderPool:
    """Pool of up to `workers` grader processes, started on demand, that take jobs in order of submission.

    `memory_bytes` limits the address space of each (0: no limit). `quiet` discards what they print.
    """

    def __init__(self, workers: int = 1, *, memory_bytes: int = MEMORY_BYTES, quiet: bool = True) -> None:
        assert workers >= 1
        self._workers = workers
        self.memory_bytes, self.quiet = memory_bytes, quiet
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[_GraderThread] = []
        self.loads: list[tuple[WorkerFunction, str]] = []  #: functions, and setups, that a new process loads at once
        self._waiting = 0
        self._closed = False

    async def ask(self, function: WorkerFunction, payload: Any, time_limit_s: float, setup: str = "") -> GraderResult:
        """Return a grader process's result for `payload`. The limit counts from when a process starts on it.

        `function` is loaded once per process and `setup`; `payload` must pickle. Raises GradingError if the grader
        itself fails: it cannot start, it raised, or (GraderProcessLostError) two processes in a row died on the
        payload.
        """
        return await asyncio.wrap_future(self.submit(function, payload, time_limit_s, setup))

    def submit(
        self, function: WorkerFunction, payload: Any, time_limit_s: float, setup: str = ""
    ) -> Future[GraderResult]:
        """`ask` for callers without an event loop."""
        job = _Job(function, payload, time_limit_s, setup)
        with self._lock:
            if self._closed:
                raise GradingError("the grader processes are closed; score completions before closing")
            self._waiting += 1
            if self._waiting > sum(thread.idle for thread in self._threads) and len(self._threads) < self._workers:
                self._threads.append(_GraderThread(self))
            self._jobs.put(job)
        return job.reply

    def warm(self, function: WorkerFunction, setup: str = "") -> None:
        """Start all processes in the background; each loads what its first answer would wait for. A failure shows again
        with that answer."""
        with self._lock:
            if not self._closed:
                self.loads.append((function, setup))
                self._threads += [_GraderThread(self) for _ in range(self._workers - len(self._threads))]

    def pids(self) -> list[int]:
        """Process ids of the live grader processes."""
        processes = [thread.process for thread in self._threads]
        return [process.pid for process in processes if process is not None]

    def take(self, thread: _GraderThread) -> _Job | None:
        """Return the next job for a thread; None when the pool closes."""
        job = self._jobs.get()
        with self._lock:
            self._waiting -= job is not None
            thread.idle = False
        return job

    def close(self) -> None:
        """Kill the processes and wait for their end; running jobs end in GradingError, waiting ones are cancelled."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
            with contextlib.suppress(queue.Empty):  # a thread may take the last job at this moment
                while (job := self._jobs.get_nowait()) is not None:
                    job.reply.cancel()
        for thread in threads:
            thread.closing = True
            self._jobs.put(None)
            thread.kill()
        for thread in threads:
            thread.thread.join()


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
        process = self.process  # its thread may end it meanwhile
        if process is not None:
            process.kill()

    def _serve(self) -> None:
        try:
            self._load()
            while (job := self._pool.take(self)) is not None:
                if job.reply.set_running_or_notify_cancel():
                    self._serve_one(job)
                self.idle = True
        finally:
            self._end_process()

    def _load(self) -> None:
        """Start the process with what the pool says in advance."""
        for function, setup in self._pool.loads:
            self.idle = False
            with contextlib.suppress(Exception):  # it shows again with the first answer
                self._grade(_Job(function, _LOAD_ONLY, START_TIMEOUT_S, setup))
        self.idle = True

    def _serve_one(self, job: _Job) -> None:
        started = time.perf_counter()
        try:
            reply = self._grade(job)
        except Exception as error:
            self.idle = True  # before the reply, or the caller's next job would start another process
            job.reply.set_exception(error)
            return
        self.idle = True
        job.reply.set_result(replace(reply, queue_s=started - job.queued_at, run_s=time.perf_counter() - started))

    def _grade(self, job: _Job) -> GraderResult:
        for _ in range(2):
            try:
                return self._run_job(job)
            except WorkerDiedError as death:
                self._end_process()
                died = death
                if self.closing:
                    raise GradingError("the grader processes were closed while this answer was scored") from None
        raise GraderProcessLostError(
            f"the {job.function.name} grader died twice on this answer ({died}); is the machine out of memory?"
        )

    def _run_job(self, job: _Job) -> GraderResult:
        if self.process is None:
            self.process = WorkerProcess(_WORKER, [str(self._pool.memory_bytes)], quiet=self._pool.quiet)
        if self.closing:  # `close` sets this before it kills the process
            raise WorkerDiedError("closed")
        name, loaded = job.function.name, (job.function.path, job.setup)
        if loaded not in self.process.loaded:
            found = self.process.ask("load", loaded, START_TIMEOUT_S)
            if found is None or "error" in found:
                self._end_process()
                why = found["error"] if found else f"it took longer than {START_TIMEOUT_S:g} s"
                raise GradingError(f"the {name} grader cannot start: {why}")
            self.process.loaded.add(loaded)
        if job.payload is _LOAD_ONLY:
            return GraderResult("ok")
        found = self.process.ask("call", (*loaded, job.payload), job.time_limit_s)
        if found is None or "outcome" in found:
            self._end_process()
            return GraderResult("timeout" if found is None else "memory")
        if "traceback" in found:
            raise GradingError(found["error"]) from RemoteFunctionError(found["traceback"])
        if "error" in found:
            raise GradingError(f"the {name} grader raised {found['error']}")
        return GraderResult("ok", found["value"])

    def _end_process(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.end()
