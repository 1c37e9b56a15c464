"""A request for completions while it is answered: what chats and texts have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import GenerationRequest, SampledToken
from rollmill.rollout.endpoint.protocol import ApiError, BaseCompletionRequest, UsageInfo, check_extra_fields
from rollmill.rollout.endpoint.service import EndpointService, GenerationTask, new_response_id
from rollmill.rollout.tools.formats import TOOL_CALL_START
from rollmill.types import Completion

# A completion's text while its tokens come: what may be shown already.

_MARKS = (TOOL_CALL_START, "```")
"""Where a tool call may begin."""


class TextStream:
    """Shows text that no later token takes back: not half a character, nor what may become a stop string or a tool
    call. What was shown is the beginning of the whole text.

    Attributes:
        shown: so far.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], *, tools: bool = False) -> None:
        self.shown = ""
        self._tokenizer, self._tools = tokenizer, tools
        self._marks = (*stops, *(_MARKS if tools else ()))
        self._text, self._tokens = "", list[int]()
        self._from, self._read = 0, 0  # tokens before `_read` are in the text; decoding begins at `_from`

    def push(self, token: int) -> str:
        """What can be shown after one more token."""
        self._tokens.append(token)
        before = self._decode(self._from, self._read)
        now = self._decode(self._from, len(self._tokens))
        if not now.endswith("\ufffd"):
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(self._tokens)
        return self._show(self._text[: self._safe()])

    def finish(self, text: str) -> str:
        """What is still to be shown of the whole text. Where it begins otherwise than what was shown (bytes that are no
        character), what was shown stays.
        """
        rest = text[len(self.shown) :]
        self.shown += rest
        return rest

    def _show(self, text: str) -> str:
        if len(text) <= len(self.shown) or not text.startswith(self.shown):
            return ""
        new, self.shown = text[len(self.shown) :], text
        return new

    def _decode(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(self._tokens[start:end], skip_special_tokens=True)
        return text

    def _safe(self) -> int:
        """How much of the text stays as it is, whatever comes."""
        text, safe = self._text, len(self._text)
        if self._tools and text.lstrip()[:1] in ("", "{", "["):
            return 0
        for mark in self._marks:
            found = text.find(mark)
            if found < 0:
                ends = (size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size]))
                found = len(text) - next(ends, 0)
            safe = min(safe, found)
        return len(text[:safe].rstrip()) if self._tools else safe


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
