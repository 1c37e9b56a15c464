"""Load-balanced pool of workers in other processes, whoever launches them.

A worker is an object with async methods in another process. `WorkerHandle` calls them: a Ray actor
(`ray_explorers.py`), or a process that has joined the run (`connection.py`). Ray restarts its actors; a process that is
lost leaves the pool, and others join at any time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rollmill.errors import DeadlineError, EngineError, EngineLostError
from rollmill.progress import Progress, count_progress
from rollmill.trackers.heartbeat import HEARTBEAT_INTERVAL_S, read_beat
from rollmill.waiting import OUTAGES, Outage, wait_with_grace

_RETRY_S = 0.2
_LAST_CHANCE_S = 2 * HEARTBEAT_INTERVAL_S
SHUTDOWN_S = 30.0
"""Timeout for workers that free their resources; vLLM's processes may take 20 s to stop."""
START_S = 300.0
"""Timeout for workers that start, including their models, and begin a stage."""


class WorkerNotReadyError(Exception):
    """Raised by a worker that was restarted and has not begun, or has begun for another trainer."""


class WorkerLostError(Exception):
    """A worker is gone; `forever`: nobody restarts it."""

    def __init__(self, why: str, *, forever: bool = False) -> None:
        super().__init__(why)
        self.forever = forever


class WorkerHandle(Protocol):
    """Calls the methods of one worker.

    It has the methods `ready` (returns its outages), `begin` (sets what it works on) and `end`. One that was restarted
    and has not begun raises WorkerNotReadyError.
    """

    restartable: bool
    """True if its launcher starts a new process when it ends; else it leaves the pool."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method and return its result; cancelling this cancels the method.

        Raises what the method raised, and WorkerLostError if the worker is gone.
        """

    def notify(self, method: str, *arguments: Any) -> None:
        """Call a method and ignore its result."""

    def kill(self) -> None:
        """End a worker that hangs; its launcher may restart it."""


@dataclass(eq=False)
class PooledWorker:
    """A worker and its state since its last start."""

    name: str
    handle: WorkerHandle
    busy: int = 0
    start_id: int = 0  #: identifies its start among those of all workers
    begun: asyncio.Task[None] | None = None  #: its call of `begin`
    gone: asyncio.Event = field(default_factory=asyncio.Event)  #: set when it hung and was killed
    leaving: bool = False  #: it finishes its calls and gets no others
    idle: asyncio.Event = field(default_factory=asyncio.Event)  #: set when a call ends and it has no others
    outages: set[str] = field(default_factory=set)  #: names of services that are unavailable to it

    @property
    def ready(self) -> bool:
        """True if `begin` has succeeded."""
        return self.begun is not None and self.begun.done() and not _failed(self.begun)

    def note_outages(self, found: Sequence[Outage]) -> None:
        """Let this process's deadlines stand still, too, while a service is unavailable to the worker."""
        outages = {f"{each.name}, for {self.name}": each.reason for each in found}
        if outages:
            count_progress(Progress.PHASES)  # the worker bounds such a wait, so it is no stall
        for name in self.outages - outages.keys():
            OUTAGES.end(name)
        for name, reason in outages.items():
            OUTAGES.begin(name, reason)
        self.outages = set(outages)


