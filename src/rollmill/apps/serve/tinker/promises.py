"""Results that clients ask for later: each request is answered at once with an id, and its result is polled."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from rollmill.apps.serve.endpoint.protocol import ApiError
from rollmill.apps.serve.tinker.wire import TinkerRequestError
from rollmill.errors import CheckpointError, ModelError, RollmillError, TrainingError

log = logging.getLogger(__name__)
_USER = (TinkerRequestError, TrainingError, CheckpointError, ModelError)
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Result:
    """The body of a result."""

    body: bytes
    media_type: str = JSON
    failed: bool = False


@dataclass(slots=True, eq=False)
class Promise:
    """A result that comes later, of the client `owner`."""

    id: str
    owner: str
    task: asyncio.Task[Result] = field(repr=False)
    ended: float | None = None  #: when its result was there
    fetched: float | None = None  #: when a client fetched it


class PromiseStore:
    """The results of a server.

    Args:
        most: promises that may be open at the same time.
        deadline_s: seconds from a promise to its result.
        fetched_s: seconds that a result is kept once it was fetched: the answer may be lost on its way.
        kept_s: seconds that other results are kept.
    """

    def __init__(self, most: int, deadline_s: float, fetched_s: float = 60.0, kept_s: float = 3600.0) -> None:
        self._most, self._deadline_s, self._fetched_s, self._kept_s = most, deadline_s, fetched_s, kept_s
        self._promises: dict[str, Promise] = {}
        self.closing = False

    @property
    def open(self) -> int:
        """Number of promises without a result."""
        return sum(not each.task.done() for each in self._promises.values())

    def make(self, id: str, owner: str, work: Callable[[], Awaitable[Result]]) -> Promise:
        """Begin work, unless it has begun before: a client repeats requests whose answer was lost.

        Raises ApiError if too much is under way, or the server is stopping.
        """
        if (known := self._promises.get(id)) is not None and known.owner == owner:
            return known
        if self.closing:
            raise ApiError("the server is ending and takes no more requests", 503, code="shutting_down", retry_s=5)
        if (count := self.open) >= self._most:
            text = f"{count} requests are under way, at most {self._most} are taken; try again in a moment"
            raise ApiError(text, 429, code="too_many_requests", retry_s=1)
        self._forget()
        found = self._promises[id] = Promise(id, owner, asyncio.ensure_future(self._run(work)))
        found.task.add_done_callback(lambda _: setattr(found, "ended", time.monotonic()))
        return found

    def find(self, id: str, owner: str) -> Promise:
        """Find a promise of a client. Raises ApiError (410) if it is not known."""
        found = self._promises.get(id)
        if found is None or found.owner != owner:
            raise ApiError(f"there is no request {id!r}, or its result was forgotten", 410, code="expired")
        return found

    async def wait(self, promise: Promise, seconds: float) -> Result | None:
        """Wait for a result; None: it has not come yet."""
        await asyncio.wait([promise.task], timeout=seconds)
        if not promise.task.done():
            return None
        promise.fetched = time.monotonic()
        if promise.task.cancelled():
            return failure("the request was cancelled", user=False)
        return promise.task.result()

    async def close(self) -> None:
        """Cancel what is open."""
        self.closing = True
        tasks = [each.task for each in self._promises.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await work()
        except TimeoutError:
            text = (
                f"the result had not come after {self._deadline_s:g} s; raise the server's --deadline, or ask for less"
            )
            return failure(text, user=True)
        except _USER as error:
            return failure(str(error), user=True)
        except RollmillError as error:
            return failure(str(error), user=False)
        except Exception:
            log.exception("a request of a tinker client failed")
            return failure("the server has failed; its log says why", user=False)

    def _forget(self) -> None:
        now = time.monotonic()
        for each in list(self._promises.values()):
            late = each.ended is not None and now - each.ended > self._kept_s
            if late or (each.fetched is not None and now - each.fetched > self._fetched_s):
                del self._promises[each.id]


def failure(text: str, *, user: bool) -> Result:
    """The result of a request that failed."""
    return Result(json.dumps({"error": text, "category": "user" if user else "server"}).encode(), failed=True)


def answer(model: Any) -> Result:
    """A result from one of tinker's response models."""
    return Result(model.model_dump_json().encode())


class Turns:
    """Runs the requests of a client's model in the order of their numbers, from 1 on, whatever order they arrive in."""

    def __init__(self) -> None:
        self._next, self._changed = 1, asyncio.Condition()

    async def take(self, number: int | None, work: Callable[[], Awaitable[Result]]) -> Result:
        """Run work when it is its turn; without a number, at once."""
        if not number:
            return await work()
        async with self._changed:
            await self._changed.wait_for(lambda: self._next >= number)
        try:
            return await work()
        finally:
            async with self._changed:
                self._next = max(self._next, number + 1)
                self._changed.notify_all()
