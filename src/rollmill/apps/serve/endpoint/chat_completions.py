"""Handlers of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from rollmill.apps.serve.endpoint.answer_formats import answer_format
from rollmill.apps.serve.endpoint.handler import ChoiceState, CompletionHandler
from rollmill.apps.serve.endpoint.messages import assistant_message, check_text
from rollmill.apps.serve.endpoint.middleware import Caller
from rollmill.apps.serve.endpoint.pictures import shows_pictures
from rollmill.apps.serve.endpoint.protocol import (
    FINISH_REASONS,
    ApiError,
    ChatCompletionChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatMessageParam,
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    ResponseMessage,
)
from rollmill.apps.serve.endpoint.reply_stream import ReplyStream, TextDelta, TextStream, opens_reasoning
from rollmill.apps.serve.endpoint.service import INLINE_BYTES, EndpointService, token_logprobs
from rollmill.apps.serve.endpoint.session import requested_tools
from rollmill.data.renderer import Renderer
from rollmill.data.renderer.call_formats import TOOL_CALL_END
from rollmill.types import Completion, ToolCall


@dataclass(slots=True, eq=False)
class ChatChoiceState(ChoiceState):
    """One of the `n` choices of a running chat request."""

    stream: ReplyStream = field(kw_only=True)
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  #: of calls that are malformed or cut off

    @property
    def content(self) -> str:
        """The answer as the client sees it."""
        return self.stream.content

    @property
    def reasoning(self) -> str:
        """The reasoning as the client sees it."""
        return self.stream.reasoning

    @property
    def reason(self) -> str:
        """Finish reason."""
        assert self.completion is not None
        reason = FINISH_REASONS[self.completion.stop_reason]
        return "tool_calls" if self.calls and not (self.errors and reason == "length") else reason

    def push(self, token: int) -> TextDelta:
        return self.stream.push(token)


class ChatCompletionHandler(CompletionHandler[ChatCompletionRequest, ChatChoiceState]):
    """A running chat request. Raises ApiError if it cannot be answered."""

    kind, piece = "chatcmpl", "chat.completion.chunk"

    def __init__(self, service: EndpointService, body: ChatCompletionRequest, caller: Caller, size: int) -> None:
        self._format = answer_format(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError("`top_logprobs` needs `logprobs`: true", code="invalid_value", param="top_logprobs")
        super().__init__(service, body, caller, size)

    async def begin(self) -> None:
        body, session, service = self.body, self.session, self.service
        self._number = session.begin()
        with service.gate.preparing():
            size = max(self.size, INLINE_BYTES + 1) if shows_pictures(body.messages) else self.size
            self.prompt = await service.tokenized(size, lambda: session.chat_prompt(body, service.check_text))
            limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
            self.sampling, self.penalties = session.settings(body, limit), session.penalties(body)
            renderer = session.renderer(body)
            if body.parallel_tool_calls is False and requested_tools(body) is not None and (end := _call_end(renderer)):
                self.sampling = self.sampling.model_copy(update={"stop": [*self.sampling.stop, end]})
            if self._format is not None:
                service.check_processors()
                opened = opens_reasoning(renderer, self.prompt.token_ids)
                lark = self._format.grammar(renderer, opened=opened)
                self.grammar = await service.grammars.get(lark)
            seed = session.seed(self._number, body.seed, int(self.id[-16:], 16))
            self._start(self.prompt.token_ids, seed, body.top_logprobs or 0, self.prompt.pictures)
        for i in range(self.count):
            stream = session.stream(body, self.prompt, self.sampling.stop)
            text, ids = self.prompt.text, self.prompt.token_ids
            self.choices.append(ChatChoiceState(i, text, ids, turns=self.prompt.turns, stream=stream))

    def response(self) -> ChatCompletionResponse:
        return ChatCompletionResponse(
            id=self.id,
            created=self.created,
            model=self.service.name,
            choices=[self._choice(choice) for choice in self.choices],
            usage=self._usage(),
            prompt_token_ids=list(self.prompt.token_ids) if self.body.return_token_ids else None,
        )

    async def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        for choice in self.choices:
            yield self._chunk(choice, {"role": "assistant", "content": ""})
        async with aclosing(self._changes()) as changes:
            async for choice, new in changes:
                if new.reasoning:
                    yield self._chunk(choice, {"reasoning_content": new.reasoning, "reasoning": new.reasoning})
                if choice.completion is None:
                    if new.content:
                        yield self._chunk(choice, {"content": new.content})
                    continue
                delta: dict[str, Any] = {"content": new.content} if new.content else {}
                if choice.calls:
                    delta["tool_calls"] = [{"index": i} | call.message() for i, call in enumerate(choice.calls)]
                if choice.errors:
                    delta["tool_call_errors"] = choice.errors
                yield self._chunk(choice, delta, ended=True)

    def _ended(self, choice: ChatChoiceState, completion: Completion) -> TextDelta:
        session = self.session
        salt = f"{session.id}/{self._number}/{choice.index}"
        reply = session.parse(self.body, self.prompt, completion, salt)
        choice.calls, choice.errors = reply.tool_calls, reply.malformed
        rest = choice.stream.finish(reply)
        self.service.gauges.tool_calls.labels(session.owner).inc(len(choice.calls))
        self.service.gauges.tool_call_errors.labels(session.owner).inc(len(choice.errors))
        self._record(choice, completion)
        if session.id != self.id or self.continuable:
            session.told(self.body, self._answer_message(choice), self.prompt, completion)
        return rest

    def _answer_message(self, choice: ChatChoiceState) -> ChatMessageParam:
        """An answer as the client sends it back, which is what it has seen."""
        return assistant_message(choice.content, choice.calls, choice.reasoning)

    def _choice(self, choice: ChatChoiceState) -> ChatCompletionChoice:
        assert choice.completion is not None
        calls = [call.message() for call in choice.calls]
        content = choice.content if choice.content or not calls else None
        message: dict[str, Any] = {"content": content, "tool_calls": calls or None}
        message |= dict.fromkeys(("reasoning_content", "reasoning"), choice.reasoning or None)
        message["tool_call_errors"] = choice.errors or None
        return ChatCompletionChoice(
            index=choice.index,
            message=ResponseMessage.model_validate(message),
            finish_reason=choice.reason,
            logprobs=self._logprobs(choice),
            token_ids=choice.completion.token_ids.tolist() if self.body.return_token_ids else None,
        )

    def _logprobs(self, choice: ChatChoiceState) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": token_logprobs(self.service, choice.unsent()), "refusal": None}

    def _chunk(self, choice: ChatChoiceState, delta: dict[str, Any], *, ended: bool = False) -> dict[str, Any]:
        found = {"index": choice.index, "delta": delta, "finish_reason": choice.reason if ended else None}
        first = "role" in delta
        found["logprobs"] = None if first else self._logprobs(choice)
        if self.body.return_token_ids and ended:
            assert choice.completion is not None
            found["token_ids"] = choice.completion.token_ids.tolist()
        return self._frame([found])


def _call_end(renderer: Renderer) -> str:
    """Text after which a second call would begin, at which an answer of one call stops; empty if there is none."""
    if not renderer.replies.native_calls:
        return TOOL_CALL_END
    format = renderer.replies.call_format
    return "" if format is None or format.section_end.strip() else format.end.strip()


MAX_PROMPTS = 64


@dataclass(slots=True, eq=False)
class TextChoiceState(ChoiceState):
    """One choice of one prompt of a running text request."""

    stream: TextStream = field(kw_only=True)
    at: int = 0  #: offset of the unsent tokens' text in the choice's text

    def push(self, token: int) -> TextDelta:
        return self.stream.push(token)


class TextCompletionHandler(CompletionHandler[CompletionRequest, TextChoiceState]):
    """A running text completion request. Raises ApiError if it cannot be answered."""

    kind, piece = "cmpl", "text_completion"

    def __init__(self, service: EndpointService, body: CompletionRequest, caller: Caller, size: int) -> None:
        if body.max_tokens == 0:
            text = "`max_tokens` 0 asks for nothing: the endpoint gives no log-probs of prompts; ask for 1 token"
            raise ApiError(text, code="invalid_value", param="max_tokens")
        if body.echo and body.logprobs is not None:
            text = (
                "`echo` with `logprobs` would need log-probs of the prompt, which are not given; leave one of them out"
            )
            raise ApiError(text, code="unsupported_parameter", param="echo")
        super().__init__(service, body, caller, size)

    async def begin(self) -> None:
        body, session, service = self.body, self.session, self.service
        prompts = _prompts(body)
        self.sampling, self.penalties = session.settings(body, body.max_tokens), session.penalties(body)
        with service.gate.preparing(len(prompts)):
            found = await service.tokenized(self.size, lambda: [self._prompt_of(prompt) for prompt in prompts])
            for number, (ids, text) in enumerate(found):
                seed = session.seed(session.begin(), body.seed, int(self.id[-16:], 16) + number)
                self._start(ids, seed, body.logprobs or 0)
                at, first = len(text) if body.echo else 0, len(self.choices)
                for i in range(self.count):
                    stream = TextStream(service.chat.tokenizer, self.sampling.stop)
                    self.choices.append(TextChoiceState(first + i, text, ids, at=at, stream=stream))

    def _prompt_of(self, prompt: str | list[int]) -> tuple[list[int], str]:
        most = len(self.service.chat.tokenizer)
        if not isinstance(prompt, str) and any(token >= most for token in prompt):
            raise ApiError(f"token ids are below {most}", code="invalid_value", param="prompt")
        if isinstance(prompt, str):
            self.service.check_text(check_text(prompt))
        else:
            self.service.check_length(len(prompt))
        ids, text = self.session.text_prompt(prompt)
        self.service.check_length(len(ids))
        return ids, text

    def response(self) -> CompletionResponse:
        return CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.service.name,
            choices=[
                CompletionChoice.model_validate(self._choice(choice, choice.stream.shown)) for choice in self.choices
            ],
            usage=self._usage(),
        )

    async def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        began: set[int] = set()
        async with aclosing(self._changes()) as changes:
            async for choice, new in changes:
                found = self._choice(choice, new.content, first=choice.index not in began)
                began.add(choice.index)
                yield self._frame([found])

    def _ended(self, choice: TextChoiceState, completion: Completion) -> TextDelta:
        self._record(choice, completion)
        return choice.stream.finish(completion.text)

    def _choice(self, choice: TextChoiceState, text: str, *, first: bool = True) -> dict[str, Any]:
        done = choice.completion
        shown = f"{choice.prompt}{text}" if self.body.echo and first else text
        found: dict[str, Any] = {"index": choice.index, "text": shown, "logprobs": self._logprobs(choice)}
        found["finish_reason"] = FINISH_REASONS[done.stop_reason] if done is not None else None
        if self.body.return_token_ids and done is not None:
            found |= {"token_ids": done.token_ids.tolist(), "prompt_token_ids": choice.prompt_ids}
        return found

    def _logprobs(self, choice: TextChoiceState) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        new, offsets = choice.unsent(), list[int]()
        tokens = [self.service.token(each.token) for each in new]
        for token in tokens:
            offsets.append(choice.at)
            choice.at += len(token)
        top = [{self.service.token(id): logprob for id, logprob in each.top} for each in new]
        logprobs = [each.logprob for each in new]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a request. Raises ApiError for none or too many."""
    prompt: Any = body.prompt
    single = isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], int))
    found: list[str | list[int]] = [prompt] if single else list(prompt)
    if not 1 <= len(found) <= MAX_PROMPTS:
        raise ApiError(f"send 1 to {MAX_PROMPTS} prompts", code="invalid_value", param="prompt")
    return found