class WorkerPool:
    """Workers of one kind.

    Args:
        what: the kind of worker, for messages.
        workers: the first ones, by name.
        health_s: a worker that does not answer `ready` for so long is killed.
        silent_s: so is one that neither answers nor writes heartbeats for so long, for example because it is stopped.
        run_dir: folder of the run with the heartbeats.
        replacements: how many restarts are allowed between two calls of `reset_restart_budget`.
    """

    def __init__(
        self,
        what: str,
        workers: dict[str, WorkerHandle],
        *,
        health_s: float,
        replacements: int = 0,
        silent_s: float = math.inf,
        run_dir: Path | None = None,
    ) -> None:
        self._what, self._health_s, self._silent_s, self._run_dir = what, health_s, silent_s, run_dir
        self._allowed, self._left = replacements, replacements
        self._arguments: Sequence[Any] | None = None  # of `begin`; None while the pool is not in use
        self._start_ids, self._joined = itertools.count(1), asyncio.Event()
        self.replaced = 0
        self.workers = [PooledWorker(name, handle) for name, handle in workers.items()]
        self._watch: asyncio.Task[None] | None = None

    def add(self, name: str, handle: WorkerHandle) -> None:
        """Add a worker, in place of one with the same name, whose process is gone."""
        for worker in [each for each in self.workers if each.name == name]:
            self._lose(worker, worker.start_id, "it has joined again")
        worker = PooledWorker(name, handle)
        self.workers.append(worker)
        if self._arguments is not None:
            self._renew(worker, self._arguments)
        self._joined.set()

    async def admit(self, name: str, handle: WorkerHandle) -> None:
        """Add a worker once it has begun, so that one that cannot leaves the others alone; raises what it raises."""
        worker = PooledWorker(name, handle)
        while (arguments := self._arguments) is not None:
            self._renew(worker, arguments)
            assert worker.begun is not None
            await worker.begun
            if arguments is self._arguments:
                break
        else:
            worker.begun = None
        self.workers.append(worker)
        self._joined.set()

    async def retire(self, name: str, within_s: float) -> None:
        """Remove a worker. It gets no further calls, and `within_s` seconds for those it has; then others get them."""
        for worker in [each for each in self.workers if each.name == name and not each.leaving]:
            worker.leaving = True
            worker.idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    while worker.busy and worker in self.workers:
                        await worker.idle.wait()
            if worker in self.workers:
                worker.note_outages([])
                self._remove(worker)

    async def begin(self, *arguments: Any) -> None:
        """Call `begin` on all workers, including later ones, and wait until those that are there have begun.

        Raises EngineError if too many died or one cannot be started, DeadlineError if one took too long.
        """
        self._arguments = arguments
        for worker in [each for each in self.workers if not each.leaving]:
            self._renew(worker, arguments)
        while begun := [each.begun for each in self.workers if each.begun is not None and not each.ready]:
            await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            self._look_after()
        self._watch = asyncio.ensure_future(self._keep_watch())

    def reset_restart_budget(self) -> None:
        """Allow as many restarts as at the start."""
        self._left = self._allowed

    async def call(self, method: str, *arguments: Any) -> tuple[tuple[str, int], Any]:
        """Call `method` on the least busy worker; returns its name and start, and the result. If the worker is lost,
        another one is called; if there is none, this waits for one to join.

        Raises what the method raised, and:
            EngineError: too many have died.
            DeadlineError: one that died did not come back.
        """
        while True:
            self._look_after()
            if not (workers := [each for each in self.workers if not each.leaving]):
                self._joined.clear()
                await self._joined.wait()
                continue
            worker = min(workers, key=lambda each: (not each.ready, each.busy))
            start_id = worker.start_id
            worker.busy += 1
            try:
                if not worker.ready and worker.begun is not None:
                    await asyncio.wait([worker.begun])
                    continue
                return (worker.name, start_id), await _call(worker, method, *arguments)
            except WorkerLostError as lost:
                self._lose(worker, start_id, str(lost))
            finally:
                worker.busy -= 1
                if not worker.busy:
                    worker.idle.set()

    async def ask(self, method: str, *arguments: Any, timeout_s: float) -> dict[tuple[str, int], Any]:
        """Call a method on all workers that have begun; returns the results by name and start, without those of workers
        that are lost or late. Raises what the method raised."""
        workers = [each for each in self.workers if each.ready]
        calls = {(each.name, each.start_id): asyncio.ensure_future(_call(each, method, *arguments)) for each in workers}
        if calls:
            await asyncio.wait(calls.values(), timeout=timeout_s)
        found = {
            key: call.result()
            for key, call in calls.items()
            if call.done() and not isinstance(call.exception(), WorkerLostError)
        }
        for call in calls.values():
            call.cancel()
        return found

    async def order(self, method: str, *arguments: Any, timeout_s: float, advice: str) -> dict[str, Any]:
        """Call a method on all workers that have begun, and wait for them; returns the results by name, without those
        of workers that are lost. Raises what the method raised, and DeadlineError if one takes too long."""

        async def one(worker: PooledWorker, start_id: int) -> Any:
            try:
                async with asyncio.timeout(timeout_s):
                    return await _call(worker, method, *arguments)
            except TimeoutError:
                raise DeadlineError("the trainer", f"{worker.name} ({method})", timeout_s, advice) from None
            except WorkerLostError as lost:
                self._lose(worker, start_id, str(lost))

        workers = [each for each in self.workers if each.ready]
        results = await asyncio.gather(*(one(each, each.start_id) for each in workers))
        return {each.name: result for each, result in zip(workers, results, strict=True) if result is not None}

    def notify(self, method: str, *arguments: Any) -> None:
        """Call a method on all workers that have begun, and ignore the results."""
        for worker in self.workers:
            if worker.ready:
                worker.handle.notify(method, *arguments)

    async def end(self, *arguments: Any) -> None:
        """Call `end` on all workers; may be called twice."""
        self._arguments = None
        if self._watch is not None:
            self._watch.cancel()
        for worker in self.workers:
            worker.note_outages([])
        calls = [_call(each, "end", *arguments) for each in self.workers if each.ready]
        for worker in self.workers:
            if worker.begun is not None:
                worker.begun.cancel()
                worker.begun = None
        with suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                await asyncio.gather(*calls, return_exceptions=True)

    def _lose(self, worker: PooledWorker, start_id: int, why: str) -> None:
        """Begin again with a worker that is restarted, or let it leave. Later failures after that start are ignored."""
        if worker.start_id != start_id or worker not in self.workers:
            return
        worker.note_outages([])
        if worker.ready:
            OUTAGES.tell(f"{worker.name} is lost: {why}; its work is done again")
        if not worker.handle.restartable or worker.leaving:
            self.replaced += worker.ready
            self._remove(worker)
            worker.handle.kill()
            return
        if self._left == 0:
            text = f"{self._allowed + 1} {self._what}s died within one step, the last one ({worker.name}): {why}"
            advice = "its log is in Ray's session folder; raise placement.replacements to go on longer"
            raise EngineLostError(f"{text}; {advice}")
        self._left -= 1
        self.replaced += 1
        assert self._arguments is not None
        self._renew(worker, self._arguments)

    def _remove(self, worker: PooledWorker) -> None:
        """Let others answer the calls of a worker that leaves."""
        self.workers.remove(worker)
        worker.gone.set()
        worker.idle.set()
        if worker.begun is not None:
            worker.begun.cancel()

    def _renew(self, worker: PooledWorker, arguments: Sequence[Any]) -> None:
        worker.start_id = next(self._start_ids)
        worker.gone = asyncio.Event()
        worker.begun = asyncio.ensure_future(self._begin(worker, arguments))

    async def _begin(self, worker: PooledWorker, arguments: Sequence[Any]) -> None:
        try:
            async with asyncio.timeout(START_S):
                await self._until_there(worker)
                await _call(worker, "begin", *arguments)
        except TimeoutError:
            advice = "Are there enough free cores and GPUs for it (placement.cpus, placement.gpus)?"
            raise DeadlineError("the orchestrator", f"{worker.name} to start", START_S, advice) from None

    async def _until_there(self, worker: PooledWorker) -> None:
        """Wait until its process answers. Raises EngineError if it is not (re)started."""
        while True:
            try:
                await _call(worker, "ready")
                return
            except WorkerLostError as lost:
                if lost.forever or not worker.handle.restartable:
                    raise EngineLostError(f"{worker.name} cannot be started: {lost}") from lost
            await asyncio.sleep(_RETRY_S)

    def _look_after(self) -> None:
        """Begin again with workers that died while beginning. Raises their other errors; a process that has joined and
        cannot begin leaves the pool, and prints the error itself."""
        for worker in list(self.workers):
            if worker.begun is not None and (error := _failed(worker.begun)) is not None:
                if worker.handle.restartable and not isinstance(error, WorkerLostError):
                    raise error
                self._lose(worker, worker.start_id, str(error))

    async def _keep_watch(self) -> None:
        """Kill workers that do not answer."""
        while True:
            await asyncio.sleep(min(self._health_s, self._silent_s) / 4)
            await asyncio.gather(*(self._check(each) for each in self.workers if each.ready))

    async def _check(self, worker: PooledWorker) -> None:
        start_id, answer = worker.start_id, asyncio.ensure_future(_call(worker, "ready"))
        try:
            await _require_sign(worker.name, answer, self._health_s, self._silent_s, self._run_dir)
            worker.note_outages(await wait_with_grace(answer, max(0.0, self._health_s - self._silent_s)))
        except TimeoutError:
            if worker.start_id == start_id and worker.handle.restartable:
                worker.handle.kill()
                worker.gone.set()
            else:
                self._lose(worker, start_id, "it did not answer")
        except WorkerLostError as lost:
            with suppress(EngineError):  # the next call raises it
                self._lose(worker, start_id, str(lost))
        finally:
            answer.cancel()


