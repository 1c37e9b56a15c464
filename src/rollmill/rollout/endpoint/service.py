"""The service behind all routes of the endpoint: admission, generation and sessions of one model."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import GenerationRequest, RolloutEngine, SampledToken
from rollmill.errors import ConfigError, EngineError
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.endpoint.middleware import EndpointMetrics
from rollmill.rollout.endpoint.protocol import ApiError
from rollmill.rollout.endpoint.session import EndpointSession, SessionSink, SessionStore
from rollmill.types import Completion


class AdmissionLimiter:
    """Admits requests while fewer than `most` are running or queued, each with a deadline.

    Attributes:
        closing: the server is stopping and admits no more requests.
        failure: the engine's error, once it has failed.
    """

    def __init__(self, most: int, deadline_s: float, gauges: EndpointMetrics) -> None:
        self.most, self.deadline_s, self.gauges = most, deadline_s, gauges
        self.closing, self.failure = False, ""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def under_way(self) -> int:
        """Number of running and queued requests."""
        return len(self._tasks)

    def admit(self, engine: RolloutEngine, request: GenerationRequest) -> GenerationTask:
        """Start a request. Raises ApiError if there are too many, or the server is stopping."""
        self.check()
        generation = GenerationTask(engine, request, self)
        self._tasks.add(generation.task)
        generation.task.add_done_callback(self._left)
        self.gauges.under_way.set(len(self._tasks))
        return generation

    def check(self, more: int = 1) -> None:
        """Raise ApiError if no more requests are admitted."""
        if self.closing:
            text = "the server is ending and takes no more requests; try again when it is back"
            raise ApiError(text, 503, code="shutting_down", retry_s=5)
        if len(self._tasks) + more > self.most:
            text = f"{len(self._tasks)} requests are under way, at most {self.most} are taken; try again in a moment"
            raise ApiError(text, 429, code="too_many_requests", retry_s=1)

    async def abort(self) -> None:
        """Cancel all requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _left(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self.gauges.aborted.inc()
        self._tasks.discard(task)
        self.gauges.under_way.set(len(self._tasks))


class GenerationTask:
    """A running request to the engine. `events` yields its tokens and completions; `stop` cancels it."""

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
        """Yield tokens as they are sampled, and completions as they finish. Raises ApiError if the request fails."""
        try:
            while (event := await self._events.get()) is not None:
                yield event
            if self.task.cancelled():
                raise ApiError("the server has ended the request", 503, code="aborted")
            await self.task
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Cancel it, unless it has finished."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class EndpointService:
    """A model behind the endpoint.

    Attributes:
        name: of the model, as shown in responses.
        context: longest sequence in tokens.
        sink: receives committed sessions; None: sessions cannot be committed.
        takes_feedback: whether rewards are used.
        anonymous: creates the session of a call that names none.
    """

    engine: RolloutEngine
    chat: ChatRenderer
    name: str
    context: int
    sessions: SessionStore
    gate: AdmissionLimiter
    gauges: EndpointMetrics
    anonymous: Callable[[str], EndpointSession] | None = None
    sink: SessionSink | None = None
    takes_feedback: bool = True
    created: int = field(default_factory=lambda: int(time.time()))

    @contextmanager
    def session(self, name: str | None, answer: str) -> Iterator[EndpointSession]:
        """The session of a call, marked as busy inside. Raises ApiError if it takes no calls."""
        if name is not None:
            session = self._named(name)
        elif self.anonymous is None:
            text = "name the session: the key is KEY:SESSION, or send X-Session-Id"
            raise ApiError(text, code="session_missing")
        else:
            session = self.anonymous(answer)
            if self.takes_feedback:
                self.sessions.add(session)
        session.busy += 1
        try:
            yield session
        finally:
            session.busy -= 1
            self.sessions.released(session)

    def _named(self, name: str) -> EndpointSession:
        session = self.sessions.of(name)
        if self.anonymous is None or self.takes_feedback or not session.full:
            return session
        self.sessions.remove(session)  # it cannot be committed, only continued
        return self.sessions.of(name)

    def start(self, request: GenerationRequest, session: EndpointSession) -> GenerationTask:
        """Start a generation. Raises ApiError if the prompt does not fit, or there are too many requests."""
        length = len(request.prompt_ids)
        self.check_length(length)
        generation = self.gate.admit(self.engine, request)
        session.running.add(generation.task)
        generation.task.add_done_callback(session.running.discard)
        self.gauges.prompt_tokens.inc(length)
        return generation

    def check_length(self, length: int) -> None:
        """Raise ApiError unless a prompt of this length leaves room for an answer."""
        if length >= self.context:
            text = (
                f"the prompt has {length} tokens, and the model's context of {self.context} tokens leaves no room for "
                "an answer; shorten the prompt"
            )
            raise ApiError(text, code="context_length_exceeded", param="prompt")
        if not length:
            raise ApiError("the prompt has no tokens; send some text", code="invalid_value", param="prompt")

    async def watched(self, generation: GenerationTask) -> AsyncGenerator[SampledToken | Completion, None]:
        """Yield the events of a generation, and record their metrics."""
        began, first = time.perf_counter(), True
        async for event in generation.events():
            if first:
                self.gauges.first.observe(time.perf_counter() - began)
                first = False
            if isinstance(event, Completion):
                self.gauges.completion_tokens.inc(len(event.token_ids))
            yield event
        self.gauges.seconds.observe(time.perf_counter() - began)

    def token(self, id: int) -> str:
        """A token's text."""
        return self.chat.decode([id])


def new_response_id(kind: str) -> str:
    """Create the id of a response."""
    return f"{kind}-{uuid.uuid4().hex}"


def token_logprobs(service: EndpointService, sampled: list[SampledToken]) -> list[dict[str, Any]]:
    """Log-probs in the format of chat completions."""

    def entry(id: int, logprob: float) -> dict[str, Any]:
        text = service.token(id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return [
        entry(each.token, each.logprob) | {"top_logprobs": [entry(id, logprob) for id, logprob in each.top]}
        for each in sampled
    ]


MISSING_LIBRARIES = (
    "the endpoint needs the fastapi, uvicorn and prometheus-client libraries: pip install 'rollmill[serve]'"
)


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Limits of a server."""

    requests: int = 256  #: running and queued requests
    deadline_s: float = 600.0  #: longest wait for an answer
    sessions: int = 2000
    session_tokens: int = 20_000_000  #: tokens of all sessions; some 60 bytes each
    idle_s: float = 3600.0  #: idle time after which a session is dropped
    most_bytes: int = 8 * 2**20  #: longest body


def build_application_service(
    engine: RolloutEngine,
    chat: ChatRenderer,
    *,
    name: str,
    context: int,
    sampling: SamplingConfig,
    limits: ServiceLimits,
    sink: SessionSink | None = None,
) -> EndpointService:
    """Build the service of a model for applications, where any call may start a session.

    Without a sink, calls without a session name are not kept. Raises ConfigError if the web libraries are missing.
    """
    try:
        gauges = EndpointMetrics()
    except ImportError as error:
        raise ConfigError(MISSING_LIBRARIES) from error
    make = partial(EndpointSession, chat=chat, sampling=sampling)
    return EndpointService(
        engine=engine,
        chat=chat,
        name=name,
        context=context,
        sessions=SessionStore(
            gauges, make, most=limits.sessions, most_tokens=limits.session_tokens, idle_s=limits.idle_s
        ),
        gate=AdmissionLimiter(limits.requests, limits.deadline_s, gauges),
        gauges=gauges,
        anonymous=make,
        sink=sink,
        takes_feedback=sink is not None,
    )
