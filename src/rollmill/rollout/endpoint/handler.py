"""A request for completions while it is answered: what chats and texts have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import GenerationRequest, SampledToken
from rollmill.rollout.endpoint.api_errors import ApiError
from rollmill.rollout.endpoint.generation import GenerationTask
from rollmill.rollout.endpoint.protocol import BaseCompletionRequest
from rollmill.rollout.endpoint.responses import UsageInfo
from rollmill.rollout.endpoint.service import EndpointService, new_response_id
from rollmill.rollout.endpoint.text_stream import TextStream
from rollmill.rollout.endpoint.unsupported_fields import check_extra_fields
from rollmill.types import Completion


@dataclass(slots=True, eq=False)
class ChoiceState:
    """One completion while it comes."""

    index: int
    prompt: str
    prompt_ids: list[int]
    text: TextStream
    sampled: list[SampledToken] = field(default_factory=list)
    sent: int = 0  #: tokens whose log-probs were sent
    completion: Completion | None = None

    def unsent(self) -> list[SampledToken]:
        """The tokens whose log-probs were not sent yet; they count as sent now."""
        new, self.sent = self.sampled[self.sent :], len(self.sampled)
        return new


AnyBody = TypeVar("AnyBody", bound=BaseCompletionRequest)
AnyChoice = TypeVar("AnyChoice", bound=ChoiceState)


class CompletionHandler(ABC, Generic[AnyBody, AnyChoice]):
    """A request under way. Made when it was admitted; `close` ends it.

    Raises ApiError where the request cannot be answered.
    """

    kind: ClassVar[str]  #: how ids of answers begin
    piece: ClassVar[str]  #: what a piece of a stream is called
    sampling: SamplingConfig

    def __init__(self, service: EndpointService, body: AnyBody, name: str | None) -> None:
        check_extra_fields(body.model_extra)
        if body.stream_options is not None and not body.stream:
            raise ApiError("`stream_options` needs `stream`: true", code="invalid_value", param="stream_options")
        service.gate.check()
        self.service, self.body, self.id = service, body, new_response_id(self.kind)
        self.created, self.count = int(time.time()), body.n or 1
        self.choices: list[AnyChoice] = []
        self._generations: list[GenerationTask] = []
        self._stack = ExitStack()
        try:
            self.session = self._stack.enter_context(service.session(name, self.id))
            self._begin()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _begin(self) -> None:
        """Start what generates, and make the choices."""

    @abstractmethod
    async def answer(self) -> BaseModel:
        """The whole answer."""

    @abstractmethod
    def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer piece by piece, without the token counts."""

    @abstractmethod
    def _ended(self, choice: AnyChoice, completion: Completion) -> str:
        """Record a completion; what is still to be shown of it."""

    def close(self) -> None:
        """The request is over: what still runs is ended."""
        for generation in self._generations:
            generation.task.cancel()
        self._stack.close()

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer piece by piece."""
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                yield piece
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self._frame([]) | {"usage": self._usage().model_dump()}

    def _start(self, prompt_ids: list[int], seed: int, top: int) -> None:
        request = GenerationRequest(prompt_ids, self.sampling, n=self.count, seed=seed, id=self.id, top=top)
        self._generations.append(self.service.start(request, self.session))

    def _stream(self, *, tools: bool = False) -> TextStream:
        return TextStream(self.service.chat.tokenizer, self.sampling.stop, tools=tools)

    async def _finish(self) -> None:
        """Wait until all choices are whole."""
        async for _ in self._changes():
            pass

    async def _changes(self) -> AsyncGenerator[tuple[AnyChoice, str], None]:
        """Choices of which there is more to show; their last change has the completion."""
        for number, generation in enumerate(self._generations):
            async with aclosing(self.service.watched(generation)) as events:
                async for event in events:
                    choice = self.choices[number * self.count + event.index]
                    if isinstance(event, Completion):
                        yield choice, self._ended(choice, event)
                        continue
                    choice.sampled.append(event)
                    if text := choice.text.push(event.token) if self.body.stream else "":
                        yield choice, text

    def _record(self, choice: AnyChoice, completion: Completion) -> None:
        choice.completion = completion
        self.session.record(completion, choice.prompt, self.sampling)
        self.service.sessions.answered(self.session, self.id)

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        found = {"id": self.id, "object": self.piece, "created": self.created, "model": self.service.name}
        return found | {"choices": choices}

    def _usage(self) -> UsageInfo:
        prompts = sum(len(choice.prompt_ids) for choice in self.choices[:: self.count])
        made = [choice.completion for choice in self.choices if choice.completion is not None]
        tokens = sum(len(each.token_ids) for each in made)
        return UsageInfo(prompt_tokens=prompts, completion_tokens=tokens, total_tokens=prompts + tokens)
