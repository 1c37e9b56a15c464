"""What one client says and is told: calls are recorded, and go on from the policy's own tokens."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rollmill.config.rollout import SamplingConfig
from rollmill.errors import EngineError
from rollmill.rollout.chat import ChatPrompt, ChatRenderer, RecordedReply
from rollmill.rollout.endpoint.messages import check_text, normalize_messages, template_error
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

if TYPE_CHECKING:
    from rollmill.rollout.endpoint.metrics import EndpointMetrics


MIN_TEMPERATURE = 0.01
_SAMPLED = ("temperature", "top_p", "top_k", "min_p")


class EndpointSession:
    """One client's calls.

    Args:
        sampling: how completions are sampled, unless a request says otherwise.
        recorder: takes down every call.
        seed: what the randomness of all calls derives from, besides their number; None: every request's own seed.
        index: of the completions that are recorded.
        forced: temperature and truncation are those of `sampling`, whatever requests say.
        most_tokens: prompts and completions together; beyond them the session takes no more calls.

    Attributes:
        parts: the rewards that were given, by name.
        tokens: that were recorded, prompts and completions together.
        busy: calls under way; `running` is what generates for them.
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
        self._said: list[RecordedReply] = []
        self._cut: list[tuple[str, list[int]]] = []  # texts that were cut off, with their tokens
        self.tokens, self._asked, self._most_tokens = 0, 0, most_tokens

    @property
    def reward(self) -> float | None:
        """The sum of the rewards that were given."""
        return sum(self.parts.values()) if self.parts else None

    @property
    def full(self) -> bool:
        """Whether it takes no more calls."""
        return self.tokens > self._most_tokens

    async def abort(self) -> None:
        """End the calls under way."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)

    def begin(self) -> int:
        """Note that a call begins; its number. Raises ApiError where the session takes none."""
        if self.closed:
            raise ApiError(f"session {self.id} has ended; begin another", 404, code="session_ended")
        if self.full:
            text = f"session {self.id} holds {self.tokens} tokens, at most {self._most_tokens:g} are kept"
            raise ApiError(f"{text}; commit it, and begin another", code="session_full")
        number, self._asked = self._asked, self._asked + 1
        return number

    def settings(self, body: BaseCompletionRequest, max_tokens: int | None) -> SamplingConfig:
        """How the completions of a request are sampled."""
        changes: dict[str, Any] = {} if self._forced else {name: getattr(body, name) for name in _SAMPLED}
        changes = {name: value for name, value in changes.items() if value is not None}
        if changes.get("top_k") == -1:
            changes["top_k"] = 0
        if 0 < changes.get("temperature", 0) < MIN_TEMPERATURE:
            text = f"a temperature below {MIN_TEMPERATURE} is not supported; give 0 for greedy decoding"
            raise ApiError(text, code="invalid_value", param="temperature")
        own = {key: getattr(self.sampling, key) for key in SamplingConfig.model_fields}
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        changes |= {} if stop is None else {"stop": stop}
        changes |= {} if body.stop_token_ids is None else {"stop_token_ids": body.stop_token_ids}
        changes |= {} if max_tokens is None else {"max_new_tokens": max_tokens}
        return SamplingConfig.model_validate(own | changes)

    def seed(self, number: int, asked: int | None, otherwise: int) -> int:
        """The seed of a call: the request's own, else `otherwise`; within a rollout it derives from the rollout's."""
        if self._seed is None:
            return (otherwise if asked is None else asked) % 2**64
        return derive_seed(self._seed, number) if asked is None else derive_seed(self._seed, number, asked)

    # -- chats -------------------------------------------------------------------------------------------------

    def chat_prompt(self, body: ChatCompletionRequest) -> ChatPrompt:
        """The tokens of a conversation. Raises ApiError where it is none, or the template refuses it."""
        try:
            messages, tools = self._seen(body.messages, body)
            check_text(json.dumps([messages, tools], ensure_ascii=False))
            return self._chat.prompt(messages, self._said, tools)
        except EngineError as error:
            raise template_error(error) from error
        except RecursionError:
            raise ApiError("the request is nested too deeply; send less", code="invalid_messages") from None

    def told(
        self, body: ChatCompletionRequest, answer: ChatMessageParam, prompt: ChatPrompt, completion: Completion
    ) -> None:
        """Remember what was answered, as the client knows it."""
        messages, tools = self._seen([*body.messages, answer], body)
        self._said.append(self._chat.said(messages, prompt, tools, completion))

    def read(self, body: ChatCompletionRequest, text: str, salt: str) -> tuple[str, list[Any]]:
        """Content and tool calls of a completion's text."""
        return split_tool_calls(text, salt=salt) if requested_tools(body) else (text, [])

    def _seen(
        self, messages: Sequence[ChatMessageParam], body: ChatCompletionRequest
    ) -> tuple[list[dict[str, Any]], Any]:
        return normalize_messages(messages), requested_tools(body)

    # -- texts -------------------------------------------------------------------------------------------------

    def text_prompt(self, prompt: str | Sequence[int]) -> tuple[list[int], str]:
        """Tokens and text of a prompt; one that begins with a text that was cut off goes on from its tokens."""
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
        """Take down a completion; one that comes after the end of the session is of no use any more."""
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
        """Note a reward; one of the same name is replaced. Raises ApiError where there are too many names."""
        parts = self.parts | (dict(reward) if isinstance(reward, Mapping) else {"feedback": reward})
        if len(parts) > MAX_REWARD_PARTS:
            text = f"a reward has at most {MAX_REWARD_PARTS} parts; use the same names again, or sum them up"
            raise ApiError(text, code="invalid_value", param="reward")
        self.parts = parts


