"""Load-balanced pool of Ray actors that restarts failed ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollmill.errors import DeadlineError, EngineError
from rollmill.remote.ray_session import ray_module

Result = TypeVar("Result")

_GRACE_S = 1.0


async def wait_with_grace(answer: Awaitable[Result], seconds: float) -> Result:
    """Return the result of `answer` if it arrives within `seconds`; else cancel it and raise TimeoutError.

    If this process was held up (work in its event loop, Ctrl-Z), the answer may have arrived unnoticed before the
    deadline, so it gets a short grace period.
    """
    task = asyncio.ensure_future(answer)
    try:
        for limit in (seconds, _GRACE_S):
            if not task.done():
                await asyncio.wait([task], timeout=limit)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        task.cancel()


_RETRY_S = 0.2
SHUTDOWN_S = 30.0
"""Timeout for actors that free their resources; vLLM's processes may take 20 s to stop."""


class ActorNotReadyError(Exception):
    """Raised by an actor that was restarted and has not begun its work."""


@dataclass(eq=False)
class PooledActor:
    """An actor and its state since its last start."""

    name: str
    actor: Any
    busy: int = 0
    life: int = 0  #: number of restarts
    begun: asyncio.Task[None] | None = None  #: its call of `begin`
    gone: asyncio.Event = field(default_factory=asyncio.Event)  #: set when it hung and was killed

    @property
    def ready(self) -> bool:
        """True if `begin` has succeeded."""
        return self.begun is not None and self.begun.done() and not _failed(self.begun)


