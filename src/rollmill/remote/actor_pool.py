"""Equal actors that share work: each piece goes to the least busy one, and what dies or hangs begins anew."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollmill.errors import DeadlineError, EngineError
from rollmill.remote.ray_session import ray_module

# Waiting for another process, from an event loop that may itself be held up.

Result = TypeVar("Result")

_GRACE_S = 1.0


async def wait_with_grace(answer: Awaitable[Result], seconds: float) -> Result:
    """What `answer` gives, if it is there within `seconds`; else TimeoutError, and the wait for it is cancelled.

    While this process was held up (work in its event loop, Ctrl-Z) the answer may have come, and its deadline has
    passed before anybody could look. So it is looked for once more.
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
"""For actors that close what they have; a vLLM's processes may take 20 s to leave."""


class ActorNotReadyError(Exception):
    """Raised by an actor that was started again and has not been told what it works on."""


@dataclass(eq=False)
class PooledActor:
    """An actor, in one of its lives."""

    name: str
    actor: Any
    busy: int = 0
    life: int = 0  #: how often it was started again
    begun: asyncio.Task[None] | None = None  #: it is told what it works on
    gone: asyncio.Event = field(default_factory=asyncio.Event)  #: it hung, and is killed

    @property
    def ready(self) -> bool:
        """Whether it has begun."""
        return self.begun is not None and self.begun.done() and not _failed(self.begun)


class ActorPool:
    """Actors of one kind, which Ray starts again when their process ends (`max_restarts`).

    They have the methods `ready`; `begin`, which tells them what they work on; and `end`, which ends that. One that was
    started again and has not begun raises ActorNotReadyError.

    Args:
        what: what one is, for messages.
        actors: by name.
        health_s: one that does not answer `ready` for so long is killed.
        start_s: how long one may take to start and to begin.
        replacements: how many may be started again between two calls of `forgive`.
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
        """Tell all what they work on, also those that are started again later, and wait until they have begun.

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

    def forgive(self) -> None:
        """As many as at first may be started again from now on."""
        self._left = self._allowed

    async def ask(self, method: str, *arguments: Any) -> tuple[tuple[str, int], Any]:
        """What `method` of the least busy one returns, and which one in which life it was. If that one dies, another
        one is asked.

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
        """Call a method of all that have begun; what they answer is not looked at."""
        for worker in self.workers:
            if worker.ready:
                getattr(worker.actor, method).remote(*arguments)

    async def end(self, *arguments: Any, deadline_s: float = SHUTDOWN_S) -> None:
        """What they work on has ended; may be called twice."""
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
        """End the actors."""
        for worker in self.workers:
            ray_module().kill(worker.actor)
        self.workers = []

    async def _call(self, worker: PooledActor, method: str, *arguments: Any) -> Any:
        """Raises what the method raised, and _ActorLostError where the actor has died or is killed."""
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
        """Ray starts it again; it begins anew. Calls of the same life that end later say nothing new."""
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
            raise DeadlineError("the master", f"{worker.name} to start", self._start_s, advice) from None

    async def _until_there(self, worker: PooledActor) -> None:
        """Wait until its process answers. Raises EngineError where Ray will not start it (again)."""
        while True:
            try:
                await self._call(worker, "ready")
                return
            except _ActorLostError as gone:
                if gone.forever:
                    raise EngineError(f"{worker.name} cannot be started: {gone}") from gone
            await asyncio.sleep(_RETRY_S)

    def _look_after(self) -> None:
        """Begin again with those that died while they began. Raises what else one raised then."""
        for worker in self.workers:
            if worker.begun is not None and (error := _failed(worker.begun)) is not None:
                if not isinstance(error, _ActorLostError):
                    raise error
                self._replace(worker, worker.life, str(error))

    async def _keep_watch(self) -> None:
        """Kill workers that do not answer."""
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
            with suppress(EngineError):  # who asks next says so
                self._replace(worker, life, str(gone))


class _ActorLostError(Exception):
    """An actor is no longer there; `forever`: Ray will not start it again."""

    def __init__(self, why: str, *, forever: bool = False) -> None:
        super().__init__(why)
        self.forever = forever


def _failed(task: asyncio.Task[None]) -> BaseException | None:
    return None if not task.done() or task.cancelled() else task.exception()


async def _awaited(reference: Any) -> Any:
    return await reference
