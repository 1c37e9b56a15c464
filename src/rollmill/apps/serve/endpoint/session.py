"""Sessions of the endpoint: each records one client's calls, and continues from the policy's own tokens."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rollmill.apps.serve.endpoint.messages import check_text, normalize_messages, template_error
from rollmill.apps.serve.endpoint.pictures import PictureReader
from rollmill.apps.serve.endpoint.protocol import (
    MAX_REWARD_PARTS,
    ApiError,
    BaseCompletionRequest,
    ChatCompletionRequest,
    ChatMessageParam,
)
from rollmill.apps.serve.endpoint.reply_stream import ReplyStream, opens_reasoning, reply_marks
from rollmill.apps.serve.endpoint.switches import template_switches
from rollmill.config.rollout import SamplingConfig
from rollmill.data.picture_turns import PictureTurn
from rollmill.data.renderer import Renderer, Switches
from rollmill.engines.base import TokenPenalties
from rollmill.errors import EngineError
from rollmill.rollout.chat import ChatPrompt, ChatRenderer, RecordedReply
from rollmill.rollout.recorder import Recorder
from rollmill.seeds import derive_seed
from rollmill.types import Completion, Experience, ParsedReply, StopReason

MIN_TEMPERATURE = 0.01
_SAMPLED = ("temperature", "top_p", "top_k", "min_p")


MOST_RESPONSES, MOST_RESPONSE_BYTES = 1000, 1 << 20
"""Responses that a session holds, and the size of their bodies."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that its client may ask for again, or continue."""

    conversation: tuple[ChatMessageParam, ...]  #: with the response as the last message
    body: bytes  #: as JSON, without log-probs


