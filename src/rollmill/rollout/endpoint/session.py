"""Sessions of the endpoint: each records one client's calls, and continues from the policy's own tokens."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollmill.config.rollout import SamplingConfig
from rollmill.errors import EngineError
from rollmill.rollout.chat import ChatPrompt, ChatRenderer, RecordedReply
from rollmill.rollout.endpoint.messages import check_text, normalize_messages, template_error
from rollmill.rollout.endpoint.middleware import EndpointMetrics
from rollmill.rollout.endpoint.protocol import (
    MAX_REWARD_PARTS,
    ApiError,
    BaseCompletionRequest,
    ChatCompletionRequest,
    ChatMessageParam,
)
from rollmill.rollout.recorder import DecodeTokens, Recorder
from rollmill.rollout.runner import apply_repetition_penalty
from rollmill.rollout.tools.formats import split_tool_calls
from rollmill.seeds import derive_seed
from rollmill.types import Completion, Experience, StopReason

MIN_TEMPERATURE = 0.01
_SAMPLED = ("temperature", "top_p", "top_k", "min_p")


class EndpointSession:
    """One client's calls.

    Args:
        sampling: default sampling of completions.
        recorder: records every call.
        seed: seed of all calls, together with their number; None: every request has its own seed.
        index: index of the recorded completions.
        forced: temperature and truncation are those of `sampling`, whatever requests say.
        most_tokens: limit of prompts and completions together; beyond it the session takes no more calls.

    Attributes:
        parts: rewards by name.
        tokens: recorded tokens, prompts and completions together.
        busy: number of running calls; `running` has their generations.
        answers: ids of the completions.
    """

    def __init__(
        self,
        id: str,
        chat: ChatRenderer,
        sampling: SamplingConfig,
        *,
        recorder: Recorder | None = None,
        seed: int | None = None,
        index: int = 0,
        forced: bool = False,
        most_tokens: int = 1_000_000,
    ) -> None:
        self.id, self.sampling, self.recorder = id, sampling, recorder or Recorder()
        self.parts: dict[str, float] = {}
        self.answers: list[str] = []
        self.used_at, self.busy, self.closed = time.monotonic(), 0, False
        self.running: set[asyncio.Task[None]] = set()
        self._chat, self._seed, self._index, self._forced = chat, seed, index, forced
        self._replies: list[RecordedReply] = []
        self._cut: list[tuple[str, list[int]]] = []  # truncated texts, with their tokens
        self.tokens, self._num_calls, self._most_tokens = 0, 0, most_tokens

    @property
    def reward(self) -> float | None:
        """The sum of the rewards."""
        return sum(self.parts.values()) if self.parts else None

    @property
    def full(self) -> bool:
        """True if it takes no more calls."""
        return self.tokens > self._most_tokens

    async def abort(self) -> None:
        """Cancel all running calls."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)

    def begin(self) -> int:
        """Count a new call and return its number. Raises ApiError if the session takes none."""
        if self.closed:
            raise ApiError(f"session {self.id} has ended; begin another", 404, code="session_ended")
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

    def seed(self, number: int, requested: int | None, otherwise: int) -> int:
        """The seed of a call: the request's, else `otherwise`; within a rollout it derives from the rollout's."""
        if self._seed is None:
            return (otherwise if requested is None else requested) % 2**64
        return derive_seed(self._seed, number) if requested is None else derive_seed(self._seed, number, requested)

    # -- chats -------------------------------------------------------------------------------------------------

    def chat_prompt(self, body: ChatCompletionRequest) -> ChatPrompt:
        """Tokenize a conversation. Raises ApiError if it is invalid, or the template refuses it."""
        try:
            messages, tools = self._seen(body.messages, body)
            check_text(json.dumps([messages, tools], ensure_ascii=False))
            return self._chat.prompt(messages, self._replies, tools)
        except EngineError as error:
            raise template_error(error) from error
        except RecursionError:
            raise ApiError("the request is nested too deeply; send less", code="invalid_messages") from None

    def told(
        self, body: ChatCompletionRequest, answer: ChatMessageParam, prompt: ChatPrompt, completion: Completion
    ) -> None:
        """Remember an answer as the client sees it."""
        messages, tools = self._seen([*body.messages, answer], body)
        self._replies.append(self._chat.record_reply(messages, prompt, tools, completion))

    def read(self, body: ChatCompletionRequest, text: str, salt: str) -> tuple[str, list[Any]]:
        """Split a completion's text into content and tool calls."""
        return split_tool_calls(text, salt=salt) if requested_tools(body) else (text, [])

    def _seen(
        self, messages: Sequence[ChatMessageParam], body: ChatCompletionRequest
    ) -> tuple[list[dict[str, Any]], Any]:
        return normalize_messages(messages), requested_tools(body)

    # -- texts -------------------------------------------------------------------------------------------------

    def text_prompt(self, prompt: str | Sequence[int]) -> tuple[list[int], str]:
        """Tokens and text of a prompt; one that begins with a truncated text continues its tokens."""
        if not isinstance(prompt, str):
            return list(prompt), self._chat.decode(prompt)
        check_text(prompt)
        known = [each for each in self._cut if prompt.startswith(each[0])]
        if known:
            text, ids = max(known, key=lambda each: len(each[0]))
            return [*ids, *self._chat.encode(prompt[len(text) :])], prompt
        return encode_whole_text(self._chat, prompt), prompt

    # -- recording ---------------------------------------------------------------------------------------------

    def record(self, completion: Completion, prompt: str, sampling: SamplingConfig) -> None:
        """Record a completion; ignored after the end of the session."""
        if self.closed:
            return
        completion.index = self._index
        greedy = sampling.temperature == 0 < self.sampling.temperature
        self.recorder.add(completion, prompt, sampling.temperature, learned=not greedy)
        self.tokens += len(completion.prompt_ids) + len(completion.token_ids)
        if completion.stop_reason is StopReason.LENGTH:
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
    prompt: str  #: of its first call, as text
    experiences: list[Experience]


