"""A running completion request: the common part of chats and text completions."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel
from starlette.responses import JSONResponse

from rollmill.apps.serve.endpoint.extra_fields import check_extra_fields
from rollmill.apps.serve.endpoint.middleware import Caller
from rollmill.apps.serve.endpoint.protocol import ApiError, BaseCompletionRequest, UsageInfo
from rollmill.apps.serve.endpoint.reply_stream import TextDelta
from rollmill.apps.serve.endpoint.service import EndpointService, GenerationTask, new_response_id
from rollmill.config.rollout import SamplingConfig
from rollmill.data.picture_turns import PictureTurn
from rollmill.engines.base import GenerationRequest, LogitsProcessor, SampledToken, TokenPenalties
from rollmill.engines.logits_processors import CompiledGrammar, GrammarProcessor, PenaltyProcessor, ProcessorList
from rollmill.types import Completion

if TYPE_CHECKING:
    from rollmill.data.picture_prompts import PicturePrompt


@dataclass(slots=True, eq=False)
class ChoiceState:
    """One completion of a running request."""

    index: int
    prompt: str
    prompt_ids: list[int]
    sampled: list[SampledToken] = field(default_factory=list)
    sent: int = 0  #: number of tokens whose log-probs were sent
    completion: Completion | None = None
    turns: tuple[PictureTurn, ...] = ()  #: pieces of the prompt with pictures

    def push(self, token: int) -> TextDelta:
        """Add a token; return the text that can be shown now."""
        raise NotImplementedError

    def unsent(self) -> list[SampledToken]:
        """Return the tokens whose log-probs were not sent yet, and mark them as sent."""
        new, self.sent = self.sampled[self.sent :], len(self.sampled)
        return new


AnyBody = TypeVar("AnyBody", bound=BaseCompletionRequest)
AnyChoice = TypeVar("AnyChoice", bound=ChoiceState)


class CompletionHandler(ABC, Generic[AnyBody, AnyChoice]):
    """A running request. `begin` starts its generations; `close` ends it.

    Args:
        size: bytes of the request.

    Raises ApiError if the request cannot be answered.
    """

    kind: ClassVar[str]  #: prefix of response ids
    piece: ClassVar[str]  #: object name of a stream's chunks
    named_events: ClassVar[bool] = False
    """A stream's events are named by the `type` of their JSON."""
    sampling: SamplingConfig
    penalties: TokenPenalties
    grammar: CompiledGrammar | None

    continuable = False
    """A later call may continue this one, even if it names no session."""

    def __init__(self, service: EndpointService, body: AnyBody, caller: Caller, size: int) -> None:
        check_extra_fields(body.model_extra)
        if body.stream_options is not None and not body.stream:
            raise ApiError("`stream_options` needs `stream`: true", code="invalid_value", param="stream_options")
        service.rates.check_tokens(caller.client)
        service.gate.check()
        self.service, self.body, self.id, self.size = service, body, new_response_id(self.kind), size
        self.created, self.count = int(time.time()), body.n or 1
        self.choices: list[AnyChoice] = []
        self.penalties, self.grammar = TokenPenalties(), None
        self._following: list[GrammarProcessor] = []
        self._generations: list[GenerationTask] = []
        self._stack = ExitStack()
        self.session = self._stack.enter_context(service.session(caller, self.id, kept=self.continuable))

    @abstractmethod
    async def begin(self) -> None:
        """Tokenize the prompts, start the generations, and create the choices."""

    @abstractmethod
    def response(self) -> BaseModel:
        """The whole response, once all choices are complete."""

    async def answer(self) -> JSONResponse:
        """Wait until all choices are complete, and return the whole response."""
        async for _ in self._changes():
            pass
        details = sum(1 + len(each.top) for choice in self.choices for each in choice.sampled)
        return await self.service.converted(details * 32, lambda: JSONResponse(self.response().model_dump()))

    @abstractmethod
    def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the response in chunks, without token counts."""

    @abstractmethod
    def _ended(self, choice: AnyChoice, completion: Completion) -> TextDelta:
        """Record a completion; return the text still to be shown."""

    def last_event(self) -> dict[str, Any] | None:
        """The last event of a stream, sent once the request has ended; None: `[DONE]`."""
        return None

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """The event of a stream that fails."""
        return error.body()

    def close(self) -> None:
        """End the request and cancel its generations."""
        for generation in self._generations:
            generation.task.cancel()
        self._stack.close()

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the response in chunks."""
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                yield piece
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self._frame([]) | {"usage": self._usage().model_dump()}

    def _start(self, prompt_ids: list[int], seed: int, top: int, pictures: PicturePrompt | None = None) -> None:
        request = GenerationRequest(
            prompt_ids,
            self.sampling,
            n=self.count,
            seed=seed,
            id=self.id,
            top=top,
            pictures=pictures,
            continues=True,
        )
        if self.grammar is not None or not self.penalties.neutral:
            self.service.check_processors()
            request.new_processor = partial(self._new_processor, prompt_ids)
        self._generations.append(self.service.start(request, self.session))

    def _new_processor(self, prompt_ids: list[int]) -> LogitsProcessor:
        """The processor of one completion: its grammar, then its penalties."""
        found: list[LogitsProcessor] = []
        if self.grammar is not None:
            following = self.grammar.new_processor()
            self._following.append(following)
            found.append(following)
        if not self.penalties.neutral:
            found.append(PenaltyProcessor(self.penalties, prompt_ids))
        return ProcessorList(found)

    def _check_followed(self) -> None:
        """Raise ApiError if a grammar could not be followed to its end."""
        failed = [each.failure for each in self._following if each.failure]
        if failed:
            text = f"the format is too complex to be followed ({failed[0].splitlines()[0]}); simplify the schema"
            raise ApiError(text, code="invalid_value")

    async def _changes(self) -> AsyncGenerator[tuple[AnyChoice, TextDelta], None]:
        """Yield choices with new text to show; the last change of each has the completion."""
        for number, generation in enumerate(self._generations):
            async with aclosing(self.service.watched(generation, self.session)) as events:
                async for event in events:
                    choice = self.choices[number * self.count + event.index]
                    if isinstance(event, Completion):
                        self._check_followed()
                        yield choice, self._ended(choice, event)
                        continue
                    choice.sampled.append(event)
                    if self.body.stream and any(new := choice.push(event.token)):
                        yield choice, new

    def _record(self, choice: AnyChoice, completion: Completion) -> None:
        choice.completion = completion
        self.session.record(completion, choice.prompt, self.sampling, choice.turns)
        self.service.sessions.answered(self.session, self.id)

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        found = {"id": self.id, "object": self.piece, "created": self.created, "model": self.service.name}
        return found | {"choices": choices}

    def _usage(self) -> UsageInfo:
        prompts = sum(len(choice.prompt_ids) for choice in self.choices[:: self.count])
        made = [choice.completion for choice in self.choices if choice.completion is not None]
        tokens = sum(len(each.token_ids) for each in made)
        return UsageInfo(prompt_tokens=prompts, completion_tokens=tokens, total_tokens=prompts + tokens)
