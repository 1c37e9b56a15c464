"""Equal actors that share work: each piece goes to the least busy one, and what dies or hangs is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollmill.cluster.ray_session import ray_module
from rollmill.core.errors import DeadlineError, EngineError


@dataclass(eq=False)
class Worker:
    """An actor. `name` is never given to another."""

    name: str
    actor: Any
    busy: int = 0
    started: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class ActorPool:
    """Actors of one kind.

    Args:
        what: what one is, for messages.
        make: starts one, by its name.
        health_s: one that does not answer `ready` for so long is killed.
        replacements: how many may be replaced between two calls of `forgive`.
    """

    def __init__(self, what: str, make: Callable[[str], Any], size: int, *, health_s: float, replacements: int) -> None:
        self._what, self._make, self._health_s = what, make, health_s
        self._allowed, self._left, self._made = replacements, replacements, 0
        self.replaced = 0
        self.workers = [self._new() for _ in range(size)]
        self._watch: asyncio.Task[None] | None = None
        self._start_s = health_s

    async def ready(self, deadline_s: float) -> None:
        """Wait until all have started. Raises what one raised while it started, and DeadlineError."""
        self._start_s = deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.gather(*map(self._start, self.workers))
        except TimeoutError:
            advice = "Are there enough free cores and GPUs for them (placement.cpus, placement.gpus)?"
            owner = f"{len(self.workers)} {self._what}s to start"
            raise DeadlineError("the master", owner, deadline_s, advice) from None
        except _GoneError as gone:
            raise EngineError(f"an {self._what} died while it started: {gone}") from None
        self._watch = asyncio.ensure_future(self._keep_watch())

    def forgive(self) -> None:
        """As many as at the start may be replaced from now on."""
        self._left = self._allowed

    async def ask(self, method: str, *arguments: Any) -> tuple[str, Any]:
        """What `method` of the least busy one returns, and its name. If that one dies, another one is asked.

        Raises:
            EngineError: too many have died.
        """
        while True:
            worker = min(self.workers, key=lambda each: each.busy)
            worker.busy += 1
            try:
                return worker.name, await self._call(worker, method, *arguments)
            except _GoneError as gone:
                self._replace(worker, str(gone))
            finally:
                worker.busy -= 1

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of all; what they answer is not looked at."""
        for worker in self.workers:
            getattr(worker.actor, method).remote(*arguments)

    async def close(self, method: str, deadline_s: float = 10.0) -> None:
        """Call `method` of all, and end them."""
        if self._watch is not None:
            self._watch.cancel()
        calls = [self._call(each, method) for each in self.workers]
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await asyncio.gather(*calls, return_exceptions=True)
        for worker in self.workers:
            ray_module().kill(worker.actor)
        self.workers = []

    async def _call(self, worker: Worker, method: str, *arguments: Any) -> Any:
        """Raises what the method raised, and _GoneError where the actor has died or is killed."""
        ray = ray_module()
        reference = getattr(worker.actor, method).remote(*arguments)
        answer = asyncio.ensure_future(_awaited(reference))
        gone = asyncio.ensure_future(worker.gone.wait())
        try:
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise _GoneError("it did not answer")
            return answer.result()
        except ray.exceptions.RayActorError as error:
            raise _GoneError(str(error).strip().splitlines()[-1]) from error
        except ray.exceptions.RayTaskError as error:
            raise getattr(error, "cause", None) or error from None
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        finally:
            gone.cancel()
            answer.cancel()

    def _new(self) -> Worker:
        name = f"{self._what} {self._made}"
        self._made += 1
        return Worker(name, self._make(name))

    def _replace(self, worker: Worker, why: str) -> None:
        if worker not in self.workers:
            return
        if self._left == 0:
            text = f"{self._allowed + 1} {self._what}s died within one step, the last one ({worker.name}): {why}"
            advice = "its log is in Ray's session folder; raise placement.replacements to go on longer"
            raise EngineError(f"{text}; {advice}")
        self._left -= 1
        self.replaced += 1
        self.workers[self.workers.index(worker)] = self._new()

    async def _keep_watch(self) -> None:
        """Kill workers that do not answer."""
        while True:
            await asyncio.sleep(self._health_s / 4)
            await asyncio.gather(*(self._check(each) for each in list(self.workers)))

    async def _start(self, worker: Worker) -> None:
        await self._call(worker, "ready")
        worker.started = True

    async def _check(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(self._health_s if worker.started else self._start_s):
                await self._start(worker)
        except TimeoutError:
            worker.gone.set()
            ray_module().kill(worker.actor)
        except _GoneError:
            pass  # who is waiting for it replaces it


class _GoneError(Exception):
    """An actor is no longer there."""


async def _awaited(reference: Any) -> Any:
    return await reference
