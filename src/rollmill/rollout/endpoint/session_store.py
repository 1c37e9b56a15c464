"""The sessions that are held: bounded in number, tokens and age. Whatever is dropped is counted."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rollmill.rollout.endpoint.api_errors import ApiError
from rollmill.rollout.endpoint.session import EndpointSession
from rollmill.rollout.recorder import DecodeTokens
from rollmill.rollout.runner import apply_repetition_penalty
from rollmill.types import Experience, StopReason

if TYPE_CHECKING:
    from rollmill.rollout.endpoint.metrics import EndpointMetrics


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
