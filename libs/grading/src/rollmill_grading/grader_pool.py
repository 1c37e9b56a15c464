"""A pool of processes with a hard time limit, for libraries that evaluate a model's text and users' functions.

Symbolic algebra on such text can run for hours while holding the interpreter lock, so it happens in processes that the
parent kills (worker_process.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from rollmill_grading.errors import GraderProcessLostError, GradingError, WorkerDiedError
from rollmill_grading.worker_process import GraderResult, WorkerFunction, WorkerProcess

MEMORY_BYTES = 2 << 30
"""Address space of one grader process that evaluates a model's text."""


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
        return [process.pid for process in processes if process is not None and not process.ended]

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
        if self.process is not None:
            self.process.kill()

    def _serve(self) -> None:
        try:
            self._load()
            while (job := self._pool.take(self)) is not None:
                if job.reply.set_running_or_notify_cancel():
                    self._serve_one(job)
                self.idle = True
        finally:
            if self.process is not None:
                self.process.end()

    def _load(self) -> None:
        """Start the process with what the pool says in advance."""
        for function, setup in self._pool.loads:
            self.idle = False
            with contextlib.suppress(Exception):  # it shows again with the first answer
                self._live_process().load(function, setup)
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
                return self._live_process().call(job.function, job.payload, job.time_limit_s, job.setup)
            except WorkerDiedError as death:
                died = death
                if self.closing:
                    raise GradingError("the grader processes were closed while this answer was scored") from None
        raise GraderProcessLostError(
            f"the {job.function.name} grader died twice on this answer ({died}); is the machine out of memory?"
        )

    def _live_process(self) -> WorkerProcess:
        if self.process is None or self.process.ended:
            self.process = WorkerProcess(memory_bytes=self._pool.memory_bytes, quiet=self._pool.quiet)
        if self.closing:  # `close` sets this before it kills the process
            raise WorkerDiedError("closed")
        return self.process
