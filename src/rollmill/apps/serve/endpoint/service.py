"""The service behind all routes of the endpoint: admission, generation and sessions of one model."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from rollmill.apps.serve.endpoint.answer_formats import GrammarCache
from rollmill.apps.serve.endpoint.middleware import Caller, EndpointMetrics
from rollmill.apps.serve.endpoint.protocol import ApiError
from rollmill.apps.serve.endpoint.session import EndpointSession, SessionSink
from rollmill.apps.serve.endpoint.session_journal import SessionJournal
from rollmill.apps.serve.endpoint.session_store import MakeSession, SessionStore
from rollmill.apps.serve.web.keys import KeyRateLimiter, KeyRing
from rollmill.config.rollout import SamplingConfig
from rollmill.data.renderer import Switches
from rollmill.engines.base import GenerationRequest, RolloutEngine, SampledToken, applies_processors
from rollmill.errors import ConfigError, EngineError, UnsupportedRequestError
from rollmill.rollout.chat import ChatRenderer
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
        self._preparing = 0

    @property
    def under_way(self) -> int:
        """Number of running and queued requests."""
        return len(self._tasks) + self._preparing

    @contextmanager
    def preparing(self, count: int = 1) -> Iterator[None]:
        """Count requests as queued until they are admitted. Raises ApiError if there are too many, or the server is
        stopping."""
        self.check(count)
        self._preparing += count
        self.gauges.under_way.set(self.under_way)
        try:
            yield
        finally:
            self._preparing -= count
            self.gauges.under_way.set(self.under_way)

    def admit(self, engine: RolloutEngine, request: GenerationRequest) -> GenerationTask:
        """Start a request that was counted by `preparing`; so it is finished even if the server is stopping."""
        generation = GenerationTask(engine, request, self)
        self._tasks.add(generation.task)
        generation.task.add_done_callback(self._left)
        self.gauges.under_way.set(self.under_way)
        return generation

    def check(self, more: int = 1) -> None:
        """Raise ApiError if no more requests are admitted."""
        if self.closing:
            text = "the server is ending and takes no more requests; try again when it is back"
            raise ApiError(text, 503, code="shutting_down", retry_s=5)
        if self.under_way + more > self.most:
            text = f"{self.under_way} requests are under way, at most {self.most} are taken; try again in a moment"
            raise ApiError(text, 429, code="too_many_requests", retry_s=1)

    async def abort(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _left(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self.gauges.aborted.inc()
        self._tasks.discard(task)
        self.gauges.under_way.set(self.under_way)


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
        except UnsupportedRequestError as error:
            raise ApiError(str(error), code="unsupported_parameter") from error
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


ResultT = TypeVar("ResultT")

_THREADS = 2
INLINE_BYTES = 16 * 1024
"""Largest requests that are converted and tokenized at once, not in a thread."""
_CHARS_PER_TOKEN = 16
_LEAST_BODY, _MOST_BODY, _BODY_PER_TOKEN, _BODY_WITH_PICTURES = 2**20, 8 * 2**20, 64, 16 * 2**20


@dataclass(slots=True, eq=False)
class EndpointService:
    """A model behind the endpoint.

    Attributes:
        name: of the model, as shown in responses.
        context: longest sequence in tokens.
        sink: receives committed sessions; None: sessions cannot be committed.
        takes_feedback: whether rewards are used.
        anonymous: creates the session of a call that names none.
        rates: rate limits of clients.
        most_bytes: longest body; by default it follows from the context, and is 16 MiB for a vision-language model.
        switches: variables of the chat template, unless a request sets them.
    """

    engine: RolloutEngine
    chat: ChatRenderer
    name: str
    context: int
    sessions: SessionStore
    gate: AdmissionLimiter
    gauges: EndpointMetrics
    anonymous: MakeSession | None = None
    sink: SessionSink | None = None
    takes_feedback: bool = True
    rates: KeyRateLimiter = field(default_factory=KeyRateLimiter)
    most_bytes: int | None = None
    switches: Switches = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    _tokenizing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_THREADS, "tokenize"))
    _converting: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_THREADS, "json"))
    _longest_token: int = field(init=False)
    grammars: GrammarCache = field(init=False)

    def __post_init__(self) -> None:
        # Encoding here, too: a tokenizer's settings may change with its first text, which threads must not see.
        self.chat.encode("a")
        self.grammars = GrammarCache(self.chat, self._converting)
        self._longest_token = max(map(len, self.chat.tokenizer.get_vocab()))
        if self.most_bytes is None:
            own = min(_MOST_BODY, max(_LEAST_BODY, _BODY_PER_TOKEN * self.context))
            self.most_bytes = _BODY_WITH_PICTURES if self.chat.sees else own

    def close(self) -> None:
        """End the threads."""
        for threads in (self._tokenizing, self._converting):
            threads.shutdown(wait=False, cancel_futures=True)

    async def tokenized(self, size: int, work: Callable[[], ResultT]) -> ResultT:
        """Tokenize prompts of `size` bytes: at once if that is little, else in one of a few threads.

        So a long prompt delays other long ones only. Tokenizers release the interpreter lock while they encode.
        """
        return await _in_thread(self._tokenizing, size, work)

    async def converted(self, size: int, work: Callable[[], ResultT]) -> ResultT:
        """Convert `size` bytes from or to JSON likewise. Prompts that are tokenized do not delay it."""
        return await _in_thread(self._converting, size, work)

    def check_processors(self) -> None:
        """Raise ApiError if the engine applies no penalties and grammars."""
        if not applies_processors(self.engine):
            text = (
                "this server's engine cannot change what is sampled and record it exactly: no penalties, biases, "
                "formats and forced calls; serve with engine `native`"
            )
            raise ApiError(text, code="unsupported_parameter")

    @contextmanager
    def session(self, caller: Caller, answer: str, *, kept: bool = False) -> Iterator[EndpointSession]:
        """The session of a call, marked as busy inside. Raises ApiError if it takes no calls.

        Args:
            kept: a session without a name is kept even if nothing is recorded, so that it can be continued.
        """
        if caller.session is not None:
            session = self._named(caller)
        elif self.anonymous is None:
            text = "name the session: the key is KEY:SESSION, or send X-Session-Id"
            raise ApiError(text, code="session_missing")
        else:
            session = self.anonymous(answer, owner=caller.client)
            if self.takes_feedback or kept:
                self.sessions.add(session)
        session.busy += 1
        try:
            yield session
        finally:
            session.busy -= 1
            self.sessions.released(session)

    def _named(self, caller: Caller) -> EndpointSession:
        session = self.sessions.of(caller)
        if self.anonymous is None or self.takes_feedback or not session.full:
            return session
        self.sessions.remove(session)  # it cannot be committed, only continued
        return self.sessions.of(caller)

    def start(self, request: GenerationRequest, session: EndpointSession) -> GenerationTask:
        """Start a generation, within `gate.preparing`. Raises ApiError if the prompt does not fit, or the session has
        ended."""
        length = len(request.prompt_ids)
        self.check_length(length)
        session.check_open()  # it may have ended while the prompt was tokenized
        generation = self.gate.admit(self.engine, request)
        session.running.add(generation.task)
        generation.task.add_done_callback(session.running.discard)
        self._count(self.gauges.prompt_tokens, session, length)
        return generation

    def check_text(self, text: str) -> None:
        """Raise ApiError for a text that cannot fit into the context, without tokenizing much of it.

        No text has fewer tokens than its length divided by that of the longest token. Below that bound the beginning is
        tokenized: if it alone fills the context twice, the whole does not fit.
        """
        most = self.context * self._longest_token
        if len(text) > most:
            raise self._too_long(f"{len(text)} characters, of which at most {most} can fit")
        head = text[: self.context * _CHARS_PER_TOKEN]
        if len(head) < len(text) and (tokens := len(self.chat.encode(head))) > 2 * self.context:
            raise self._too_long(f"more than {tokens} tokens")

    def _too_long(self, size: str) -> ApiError:
        text = (
            f"the prompt has {size}, and the model's context of {self.context} tokens leaves no room for an answer; "
            "shorten the prompt"
        )
        return ApiError(text, code="context_length_exceeded", param="prompt")

    def _count(self, counter: Any, session: EndpointSession, tokens: int) -> None:
        counter.labels(session.owner).inc(tokens)
        self.rates.spend_tokens(session.owner, tokens)

    def check_length(self, length: int) -> None:
        """Raise ApiError unless a prompt of this length leaves room for an answer."""
        if length >= self.context:
            raise self._too_long(f"{length} tokens")
        if not length:
            raise ApiError("the prompt has no tokens; send some text", code="invalid_value", param="prompt")

    async def watched(
        self, generation: GenerationTask, session: EndpointSession
    ) -> AsyncGenerator[SampledToken | Completion, None]:
        """Yield the events of a generation, and record their metrics."""
        began, first = time.perf_counter(), True
        async for event in generation.events():
            if first:
                self.gauges.first.observe(time.perf_counter() - began)
                first = False
            if isinstance(event, Completion):
                self._count(self.gauges.completion_tokens, session, len(event.token_ids))
            yield event
        self.gauges.seconds.observe(time.perf_counter() - began)

    def token(self, id: int) -> str:
        """A token's text."""
        return self.chat.decode([id])


