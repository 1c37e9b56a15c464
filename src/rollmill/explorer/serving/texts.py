"""/v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any

from rollmill.core.types import Completion
from rollmill.engines.base import Request, SampledToken
from rollmill.explorer.serving.answers import REASONS, TextAnswer, TextChoice
from rollmill.explorer.serving.fields import check_fields
from rollmill.explorer.serving.generation import Generation
from rollmill.explorer.serving.refusals import ApiError
from rollmill.explorer.serving.requests import CompletionRequest
from rollmill.explorer.serving.service import Service, new_id, usage
from rollmill.explorer.serving.session import Session
from rollmill.explorer.serving.text_stream import TextStream

MOST_PROMPTS = 64


@dataclass(slots=True, eq=False)
class Choice:
    """One completion of one prompt while it comes."""

    index: int
    prompt: str
    prompt_ids: list[int]
    text: TextStream
    sampled: list[SampledToken] = field(default_factory=list)
    sent: int = 0  #: tokens whose log-probs were sent
    at: int = 0  #: where their text begins in the choice's text
    completion: Completion | None = None


class Texts:
    """A request under way. Made when it was admitted; `close` ends it.

    Raises ApiError where the request cannot be answered.
    """

    def __init__(self, service: Service, body: CompletionRequest, name: str | None) -> None:
        check_fields(body.model_extra)
        if body.max_tokens == 0:
            text = "`max_tokens` 0 asks for nothing: the endpoint gives no log-probs of prompts; ask for 1 token"
            raise ApiError(text, code="invalid_value", param="max_tokens")
        if body.echo and body.logprobs is not None:
            text = (
                "`echo` with `logprobs` would need log-probs of the prompt, which are not given; leave one of them out"
            )
            raise ApiError(text, code="unsupported_parameter", param="echo")
        self.service, self.body, self.id = service, body, new_id("cmpl")
        self._generations: list[Generation] = []
        self._stack = ExitStack()
        try:
            self.session: Session = self._stack.enter_context(service.session(name, self.id))
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        body, session, service = self.body, self.session, self.service
        prompts = _prompts(body)
        service.gate.check(len(prompts))
        self.sampling = session.settings(body, body.max_tokens)
        self.choices: list[Choice] = []
        count = body.n or 1
        asked = [self._prompt_of(prompt) for prompt in prompts]
        for number, (ids, text) in enumerate(asked):
            seed = session.seed(session.begin(), body.seed, int(self.id[-16:], 16) + number)
            request = Request(ids, self.sampling, n=count, seed=seed, id=self.id)
            request.top = body.logprobs or 0
            self._generations.append(service.start(request, session))
            for i in range(count):
                stream = TextStream(service.chat.tokenizer, self.sampling.stop)
                self.choices.append(Choice(number * count + i, text, ids, stream, at=len(text) if body.echo else 0))

    def _prompt_of(self, prompt: str | list[int]) -> tuple[list[int], str]:
        most = len(self.service.chat.tokenizer)
        if not isinstance(prompt, str) and any(token >= most for token in prompt):
            raise ApiError(f"token ids are below {most}", code="invalid_value", param="prompt")
        ids, text = self.session.text_prompt(prompt)
        self.service.check_length(len(ids))
        return ids, text

    def close(self) -> None:
        """The request is over: what still runs is ended."""
        for generation in self._generations:
            generation.task.cancel()
        self._stack.close()

    async def answer(self) -> TextAnswer:
        """The whole answer."""
        async for _ in self._changes():
            pass
        return TextAnswer(
            id=self.id,
            created=self.service.created,
            model=self.service.name,
            choices=[TextChoice.model_validate(self._choice(choice, choice.text.shown)) for choice in self.choices],
            usage=self._usage(),
        )

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer piece by piece."""
        began: set[int] = set()
        async with aclosing(self._changes()) as changes:
            async for choice, text in changes:
                found = self._choice(choice, text, first=choice.index not in began)
                began.add(choice.index)
                yield self._frame([found])
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield self._frame([]) | {"usage": self._usage().model_dump()}

    async def _changes(self) -> AsyncGenerator[tuple[Choice, str], None]:
        count = self.body.n or 1
        for number, generation in enumerate(self._generations):
            async with aclosing(self.service.watched(generation)) as events:
                async for event in events:
                    choice = self.choices[number * count + event.index]
                    if isinstance(event, Completion):
                        yield choice, self._ended(choice, event)
                        continue
                    choice.sampled.append(event)
                    if text := choice.text.push(event.token) if self.body.stream else "":
                        yield choice, text

    def _ended(self, choice: Choice, completion: Completion) -> str:
        choice.completion = completion
        rest = choice.text.finish(completion.text)
        self.session.record(completion, choice.prompt, self.sampling)
        if self.id not in self.session.answers:
            self.service.sessions.answered(self.session, self.id)
        return rest

    def _choice(self, choice: Choice, text: str, *, first: bool = True) -> dict[str, Any]:
        done = choice.completion
        shown = f"{choice.prompt}{text}" if self.body.echo and first else text
        found: dict[str, Any] = {"index": choice.index, "text": shown, "logprobs": self._logprobs(choice)}
        found["finish_reason"] = REASONS[done.stop_reason] if done is not None else None
        if self.body.return_token_ids and done is not None:
            found |= {"token_ids": done.token_ids.tolist(), "prompt_token_ids": choice.prompt_ids}
        return found

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        """Of the tokens that were not sent yet."""
        if self.body.logprobs is None:
            return None
        new, choice.sent = choice.sampled[choice.sent :], len(choice.sampled)
        tokens, offsets = [self.service.token(each.token) for each in new], list[int]()
        for token in tokens:
            offsets.append(choice.at)
            choice.at += len(token)
        top = [{self.service.token(id): logprob for id, logprob in each.top} for each in new]
        logprobs = [each.logprob for each in new]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _frame(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        service = self.service
        found = {"id": self.id, "object": "text_completion", "created": service.created, "model": service.name}
        return found | {"choices": choices}

    def _usage(self) -> Any:
        count = self.body.n or 1
        done = [choice.completion for choice in self.choices if choice.completion is not None]
        prompts = sum(len(choice.prompt_ids) for choice in self.choices[::count])
        return usage(prompts, sum(len(each.token_ids) for each in done))


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a request. Raises ApiError where there are too many, or none."""
    prompt: Any = body.prompt
    single = isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], int))
    found: list[str | list[int]] = [prompt] if single else list(prompt)
    if not 1 <= len(found) <= MOST_PROMPTS:
        raise ApiError(f"send 1 to {MOST_PROMPTS} prompts", code="invalid_value", param="prompt")
    return found
