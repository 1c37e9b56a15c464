"""One request to the engine, token by token: at most so many at a time, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any

from rollmill.engines.base import GenerationRequest, RolloutEngine, SampledToken
from rollmill.errors import EngineError
from rollmill.rollout.endpoint.api_errors import ApiError
from rollmill.types import Completion

if TYPE_CHECKING:
    from rollmill.rollout.endpoint.metrics import EndpointMetrics


class AdmissionLimiter:
    """Admits requests while fewer than `most` are being answered or wait in the engine.

    Attributes:
        closing: the server ends, and admits nothing any more.
        failure: what the engine has failed of.
    """

    def __init__(self, most: int, deadline_s: float, gauges: EndpointMetrics) -> None:
        self.most, self.deadline_s, self.gauges = most, deadline_s, gauges
        self.closing, self.failure = False, ""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def under_way(self) -> int:
        """How many requests are being answered or wait."""
        return len(self._tasks)

    def admit(self, engine: RolloutEngine, request: GenerationRequest) -> GenerationTask:
        """Start a request. Raises ApiError where there are too many, or the server ends."""
        self.check()
        generation = GenerationTask(engine, request, self)
        self._tasks.add(generation.task)
        generation.task.add_done_callback(self._left)
        self.gauges.under_way.set(len(self._tasks))
        return generation

    def check(self, more: int = 1) -> None:
        """Raises ApiError where no more requests are admitted."""
        if self.closing:
            text = "the server is ending and takes no more requests; try again when it is back"
            raise ApiError(text, 503, code="shutting_down", retry_s=5)
        if len(self._tasks) + more > self.most:
            text = f"{len(self._tasks)} requests are under way, at most {self.most} are taken; try again in a moment"
            raise ApiError(text, 429, code="too_many_requests", retry_s=1)

    async def abort(self) -> None:
        """End what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _left(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self.gauges.aborted.inc()
        self._tasks.discard(task)
        self.gauges.under_way.set(len(self._tasks))


class GenerationTask:
    """A request under way. Iterate over its tokens and completions; `stop` ends it early."""

    def __init__(self, engine: RolloutEngine, request: GenerationRequest, gate: AdmissionLimiter) -> None:
        self._events: asyncio.Queue[SampledToken | Completion | None] = asyncio.Queue()
        self._engine, self._gate = engine, gate
        request.on_token = self._events.put_nowait
        self._request = request
        self.task = asyncio.ensure_future(self._run())
        self.task.add_done_callback(lambda _: self._events.put_nowait(None))

    async def _run(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(asyncio.timeout(self._gate.deadline_s))
                stream: Any = self._engine.stream(self._request)
                async for completion in await stack.enter_async_context(aclosing(stream)):
                    self._events.put_nowait(completion)
        except TimeoutError:
            text = (
                f"the answer had not come after {self._gate.deadline_s:g} s; ask for fewer tokens, or raise the "
                "server's deadline"
            )
            raise ApiError(text, 504, code="deadline_exceeded") from None
        except EngineError as error:
            self._gate.failure = str(error)
            raise ApiError(f"the engine has failed: {error}", 503, code="engine_failed") from error

    async def events(self) -> AsyncGenerator[SampledToken | Completion, None]:
        """Tokens as they come, and completions as they end. Raises ApiError where the request fails."""
        try:
            while (event := await self._events.get()) is not None:
                yield event
            if self.task.cancelled():
                raise ApiError("the server has ended the request", 503, code="aborted")
            await self.task
        finally:
            await self.stop()

    async def stop(self) -> None:
        """End it, if it has not ended."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