class SessionSink(Protocol):
    """Receiver of finished sessions."""

    def check(self, session: EndpointSession) -> None:
        """Raise ApiError if a session cannot be taken."""

    def take(self, finished: FinishedSession) -> int:
        """Take a session; return how many earlier ones are dropped because they waited too long for others."""


class SessionStore:
    """Sessions by name, bounded in number, tokens and age; dropped ones are counted.

    Args:
        make: creates a session; None: only added sessions exist.
        most: maximum number; beyond it the least recently used is dropped.
        most_tokens: maximum tokens of all, prompts and completions; likewise.
        idle_s: seconds after which an unused one is dropped.
    """

    def __init__(
        self,
        gauges: EndpointMetrics,
        make: Callable[[str], EndpointSession] | None,
        *,
        most: int = 2000,
        most_tokens: float = float("inf"),
        idle_s: float = 3600.0,
    ) -> None:
        self._make, self._gauges = make, gauges
        self._most, self._most_tokens, self._idle_s = most, most_tokens, idle_s
        self._held: OrderedDict[str, EndpointSession] = OrderedDict()  # least recently used first
        self._by_answer: dict[str, str] = {}
        self._start, self._count = secrets.token_hex(4), 0

    def __len__(self) -> int:
        return len(self._held)

    def of(self, name: str) -> EndpointSession:
        """The session of that name, or a new one. Raises ApiError if there is none and none is created."""
        self._drop_old()
        if name not in self._held:
            if self._make is None:
                raise ApiError(f"there is no session {name}; it has ended", 404, code="session_not_found")
            self.add(self._make(name))
        return self._used(self._held[name])

    def add(self, session: EndpointSession) -> None:
        """Add a session."""
        self._held[session.id] = session
        self._gauges.sessions.set(len(self._held))

    def released(self, session: EndpointSession) -> None:
        """Handle the end of a call: drop a session without recorded calls, and others beyond the limits."""
        if session.id not in self._held or session.busy or self._make is None:
            return
        if not session.recorder.calls:
            self.remove(session)
            return
        self._used(session)
        self._drop_old()
        tokens = sum(each.tokens for each in self._held.values())
        for each in [each for each in self._held.values() if not each.busy and each is not session]:
            if len(self._held) <= self._most and tokens <= self._most_tokens:
                break
            self._drop(each, "number" if len(self._held) > self._most else "tokens")
            tokens -= each.tokens

    def answered(self, session: EndpointSession, answer: str) -> None:
        """Record the id of a response."""
        if not session.closed and answer not in self._by_answer:
            session.answers.append(answer)
            self._by_answer[answer] = session.id

    def find(self, *, name: str | None = None, answer: str | None = None) -> EndpointSession:
        """Find a session by its name or by the id of one of its responses. Raises ApiError."""
        if (name is None) == (answer is None):
            text = "name either a `session` or a `completion`"
            raise ApiError(text, code="invalid_value", param="session")
        self._drop_old()
        wanted = name or self._by_answer.get(answer or "", "")
        if wanted not in self._held:
            what = f"session {name!r}" if answer is None else f"completion {answer[:100]!r}"
            text = f"{what} is not held: it was never asked for, or was committed or dropped before"
            raise ApiError(text, 404, code="session_not_found")
        return self._used(self._held[wanted])

    def rewarded(self) -> list[EndpointSession]:
        """Sessions that have a reward and no running call."""
        return [each for each in self._held.values() if each.parts and each.recorder.calls and not each.busy]

    def remove(self, session: EndpointSession) -> None:
        """Remove a session; it takes no more calls."""
        session.closed = True
        self._held.pop(session.id, None)
        for answer in session.answers:
            self._by_answer.pop(answer, None)
        self._gauges.sessions.set(len(self._held))

    def commit(self, sessions: Sequence[EndpointSession], sink: SessionSink, decode: DecodeTokens) -> int:
        """Hand sessions over, all or none; return the number of experiences. Raises ApiError if one cannot be."""
        for session in sessions:
            if session.busy:
                text = f"session {session.id} is being answered; commit it afterwards"
                raise ApiError(text, 409, code="session_busy")
            if not session.recorder.calls:
                text = f"session {session.id} has recorded no completion; there is nothing to commit"
                raise ApiError(text, 409, code="session_empty")
            sink.check(session)
        count = 0
        for session in sessions:
            finished = self._finished(session, decode)
            if dropped := sink.take(finished):
                self._gauges.dropped.labels("unmatched").inc(dropped)
            self.remove(session)
            count += len(finished.experiences)
        self._gauges.committed.inc(len(sessions))
        self._gauges.experiences.inc(count)
        return count

    def _finished(self, session: EndpointSession, decode: DecodeTokens) -> FinishedSession:
        id, self._count = f"{self._start}-{self._count:06d}", self._count + 1
        calls = session.recorder.calls
        made = session.recorder.experiences(id=id, task_id=session.id, group=id, decode=decode)
        for experience in made:
            experience.reward, experience.reward_parts = session.reward, dict(session.parts)
            experience.info["session"] = session.id
            if len(made) > 1:
                experience.info["step_reward"] = (session.reward or 0.0) if experience is made[-1] else 0.0
        repeated = any(call.learned and call.completion.stop_reason is StopReason.REPETITION for call in calls)
        apply_repetition_penalty(made, session.sampling, repeated)
        return FinishedSession(id, calls[0].prompt, made)

    def _drop_old(self) -> None:
        limit = time.monotonic() - self._idle_s
        for session in list(self._held.values()):
            if session.used_at > limit:
                break  # later ones were used more recently
            if not session.busy:
                self._drop(session, "age")

    def _used(self, session: EndpointSession) -> EndpointSession:
        session.used_at = time.monotonic()
        self._held.move_to_end(session.id)
        return session

    def _drop(self, session: EndpointSession, why: str) -> None:
        self.remove(session)
        self._gauges.dropped.labels(why).inc()