class EndpointSession:
    """One client's calls.

    Args:
        sampling: default sampling of completions.
        owner: name of the client that opened it.
        recorder: records every call.
        seed: seed of all calls, together with their number; None: every request has its own seed.
        index: index of the recorded completions.
        forced: temperature and truncation are those of `sampling`, without penalties, whatever requests say.
        most_tokens: limit of prompts and completions together; beyond it the session takes no more calls.
        switches: variables of the chat template, unless a request sets them.

    Attributes:
        parts: rewards by name.
        tokens: recorded tokens, prompts and completions together.
        busy: number of running calls; `running` has their generations.
        answers: ids of the completions.
        responses: the newest responses that a client may ask for again, or continue, by id.
    """

    def __init__(
        self,
        id: str,
        chat: ChatRenderer,
        sampling: SamplingConfig,
        *,
        owner: str = "",
        recorder: Recorder | None = None,
        seed: int | None = None,
        index: int = 0,
        forced: bool = False,
        most_tokens: int = 1_000_000,
        switches: Switches | None = None,
    ) -> None:
        self.id, self.owner, self.sampling, self.recorder = id, owner, sampling, recorder or Recorder()
        self.parts: dict[str, float] = {}
        self.answers: list[str] = []
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.used_at, self.busy, self.closed = time.monotonic(), 0, False
        self.running: set[asyncio.Task[None]] = set()
        self._chat, self._seed, self._index, self._forced = chat, seed, index, forced
        self._replies: list[RecordedReply] = []
        self._switches = dict(switches or {})
        self._cut: list[tuple[str, list[int]]] = []  # truncated texts, with their tokens
        self.tokens, self._num_calls, self._most_tokens = 0, 0, most_tokens

    def keep_response(self, id: str, response: StoredResponse) -> None:
        """Hold a response; the oldest ones are given up if there are too many, or they are too large."""
        self.responses[id] = response
        size = sum(len(each.body) for each in self.responses.values())
        while len(self.responses) > 1 and (len(self.responses) > MOST_RESPONSES or size > MOST_RESPONSE_BYTES):
            size -= len(self.responses.popitem(last=False)[1].body)

    @property
    def reward(self) -> float | None:
        """The sum of the rewards."""
        return sum(self.parts.values()) if self.parts else None

    @property
    def full(self) -> bool:
        """True if it takes no more calls."""
        return self.tokens > self._most_tokens

    async def abort(self) -> None:
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)

    def check_open(self) -> None:
        """Raise ApiError if the session has ended."""
        if self.closed:
            raise ApiError(f"session {self.id} has ended; begin another", 404, code="session_ended")

    def begin(self) -> int:
        """Count a new call and return its number. Raises ApiError if the session takes none."""
        self.check_open()
        if self.full:
            text = f"session {self.id} holds {self.tokens} tokens, at most {self._most_tokens:g} are kept"
            raise ApiError(f"{text}; commit it, and begin another", code="session_full")
        number, self._num_calls = self._num_calls, self._num_calls + 1
        return number

    def settings(self, body: BaseCompletionRequest, max_tokens: int | None) -> SamplingConfig:
        """The sampling configuration of a request."""
        changes: dict[str, Any] = {} if self._forced else {name: getattr(body, name) for name in _SAMPLED}
        changes = {name: value for name, value in changes.items() if value is not None}
        if changes.get("top_k") == -1:
            changes["top_k"] = 0
        if 0 < changes.get("temperature", 0) < MIN_TEMPERATURE:
            text = f"a temperature below {MIN_TEMPERATURE} is not supported; give 0 for greedy decoding"
            raise ApiError(text, code="invalid_value", param="temperature")
        defaults = {key: getattr(self.sampling, key) for key in SamplingConfig.model_fields}
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        changes |= {} if stop is None else {"stop": stop}
        changes |= {} if body.stop_token_ids is None else {"stop_token_ids": body.stop_token_ids}
        changes |= {} if max_tokens is None else {"max_new_tokens": max_tokens}
        return SamplingConfig.model_validate(defaults | changes)

    def penalties(self, body: BaseCompletionRequest) -> TokenPenalties:
        """The penalties and biases of a request; none where it cannot change the sampling. Raises ApiError for a bias
        of a token that does not exist."""
        if self._forced:
            return TokenPenalties()
        most, bias = len(self._chat.tokenizer), dict[int, float]()
        for key, value in (body.logit_bias or {}).items():
            if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < most):
                raise ApiError(f"keys are token ids below {most}", code="invalid_value", param="logit_bias")
            bias[int(key)] = value
        return TokenPenalties(
            presence=body.presence_penalty or 0.0,
            frequency=body.frequency_penalty or 0.0,
            repetition=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            bias=bias,
        )

    def seed(self, number: int, requested: int | None, otherwise: int) -> int:
        """The seed of a call: the request's, else `otherwise`; within a rollout it derives from the rollout's."""
        if self._seed is None:
            return (otherwise if requested is None else requested) % 2**64
        return derive_seed(self._seed, number) if requested is None else derive_seed(self._seed, number, requested)

    # -- chats -------------------------------------------------------------------------------------------------

    def chat_prompt(self, body: ChatCompletionRequest, check: Callable[[str], None] | None = None) -> ChatPrompt:
        """Tokenize a conversation. Raises ApiError if it is invalid, or the template refuses it.

        Args:
            check: raises for a text that is too long to be tokenized.
        """
        try:
            messages, tools = self._seen(body.messages, body)
            check_text(json.dumps([messages, tools], ensure_ascii=False))
            return self._chat.prompt(messages, self._replies, tools, switches=self.switches(body), check=check)
        except EngineError as error:
            raise template_error(error) from error
        except RecursionError:
            raise ApiError("the request is nested too deeply; send less", code="invalid_messages") from None

    def told(
        self, body: ChatCompletionRequest, answer: ChatMessageParam, prompt: ChatPrompt, completion: Completion
    ) -> None:
        """Remember an answer as the client sees it."""
        assert completion.reply is not None
        messages, tools = self._seen([*body.messages, answer], body)
        self._replies.append(self._chat.record_reply(messages, prompt, tools, completion, completion.reply))

    def parse(self, body: ChatCompletionRequest, prompt: ChatPrompt, completion: Completion, salt: str) -> ParsedReply:
        """Take a completion apart: reasoning, content and tool calls."""
        reply = self._chat.parse(prompt, completion, requested_tools(body), switches=self.switches(body), salt=salt)
        if body.parallel_tool_calls is False:
            reply = replace(reply, tool_calls=reply.tool_calls[:1])
        completion.reply = reply
        return reply

    def switches(self, body: ChatCompletionRequest) -> dict[str, Any]:
        """The variables of the chat template for a request. Raises EngineError without a template, and ApiError for
        a wrong one."""
        return template_switches(body, self._switches, self._chat.renderer())

    def stream(self, body: ChatCompletionRequest, prompt: ChatPrompt, stops: Sequence[str]) -> ReplyStream:
        """Create what shows the policy's turn while it is sampled."""
        renderer, tools = self.renderer(body), requested_tools(body) is not None
        opened = opens_reasoning(renderer, prompt.token_ids)
        return ReplyStream(self._chat.tokenizer, stops, reply_marks(renderer, tools), opened=opened, tools=tools)

    def renderer(self, body: ChatCompletionRequest) -> Renderer:
        """The model's renderer with the variables of a request. Raises like `switches`."""
        return self._chat.renderer(switches=self.switches(body))

    def _seen(
        self, messages: Sequence[ChatMessageParam], body: ChatCompletionRequest
    ) -> tuple[list[dict[str, Any]], Any]:
        return normalize_messages(messages, PictureReader(self._chat.sees, self._chat.folder)), requested_tools(body)

    # -- texts -------------------------------------------------------------------------------------------------

    def text_prompt(self, prompt: str | Sequence[int]) -> tuple[list[int], str]:
        """Tokens and text of a prompt; one that begins with a truncated text continues its tokens."""
        if not isinstance(prompt, str):
            return self._unseen(list(prompt)), self._chat.decode(prompt)
        check_text(prompt)
        known = [each for each in self._cut if prompt.startswith(each[0])]
        if known:
            text, ids = max(known, key=lambda each: len(each[0]))
            return self._unseen([*ids, *self._chat.encode(prompt[len(text) :])]), prompt
        return self._unseen(encode_whole_text(self._chat, prompt)), prompt

    def _unseen(self, ids: list[int]) -> list[int]:
        """The tokens. Raises ApiError if there are places for pictures among them, which a text has not, or the model
        needs pictures."""
        if self._chat.single_prompt:
            text = "the model reads prompts with pictures only; use /v1/chat/completions"
            raise ApiError(text, code="unsupported_content", param="prompt")
        if self._chat.picture_token is not None and self._chat.picture_token in ids:
            text = "a text has no pictures, and this one has the model's token for them; use /v1/chat/completions"
            raise ApiError(text, code="unsupported_content", param="prompt")
        return ids

    # -- recording ---------------------------------------------------------------------------------------------

    def record(
        self, completion: Completion, prompt: str, sampling: SamplingConfig, turns: tuple[PictureTurn, ...] = ()
    ) -> None:
        """Record a completion; ignored after the end of the session. `turns` are the pieces with pictures before it."""
        if self.closed:
            return
        completion.index = self._index
        greedy = sampling.temperature == 0 < self.sampling.temperature
        seen = turns if self._chat.sees else None
        self.recorder.add(completion, prompt, sampling.temperature, learned=not greedy, turns=seen)
        self.tokens += len(completion.prompt_ids) + len(completion.token_ids)
        if completion.stop_reason is StopReason.LENGTH and not turns:
            ids = [*completion.prompt_ids.tolist(), *completion.token_ids.tolist()]
            self._cut.append((prompt + completion.text, ids))

    def rewarded(self, reward: float | Mapping[str, float]) -> None:
        """Set a reward; one of the same name is replaced. Raises ApiError for too many names."""
        parts = self.parts | (dict(reward) if isinstance(reward, Mapping) else {"feedback": reward})
        if len(parts) > MAX_REWARD_PARTS:
            text = f"a reward has at most {MAX_REWARD_PARTS} parts; use the same names again, or sum them up"
            raise ApiError(text, code="invalid_value", param="reward")
        self.parts = parts


