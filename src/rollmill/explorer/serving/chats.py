"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from rollmill.core.types import Completion
from rollmill.engines.base import Request, SampledToken
from rollmill.explorer.chat import Prompt
from rollmill.explorer.serving.answers import REASONS, AnswerMessage, ChatAnswer, ChatChoice
from rollmill.explorer.serving.fields import check_fields
from rollmill.explorer.serving.generation import Generation
from rollmill.explorer.serving.messages import answered
from rollmill.explorer.serving.refusals import ApiError
from rollmill.explorer.serving.requests import ChatRequest
from rollmill.explorer.serving.service import Service, new_id, token_logprobs, usage
from rollmill.explorer.serving.session import Session, offered
from rollmill.explorer.serving.text_stream import TextStream


@dataclass(slots=True, eq=False)
class Choice:
    """One of `n` while it comes."""

    index: int
    text: TextStream
    sampled: list[SampledToken] = field(default_factory=list)
    sent: int = 0  #: tokens whose log-probs were sent
    completion: Completion | None = None
    content: str = ""
    calls: list[Any] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """Why it ended."""
        assert self.completion is not None
        return "tool_calls" if self.calls else REASONS[self.completion.stop_reason]


class Chat:
    """A request under way. Made when it was admitted; `close` ends it.

    Raises ApiError where the request cannot be answered.
    """

    def __init__(self, service: Service, body: ChatRequest, name: str | None) -> None:
        check_fields(body.model_extra)
        _check_choice(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError("`top_logprobs` needs `logprobs`: true", code="invalid_value", param="top_logprobs")
        self.service, self.body, self.id = service, body, new_id("chatcmpl")
        self._stack = ExitStack()
        try:
            self.session: Session = self._stack.enter_context(service.session(name, self.id))
            self._begin()
        except BaseException:
            self._stack.close()
            raise

    def _begin(self) -> None:
        body, session, service = self.body, self.session, self.service
        service.gate.check()
        self._number = session.begin()
        self.prompt: Prompt = session.chat_prompt(body)
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        self.sampling = session.settings(body, limit)
        seed = session.seed(self._number, body.seed, int(self.id[-16:], 16))
        count = body.n or 1
        request = Request(self.prompt.token_ids, self.sampling, n=count, seed=seed, id=self.id)
        request.top = body.top_logprobs or 0
        self._generation: Generation = service.start(request, session)
        tools = offered(body) is not None
        self.choices = [
            Choice(i, TextStream(service.chat.tokenizer, self.sampling.stop, tools=tools)) for i in range(count)
        ]

    def close(self) -> None:
        """The request is over: what still runs is ended."""
        self._generation.task.cancel()
        self._stack.close()

    async def answer(self) -> ChatAnswer:
        """The whole answer."""
        async for _ in self._changes():
            pass
        return ChatAnswer(
            id=self.id,
            created=self.service.created,
            model=self.service.name,
            choices=[self._choice(choice) for choice in self.choices],
            usage=self._usage(),
            prompt_token_ids=list(self.prompt.token_ids) if self.body.return_token_ids else None,
        )

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer piece by piece."""
        wants_usage = self.body.stream_options is not None and bool(self.body.stream_options.include_usage)
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
        if wants_usage:
            yield self._frame([]) | {"usage": self._usage().model_dump()}

    async def _changes(self) -> AsyncGenerator[tuple[Choice, str], None]:
        """Choices of which there is more to show; their last change has the completion."""
        async with aclosing(self.service.watched(self._generation)) as events:
            async for event in events:
                choice = self.choices[event.index]
                if isinstance(event, Completion):
                    yield choice, self._ended(choice, event)
                    continue
                choice.sampled.append(event)
                if text := choice.text.push(event.token) if self.body.stream else "":
                    yield choice, text

    def _ended(self, choice: Choice, completion: Completion) -> str:
        """Record a completion; what is still to be shown of it."""
        body, session = self.body, self.session
        salt = f"{session.id}/{self._number}/{choice.index}"
        content, calls = session.read(body, completion.text, salt)
        rest = ""
        if body.stream:
            rest = choice.text.finish(content)
            content = choice.text.shown  # what the client has seen is what it sends back
        choice.completion, choice.content, choice.calls = completion, content, calls
        session.record(completion, self.prompt.text, self.sampling)
        if session.id != self.id:  # nobody can go on with a session that has no name
            session.told(body, answered(content, calls), self.prompt, completion)
        if choice.index == 0 or self.id not in session.answers:
            self.service.sessions.answered(session, self.id)
        return rest

    def _choice(self, choice: Choice) -> ChatChoice:
        assert choice.completion is not None
        calls = [call.message() for call in choice.calls]
        message = {"content": choice.content if choice.content or not calls else None, "tool_calls": calls or None}
        return ChatChoice(
            index=choice.index,
            message=AnswerMessage.model_validate(message),
            finish_reason=choice.reason,
            logprobs=self._logprobs(choice),
            token_ids=choice.completion.token_ids.tolist() if self.body.return_token_ids else None,
        )

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Of the tokens that were not sent yet."""
        if not self.body.logprobs:
            return None
        new, choice.sent = choice.sampled[choice.sent :], len(choice.sampled)
        return {"content": token_logprobs(self.service, new), "refusal": None}

    def _chunk(self, choice: Choice, delta: dict[str, Any], *, ended: bool = False) -> dict[str, Any]:
        found = {"index": choice.index, "delta": delta, "finish_reason": choice.reason if ended else None}
        first = "role" in delta
        found["logprobs"] = None if first else self._logprobs(choice)
        if self.body.return_token_ids and ended:
            assert choice.completion is not None
            found["token_ids"] = choice.completion.token_ids.tolist()
        return self._frame([found])

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        service = self.service
        found = {"id": self.id, "object": "chat.completion.chunk", "created": service.created, "model": service.name}
        return found | {"choices": choices}

    def _usage(self) -> Any:
        done = [choice.completion for choice in self.choices if choice.completion is not None]
        return usage(len(self.prompt.token_ids), sum(len(each.token_ids) for each in done))


def _check_choice(body: ChatRequest) -> None:
    """Calls are up to the policy: nothing forces one."""
    if body.tool_choice in (None, "none", "auto"):
        return
    text = "`tool_choice` may be `auto` or `none`: calls are up to the policy; ask for one in the prompt"
    raise ApiError(text, code="unsupported_parameter", param="tool_choice")