def requested_tools(body: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    """The tools that a request offers, as templates take them."""
    if not body.tools or body.tool_choice == "none":
        return None
    try:
        return [tool.model_dump(mode="json", exclude_none=True) for tool in body.tools]
    except (ValueError, RecursionError) as error:
        text = "a tool is nested too deeply; describe its parameters with fewer levels"
        raise ApiError(text, code="invalid_value", param="tools") from error


def encode_whole_text(chat: ChatRenderer, text: str) -> list[int]:
    """Token ids of a text with what the tokenizer puts in front of it, but not behind."""
    ids: list[int] = chat.tokenizer.encode(text, add_special_tokens=True)
    if ids[-1:] == [chat.tokenizer.eos_token_id] and chat.encode(text)[-1:] != ids[-1:]:
        return ids[:-1]
    return ids


# The sessions that are held: bounded in number, tokens and age. Whatever is dropped is counted.


@dataclass(frozen=True, slots=True)
class FinishedSession:
    """A session that was handed over. `id`, that of its first experience, differs between all that ever were."""

    id: str
    prompt: str  #: of its first call, as text
    experiences: list[Experience]


class SessionSink(Protocol):
    """Where finished sessions go."""

    def check(self, session: EndpointSession) -> None:
        """Raises ApiError where a session cannot be taken."""

    def take(self, finished: FinishedSession) -> int:
        """Take a session; how many that were taken before are dropped, for they wait too long for others."""


class SessionStore:
    """Sessions by name.

    Args:
        make: a new session; None: sessions are only those that were added.
        most: how many are held; the one that was used longest ago makes room.
        most_tokens: how many tokens all of them have, prompts and completions of all calls; room is made likewise.
        idle_s: seconds after which one that is not used is dropped.
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
        self._held: OrderedDict[str, EndpointSession] = OrderedDict()  # the one that was used longest ago first
        self._by_answer: dict[str, str] = {}
        self._start, self._count = secrets.token_hex(4), 0

    def __len__(self) -> int:
        return len(self._held)

    def of(self, name: str) -> EndpointSession:
        """The session of that name, or a new one. Raises ApiError where there is none and none is made."""
        self._drop_old()
        if name not in self._held:
            if self._make is None:
                raise ApiError(f"there is no session {name}; it has ended", 404, code="session_not_found")
            self.add(self._make(name))
        return self._used(self._held[name])

    def add(self, session: EndpointSession) -> None:
        """Hold a session."""
        self._held[session.id] = session
        self._gauges.sessions.set(len(self._held))

    def released(self, session: EndpointSession) -> None:
        """A call of the session has ended. One of which nothing is recorded is not held, and others may make room."""
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
        """Note the id of an answer."""
        if not session.closed and answer not in self._by_answer:
            session.answers.append(answer)
            self._by_answer[answer] = session.id

    def find(self, *, name: str | None = None, answer: str | None = None) -> EndpointSession:
        """A session that is held, by its name or by the id of one of its answers. Raises ApiError."""
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
        """Sessions that have a reward and are not being answered."""
        return [each for each in self._held.values() if each.parts and each.recorder.calls and not each.busy]

    def remove(self, session: EndpointSession) -> None:
        """Forget a session; it takes no more calls."""
        session.closed = True
        self._held.pop(session.id, None)
        for answer in session.answers:
            self._by_answer.pop(answer, None)
        self._gauges.sessions.set(len(self._held))

    def commit(self, sessions: Sequence[EndpointSession], sink: SessionSink, decode: DecodeTokens) -> int:
        """Hand sessions over, all or none; the number of experiences. Raises ApiError where one cannot be."""
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
                break  # those behind it were used later
            if not session.busy:
                self._drop(session, "age")

    def _used(self, session: EndpointSession) -> EndpointSession:
        session.used_at = time.monotonic()
        self._held.move_to_end(session.id)
        return session

    def _drop(self, session: EndpointSession, why: str) -> None:
        self.remove(session)
        self._gauges.dropped.labels(why).inc()
