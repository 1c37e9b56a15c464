"""/v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from rollmill.rollout.endpoint.api_errors import ApiError
from rollmill.rollout.endpoint.handler import ChoiceState, CompletionHandler
from rollmill.rollout.endpoint.protocol import CompletionRequest
from rollmill.rollout.endpoint.responses import FINISH_REASONS, CompletionChoice, CompletionResponse
from rollmill.rollout.endpoint.service import EndpointService
from rollmill.types import Completion

MAX_PROMPTS = 64


@dataclass(slots=True, eq=False)
class TextChoiceState(ChoiceState):
    """One completion of one prompt while it comes."""

    at: int = 0  #: where the text of tokens that were not sent begins in the choice's text


class TextCompletionHandler(CompletionHandler[CompletionRequest, TextChoiceState]):
    """Texts under way. Raises ApiError where the request cannot be answered."""

    kind, piece = "cmpl", "text_completion"

    def __init__(self, service: EndpointService, body: CompletionRequest, name: str | None) -> None:
        if body.max_tokens == 0:
            text = "`max_tokens` 0 asks for nothing: the endpoint gives no log-probs of prompts; ask for 1 token"
            raise ApiError(text, code="invalid_value", param="max_tokens")
        if body.echo and body.logprobs is not None:
            text = (
                "`echo` with `logprobs` would need log-probs of the prompt, which are not given; leave one of them out"
            )
            raise ApiError(text, code="unsupported_parameter", param="echo")
        super().__init__(service, body, name)

    def _begin(self) -> None:
        body, session = self.body, self.session
        prompts = _prompts(body)
        self.service.gate.check(len(prompts))
        self.sampling = session.settings(body, body.max_tokens)
        for number, (ids, text) in enumerate([self._prompt_of(prompt) for prompt in prompts]):
            seed = session.seed(session.begin(), body.seed, int(self.id[-16:], 16) + number)
            self._start(ids, seed, body.logprobs or 0)
            at, first = len(text) if body.echo else 0, len(self.choices)
            self.choices += [TextChoiceState(first + i, text, ids, self._stream(), at=at) for i in range(self.count)]

    def _prompt_of(self, prompt: str | list[int]) -> tuple[list[int], str]:
        most = len(self.service.chat.tokenizer)
        if not isinstance(prompt, str) and any(token >= most for token in prompt):
            raise ApiError(f"token ids are below {most}", code="invalid_value", param="prompt")
        ids, text = self.session.text_prompt(prompt)
        self.service.check_length(len(ids))
        return ids, text

    async def answer(self) -> CompletionResponse:
        """See CompletionHandler."""
        await self._finish()
        return CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.service.name,
            choices=[
                CompletionChoice.model_validate(self._choice(choice, choice.text.shown)) for choice in self.choices
            ],
            usage=self._usage(),
        )

    async def _pieces(self) -> AsyncGenerator[dict[str, Any], None]:
        began: set[int] = set()
        async with aclosing(self._changes()) as changes:
            async for choice, text in changes:
                found = self._choice(choice, text, first=choice.index not in began)
                began.add(choice.index)
                yield self._frame([found])

    def _ended(self, choice: TextChoiceState, completion: Completion) -> str:
        self._record(choice, completion)
        return choice.text.finish(completion.text)

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
    """The prompts of a request. Raises ApiError where there are too many, or none."""
    prompt: Any = body.prompt
    single = isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], int))
    found: list[str | list[int]] = [prompt] if single else list(prompt)
    if not 1 <= len(found) <= MAX_PROMPTS:
        raise ApiError(f"send 1 to {MAX_PROMPTS} prompts", code="invalid_value", param="prompt")
    return found