async def _in_thread(threads: ThreadPoolExecutor, size: int, work: Callable[[], ResultT]) -> ResultT:
    if size <= INLINE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(threads, work)


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
    most_bytes: int | None = None  #: longest body; None: it follows from the model's context
    requests_per_minute: int | None = None  #: of each client without a limit of its own
    tokens_per_minute: int | None = None  #: likewise, of prompts and completions


def build_application_service(
    engine: RolloutEngine,
    chat: ChatRenderer,
    *,
    name: str,
    context: int,
    sampling: SamplingConfig,
    limits: ServiceLimits,
    sink: SessionSink | None = None,
    keys: KeyRing | None = None,
    journal: SessionJournal | None = None,
    switches: Switches | None = None,
) -> EndpointService:
    """Build the service of a model for applications, where any call may start a session.

    Without a sink, calls without a session name are not kept. Raises ConfigError if the web libraries are missing.
    """
    try:
        gauges = EndpointMetrics()
    except ImportError as error:
        raise ConfigError(MISSING_LIBRARIES) from error
    make = partial(EndpointSession, chat=chat, sampling=sampling, switches=switches)
    return EndpointService(
        engine=engine,
        chat=chat,
        name=name,
        context=context,
        sessions=SessionStore(
            gauges,
            make,
            most=limits.sessions,
            most_tokens=limits.session_tokens,
            idle_s=limits.idle_s,
            journal=journal,
        ),
        gate=AdmissionLimiter(limits.requests, limits.deadline_s, gauges),
        gauges=gauges,
        anonymous=make,
        sink=sink,
        takes_feedback=sink is not None,
        rates=KeyRateLimiter(keys.keys if keys else (), limits.requests_per_minute, limits.tokens_per_minute),
        most_bytes=limits.most_bytes,
        switches=switches or {},
    )