def requested_tools(body: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    """The tools of a request, in the format of chat templates."""
    if not body.tools or body.tool_choice == "none":
        return None
    try:
        return [tool.model_dump(mode="json", exclude_none=True) for tool in body.tools]
    except (ValueError, RecursionError) as error:
        text = "a tool is nested too deeply; describe its parameters with fewer levels"
        raise ApiError(text, code="invalid_value", param="tools") from error


def encode_whole_text(chat: ChatRenderer, text: str) -> list[int]:
    """Tokenize a text with the special tokens that the tokenizer puts before it, but not after."""
    ids: list[int] = chat.tokenizer.encode(text, add_special_tokens=True)
    if ids[-1:] == [chat.tokenizer.eos_token_id] and chat.encode(text)[-1:] != ids[-1:]:
        return ids[:-1]
    return ids


@dataclass(frozen=True, slots=True)
class FinishedSession:
    """A session that was handed over. `id`, that of its first experience, is unique across all runs."""

    id: str
    prompt: str  #: of its first call, as text, with the hashes of its pictures
    experiences: list[Experience]


class SessionSink(Protocol):
    """Receiver of finished sessions."""

    def check(self, session: EndpointSession) -> None:
        """Raise ApiError if a session cannot be taken."""

    def take(self, finished: FinishedSession) -> int:
        """Take a session; return how many earlier ones are dropped because they waited too long for others."""
