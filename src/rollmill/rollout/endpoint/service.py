"""What all routes of the endpoint share."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rollmill.engines.base import GenerationRequest, RolloutEngine, SampledToken
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.endpoint.api_errors import ApiError
from rollmill.rollout.endpoint.generation import AdmissionLimiter, GenerationTask
from rollmill.rollout.endpoint.session import EndpointSession
from rollmill.rollout.endpoint.session_store import SessionSink, SessionStore
from rollmill.types import Completion

if TYPE_CHECKING:
    from rollmill.rollout.endpoint.metrics import EndpointMetrics

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class EndpointService:
    """A model behind the endpoint.

    Attributes:
        name: of the model, as answers have it.
        context: longest sequence in tokens.
        sink: where committed sessions go; None: nothing is committed here.
        takes_feedback: whether rewards are of any use.
        anonymous: makes the session of a call that names none.
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
        """The session of a call, which is busy inside. Raises ApiError where it takes none."""
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
        self.sessions.remove(session)  # nobody can commit it: it is kept only to go on with
        return self.sessions.of(name)

    def start(self, request: GenerationRequest, session: EndpointSession) -> GenerationTask:
        """Begin to answer. Raises ApiError where the prompt does not fit, or there are too many requests."""
        length = len(request.prompt_ids)
        self.check_length(length)
        generation = self.gate.admit(self.engine, request)
        session.running.add(generation.task)
        generation.task.add_done_callback(session.running.discard)
        self.gauges.prompt_tokens.inc(length)
        return generation

    def check_length(self, length: int) -> None:
        """Raises ApiError unless a prompt of so many tokens leaves room for an answer."""
        if length >= self.context:
            text = (
                f"the prompt has {length} tokens, and the model's context of {self.context} tokens leaves no room for "
                "an answer; shorten the prompt"
            )
            raise ApiError(text, code="context_length_exceeded", param="prompt")
        if not length:
            raise ApiError("the prompt has no tokens; send some text", code="invalid_value", param="prompt")

    async def watched(self, generation: GenerationTask) -> AsyncGenerator[SampledToken | Completion, None]:
        """The events of a generation, which are timed and counted."""
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
    """The id of an answer."""
    return f"{kind}-{uuid.uuid4().hex}"


def token_logprobs(service: EndpointService, sampled: list[SampledToken]) -> list[dict[str, Any]]:
    """Log-probs as chat completions have them."""

    def entry(id: int, logprob: float) -> dict[str, Any]:
        text = service.token(id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return [
        entry(each.token, each.logprob) | {"top_logprobs": [entry(id, logprob) for id, logprob in each.top]}
        for each in sampled
    ]