async def _call(worker: PooledWorker, method: str, *arguments: Any) -> Any:
    """Call a method of a worker. Raises what the method raised, and WorkerLostError if the worker is gone."""
    result = asyncio.ensure_future(worker.handle.call(method, *arguments))
    gone = asyncio.ensure_future(worker.gone.wait())
    try:
        await asyncio.wait([result, gone], return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise WorkerLostError("it did not answer")
        return result.result()
    except WorkerNotReadyError as error:
        raise WorkerLostError("its process was restarted, or serves another trainer") from error
    finally:
        gone.cancel()
        result.cancel()


async def _require_sign(
    name: str, answer: asyncio.Future[Any], health_s: float, silent_s: float, run_dir: Path | None
) -> None:
    """Wait for an answer for up to `silent_s`. Raises TimeoutError if there was no heartbeat meanwhile, either.

    Heartbeats come from a thread, so a worker that computes in its event loop gives this sign. They are compared with
    each other: clocks of hosts may differ.
    """
    if silent_s >= health_s or run_dir is None:
        await asyncio.wait([answer], timeout=min(silent_s, health_s))
        return
    before = await asyncio.to_thread(read_beat, run_dir, name)
    for limit in (silent_s, _LAST_CHANCE_S):  # both processes may have been stopped by Ctrl-Z
        await asyncio.wait([answer], timeout=limit)
        if answer.done() or before is None or await asyncio.to_thread(read_beat, run_dir, name) != before:
            return
    raise TimeoutError


def _failed(task: asyncio.Task[None]) -> BaseException | None:
    return None if not task.done() or task.cancelled() else task.exception()