class ActorPool:
    """Actors of one kind, which Ray restarts when their process ends (`max_restarts`).

    They have the methods `ready`, `begin` (sets what they work on) and `end`. One that was restarted and has not begun
    raises ActorNotReadyError.

    Args:
        what: the kind of actor, for messages.
        actors: by name.
        health_s: an actor that does not answer `ready` for so long is killed.
        start_s: timeout for starting and beginning.
        replacements: how many restarts are allowed between two calls of `reset_restart_budget`.
    """

    def __init__(
        self, what: str, actors: dict[str, Any], *, health_s: float, start_s: float, replacements: int
    ) -> None:
        self._what, self._health_s, self._start_s = what, health_s, start_s
        self._allowed, self._left = replacements, replacements
        self._argument: Sequence[Any] = ()
        self.replaced = 0
        self.workers = [PooledActor(name, actor) for name, actor in actors.items()]
        self._watch: asyncio.Task[None] | None = None

    async def begin(self, *argument: Any) -> None:
        """Call `begin` on all actors, including later restarted ones, and wait until they have begun.

        Raises:
            EngineError: too many died, or one cannot be started.
            DeadlineError: one took too long.
        """
        self._argument = argument
        for worker in self.workers:
            self._renew(worker)
        while not all(each.ready for each in self.workers):
            begun = [each.begun for each in self.workers if each.begun is not None and not each.ready]
            await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
            self._look_after()
        self._watch = asyncio.ensure_future(self._keep_watch())

    def reset_restart_budget(self) -> None:
        """Reset the restart budget."""
        self._left = self._allowed

    async def ask(self, method: str, *arguments: Any) -> tuple[tuple[str, int], Any]:
        """Call `method` on the least busy actor; returns the actor's name and restart count, and the result. If the
        actor dies, another one is called.

        Raises:
            EngineError: too many have died.
            DeadlineError: one that died did not come back.
        """
        while True:
            self._look_after()
            worker = min(self.workers, key=lambda each: (not each.ready, each.busy))
            life = worker.life
            worker.busy += 1
            try:
                if not worker.ready and worker.begun is not None:
                    await asyncio.wait([worker.begun])
                    continue
                return (worker.name, life), await self._call(worker, method, *arguments)
            except _ActorLostError as gone:
                self._replace(worker, life, str(gone))
            finally:
                worker.busy -= 1

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method on all actors that have begun, and ignore the results."""
        for worker in self.workers:
            if worker.ready:
                getattr(worker.actor, method).remote(*arguments)

    async def end(self, *arguments: Any, deadline_s: float = SHUTDOWN_S) -> None:
        """Call `end` on all actors; may be called twice."""
        if self._watch is not None:
            self._watch.cancel()
        calls = [self._call(each, "end", *arguments) for each in self.workers if each.ready]
        for worker in self.workers:
            if worker.begun is not None:
                worker.begun.cancel()
                worker.begun = None
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await asyncio.gather(*calls, return_exceptions=True)

    def kill(self) -> None:
        """Kill the actors."""
        for worker in self.workers:
            ray_module().kill(worker.actor)
        self.workers = []

    async def _call(self, worker: PooledActor, method: str, *arguments: Any) -> Any:
        """Call a method on an actor. Raises what the method raised, and _ActorLostError if the actor is gone."""
        ray = ray_module()
        reference = getattr(worker.actor, method).remote(*arguments)
        answer = asyncio.ensure_future(_awaited(reference))
        gone = asyncio.ensure_future(worker.gone.wait())
        try:
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise _ActorLostError("it did not answer")
            return answer.result()
        except ray.exceptions.RayActorError as error:
            forever = isinstance(error, ray.exceptions.ActorDiedError)
            raise _ActorLostError(str(error).strip().splitlines()[-1], forever=forever) from error
        except ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None) or error
            if isinstance(cause, ActorNotReadyError):
                raise _ActorLostError("its process ended") from error
            raise cause from None
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        finally:
            gone.cancel()
            answer.cancel()

    def _replace(self, worker: PooledActor, life: int, why: str) -> None:
        """Begin again with an actor that Ray restarts. Later failures of the same life are ignored."""
        if worker.life != life:
            return
        if self._left == 0:
            text = f"{self._allowed + 1} {self._what}s died within one step, the last one ({worker.name}): {why}"
            advice = "its log is in Ray's session folder; raise placement.replacements to go on longer"
            raise EngineError(f"{text}; {advice}")
        self._left -= 1
        self.replaced += 1
        self._renew(worker)

    def _renew(self, worker: PooledActor) -> None:
        worker.life += 1
        worker.gone = asyncio.Event()
        worker.begun = asyncio.ensure_future(self._begin(worker))

    async def _begin(self, worker: PooledActor) -> None:
        try:
            async with asyncio.timeout(self._start_s):
                await self._until_there(worker)
                await self._call(worker, "begin", *self._argument)
        except TimeoutError:
            advice = "Are there enough free cores and GPUs for it (placement.cpus, placement.gpus)?"
            raise DeadlineError("the orchestrator", f"{worker.name} to start", self._start_s, advice) from None

    async def _until_there(self, worker: PooledActor) -> None:
        """Wait until its process answers. Raises EngineError if Ray will not (re)start it."""
        while True:
            try:
                await self._call(worker, "ready")
                return
            except _ActorLostError as gone:
                if gone.forever:
                    raise EngineError(f"{worker.name} cannot be started: {gone}") from gone
            await asyncio.sleep(_RETRY_S)

    def _look_after(self) -> None:
        """Begin again with actors that died while beginning. Raises their other errors."""
        for worker in self.workers:
            if worker.begun is not None and (error := _failed(worker.begun)) is not None:
                if not isinstance(error, _ActorLostError):
                    raise error
                self._replace(worker, worker.life, str(error))

    async def _keep_watch(self) -> None:
        """Kill actors that do not answer."""
        while True:
            await asyncio.sleep(self._health_s / 4)
            await asyncio.gather(*(self._check(each) for each in self.workers if each.ready))

    async def _check(self, worker: PooledActor) -> None:
        life = worker.life
        try:
            await wait_with_grace(self._call(worker, "ready"), self._health_s)
        except TimeoutError:
            if worker.life == life:
                ray_module().kill(worker.actor, no_restart=False)
                worker.gone.set()
        except _ActorLostError as gone:
            with suppress(EngineError):  # the next call raises it
                self._replace(worker, life, str(gone))


class _ActorLostError(Exception):
    """An actor is gone; `forever`: Ray will not restart it."""

    def __init__(self, why: str, *, forever: bool = False) -> None:
        super().__init__(why)
        self.forever = forever


def _failed(task: asyncio.Task[None]) -> BaseException | None:
    return None if not task.done() or task.cancelled() else task.exception()


async def _awaited(reference: Any) -> Any:
    return await reference
