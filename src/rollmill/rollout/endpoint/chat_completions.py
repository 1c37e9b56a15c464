"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from rollmill.rollout.endpoint.api_errors import ApiError
from rollmill.rollout.endpoint.handler import ChoiceState, CompletionHandler
from rollmill.rollout.endpoint.messages import assistant_message
from rollmill.rollout.endpoint.protocol import ChatCompletionRequest
from rollmill.rollout.endpoint.responses import (
    FINISH_REASONS,
    ChatCompletionChoice,
    ChatCompletionResponse,
    ResponseMessage,
)
from rollmill.rollout.endpoint.service import EndpointService, token_logprobs
from rollmill.rollout.endpoint.session import requested_tools
from rollmill.types import Completion


@dataclass(slots=True, eq=False)
class ChatChoiceState(ChoiceState):
    """One of `n` while it comes."""

    content: str = ""
    calls: list[Any] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """Why it ended."""
        assert self.completion is not None
        return "tool_calls" if self.calls else FINISH_REASONS[self.completion.stop_reason]


class ChatCompletionHandler(CompletionHandler[ChatCompletionRequest, ChatChoiceState]):
    """A chat under way. Raises ApiError where the request cannot be answered."""

    kind, piece = "chatcmpl", "chat.completion.chunk"

    def __init__(self, service: EndpointService, body: ChatCompletionRequest, name: str | None) -> None:
        _check_choice(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError("`top_logprobs` needs `logprobs`: true", code="invalid_value", param="top_logprobs")
        super().__init__(service, body, name)

    def _begin(self) -> None:
        body, session = self.body, self.session
        self._number = session.begin()
        self.prompt = session.chat_prompt(body)
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        self.sampling = session.settings(body, limit)
        seed = session.seed(self._number, body.seed, int(self.id[-16:], 16))
        self._start(self.prompt.token_ids, seed, body.top_logprobs or 0)
        tools, asked = requested_tools(body) is not None, (self.prompt.text, self.prompt.token_ids)
        self.choices = [ChatChoiceState(i, *asked, self._stream(tools=tools)) for i in range(self.count)]

    async def answer(self) -> ChatCompletionResponse:
        """See CompletionHandler."""
        await self._finish()
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
            async for choice, text in changes:
                if choice.completion is None:
                    yield self._chunk(choice, {"content": text})
                    continue
                delta: dict[str, Any] = {"content": text} if text else {}
                if choice.calls:
                    delta["tool_calls"] = [{"index": i} | call.message() for i, call in enumerate(choice.calls)]
                yield self._chunk(choice, delta, ended=True)

    def _ended(self, choice: ChatChoiceState, completion: Completion) -> str:
        body, session = self.body, self.session
        salt = f"{session.id}/{self._number}/{choice.index}"
        choice.content, choice.calls = session.read(body, completion.text, salt)
        rest = ""
        if body.stream:
            rest = choice.text.finish(choice.content)
            choice.content = choice.text.shown  # what the client has seen is what it sends back
        self._record(choice, completion)
        if session.id != self.id:  # nobody can go on with a session that has no name
            session.told(body, assistant_message(choice.content, choice.calls), self.prompt, completion)
        return rest

    def _choice(self, choice: ChatChoiceState) -> ChatCompletionChoice:
        assert choice.completion is not None
        calls = [call.message() for call in choice.calls]
        message = {"content": choice.content if choice.content or not calls else None, "tool_calls": calls or None}
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


def _check_choice(body: ChatCompletionRequest) -> None:
    """Calls are up to the policy: nothing forces one."""
    if body.tool_choice in (None, "none", "auto"):
        return
    text = "`tool_choice` may be `auto` or `none`: calls are up to the policy; ask for one in the prompt"
    raise ApiError(text, code="unsupported_parameter", param="tool_choice")
