"""Pool of worker processes with several environments each, so that a crash or hang affects only one process.

A worker is a thread with one process. It handles calls one after the other; a call's time limit starts when the process
starts on it. A process that does not answer in time is killed, and all its episodes fail. One that has had enough
episodes, or uses too much memory, gets no new ones and is stopped with its last.
"""

from __future__ import annotations

import itertools
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import psutil

from rollmill.config.environments import EnvironmentSection
from rollmill.errors import ConfigError, EpisodeError, RollmillError, WorkflowError
from rollmill.rollout.environments.base import (
    EnvironmentCrashError,
    EnvironmentSpec,
    EnvironmentTimeoutError,
    build_environment_spec,
)
from rollmill.rollout.environments.worker_functions import ENVIRONMENTS
from rollmill_grading.errors import GradingError, RemoteFunctionError, WorkerDiedError
from rollmill_grading.worker_process import WorkerProcess

_START_S = 120.0
"""Extra time limit for a new process to import its first environment."""


@dataclass(slots=True)
class _PendingCall:
    payload: tuple[Any, ...]  # its kind, the environment's number, and arguments
    answer: Future[Any] = field(default_factory=Future)


class EnvironmentWorker:
    """One process, and the thread that owns it."""

    def __init__(self, section: EnvironmentSection) -> None:
        self._section = section
        self._calls: queue.SimpleQueue[_PendingCall | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.ended: EpisodeError | None = None  #: the reason it takes no more calls
        self.episodes: set[int] = set()
        self.begun = 0
        self.full = False  #: takes no further episodes
        self._process: WorkerProcess | None = None
        self._thread = threading.Thread(target=self._serve, name="rollmill-environment", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process id, once it runs."""
        process = self._process
        return None if process is None else process.pid

    @property
    def open(self) -> bool:
        """True if it takes further episodes."""
        process = self._process
        return self.ended is None and not self.full and (process is None or process.running)

    @property
    def gone(self) -> bool:
        """True if its process has ended and been waited for."""
        return not self._thread.is_alive()

    def enter(self, number: int) -> None:
        self.episodes.add(number)
        self.begun += 1
        self.full = self.full or self.begun >= self._section.restart_after

    def leave(self, number: int) -> Future[Any] | None:
        """Close an episode's environment without waiting; the last one stops a full worker.

        Returns None if it has left before.
        """
        if number not in self.episodes:
            return None
        self.episodes.discard(number)
        closed = self.submit("close", number)
        if self.full:
            self.retire()
        return closed

    def retire(self) -> None:
        """Stop after the queued calls, if it has no episodes left."""
        process = self._process
        if not self.episodes or (process is not None and not process.running):
            self._calls.put(None)

    def submit(self, *payload: Any) -> Future[Any]:
        """Call an environment's method. Failures are EpisodeError, WorkflowError or ConfigError in the future.

        Args:
            payload: the kind of call, the environment's number, and arguments.
        """
        call = _PendingCall(payload)
        with self._lock:
            if self.ended is None:
                self._calls.put(call)
                return call.answer
        call.answer.set_exception(self._gone())
        return call.answer

    def kill(self) -> None:
        """Kill the process; running calls fail."""
        self._finish(EnvironmentCrashError("the environments were closed"))
        process = self._process
        if process is not None:
            process.kill()
        self._calls.put(None)

    def join(self) -> None:
        """Wait until the process is gone."""
        self._thread.join()

    # -- in the worker's thread --------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._process = WorkerProcess()
            while self.ended is None and (call := self._calls.get()) is not None:
                if call.answer.set_running_or_notify_cancel():
                    self._answer(self._process, call)
        except Exception as error:
            self._finish(EnvironmentCrashError(f"the worker process failed: {type(error).__name__}: {error}"))
        finally:
            self._finish(EnvironmentCrashError("the worker process was replaced"))
            if self._process is not None:
                self._process.end()
            self._fail_waiting()

    def _answer(self, process: WorkerProcess, call: _PendingCall) -> None:
        section, kind = self._section, call.payload[0]
        limit = section.time_limit_s + (_START_S if kind == "make" else 0.0)
        try:
            result = process.call(ENVIRONMENTS, call.payload, limit, watch=self._too_large)
        except WorkerDiedError as death:
            self._finish(EnvironmentCrashError(f"the worker process ended during a {kind} ({death})"))
            call.answer.set_exception(EnvironmentCrashError(f"{kind} ended the worker process ({death})"))
            return
        except GradingError as error:  # the process cannot import rollmill, or is out of memory
            self._finish(EnvironmentCrashError(f"the worker process failed: {error}"))
            call.answer.set_exception(self._gone())
            return
        except Exception as error:  # the call cannot be pickled
            call.answer.set_exception(WorkflowError(f"{kind}: cannot be sent to the worker process: {error}"))
            return
        if result.outcome == "timeout":
            text = f"{kind} took longer than environment.time_limit_s ({section.time_limit_s:g} s)"
            self._finish(EnvironmentCrashError(f"the worker process was ended because another episode's {text}"))
            call.answer.set_exception(
                EnvironmentTimeoutError(f"{text}; its process was ended. Raise it, or correct the method")
            )
            return
        found = result.value
        self.full = self.full or _memory_of(process.pid) > section.memory_gb * 2**30
        if self.full and (reason := self._too_large()) is not None:
            self._finish(EnvironmentCrashError(f"the worker process was ended: {reason}"))
        if "error" in found:
            call.answer.set_exception(_error(kind, found))
        else:
            call.answer.set_result(found["value"])

    def _too_large(self) -> str | None:
        limit = self._section.memory_gb
        if self._process is None or _memory_of(self._process.pid) <= 2 * limit * 2**30:
            return None
        return f"it held more than twice environment.memory_gb ({limit:g})"

    def _finish(self, reason: EpisodeError) -> None:
        with self._lock:
            self.ended = self.ended or reason

    def _fail_waiting(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is not None and call.answer.set_running_or_notify_cancel():
                call.answer.set_exception(self._gone())

    def _gone(self) -> EpisodeError:
        assert self.ended is not None
        return EnvironmentCrashError(str(self.ended))


class EnvironmentWorkerPool:
    """Up to `section.processes` workers that take episodes, and older ones that finish theirs."""

    def __init__(self, section: EnvironmentSection) -> None:
        self._section, self.name = section, section.name
        self.recipe: EnvironmentSpec = build_environment_spec(section)
        self._workers: list[EnvironmentWorker] = []
        self._emptied: list[EnvironmentWorker] = []
        self._numbers = itertools.count()
        self.restarts = 0

    def place(self) -> tuple[EnvironmentWorker, int]:
        """Choose the worker with the fewest episodes for a new one; return it and the episode's number."""
        for worker in [each for each in self._workers if not each.open]:
            self._workers.remove(worker)
            self._emptied.append(worker)
            self.restarts += 1
            worker.retire()
        self._emptied = [each for each in self._emptied if not each.gone]
        if len(self._workers) < self._section.processes and all(each.episodes for each in self._workers):
            self._workers.append(EnvironmentWorker(self._section))
        worker, number = min(self._workers, key=lambda each: len(each.episodes)), next(self._numbers)
        worker.enter(number)
        return worker, number

    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [pid for each in (*self._workers, *self._emptied) if each.ended is None and (pid := each.pid)]

    def close(self) -> None:
        """Kill all processes and wait until they are gone."""
        workers, self._workers, self._emptied = [*self._workers, *self._emptied], [], []
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()


def _error(kind: str, found: dict[str, Any]) -> RollmillError:
    of, text = found["of"], str(found["error"])
    if of == "raised":
        error = EpisodeError(f"{kind} raised {text}")
        error.__cause__ = RemoteFunctionError(found["traceback"])
        return error
    return ConfigError(text) if of == "config" else WorkflowError(text)


def _memory_of(pid: int) -> int:
    """Resident memory of a process in bytes; 0 if it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
