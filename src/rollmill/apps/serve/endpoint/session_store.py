"""The open sessions of an endpoint. Each belongs to the client that opened it: others neither see nor change it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Protocol

from rollmill.apps.serve.endpoint.middleware import Caller, EndpointMetrics
from rollmill.apps.serve.endpoint.protocol import ApiError
from rollmill.apps.serve.endpoint.session import EndpointSession, FinishedSession, SessionSink
from rollmill.apps.serve.endpoint.session_journal import SessionJournal
from rollmill.rollout.recorder import DecodeTokens
from rollmill.rollout.runner import apply_repetition_penalty
from rollmill.types import StopReason


class MakeSession(Protocol):
    """Creates a session."""

    def __call__(self, id: str, *, owner: str) -> EndpointSession:
        """Create the session `id` of a client."""


class SessionStore:
    """Sessions by client and name, bounded in number, tokens and age; dropped ones are counted.

    Args:
        make: creates a session; None: only added sessions exist.
        most: maximum number; beyond it the least recently used one of the client with the most is dropped.
        most_tokens: maximum tokens of all, prompts and completions; likewise.
        idle_s: seconds after which an unused one is dropped.
        journal: names of open sessions that another process has lost.
    """

    def __init__(
        self,
        gauges: EndpointMetrics,
        make: MakeSession | None,
        *,
        most: int = 2000,
        most_tokens: float = float("inf"),
        idle_s: float = 3600.0,
        journal: SessionJournal | None = None,
    ) -> None:
        self._make, self._gauges, self._journal = make, gauges, journal
        self._most, self._most_tokens, self._idle_s = most, most_tokens, idle_s
        self._held: OrderedDict[tuple[str, str], EndpointSession] = OrderedDict()  # least recently used first
        self._by_answer: dict[str, tuple[str, str]] = {}
        self._start, self._count = secrets.token_hex(4), 0

    def __len__(self) -> int:
        return len(self._held)

    def of(self, caller: Caller) -> EndpointSession:
        """The session that a caller names, or a new one. Raises ApiError if there is none and none is created."""
        self._drop_old()
        key = (caller.client, caller.session or "")
        if key not in self._held:
            self._require_kept(key)
            if self._make is None:
                raise ApiError(f"there is no session {key[1]}; it has ended", 404, code="session_not_found")
            self.add(self._make(key[1], owner=key[0]))
            if self._journal is not None:
                self._journal.opened(key)
        return self._used(self._held[key])

    def add(self, session: EndpointSession) -> None:
        self._held[_key(session)] = session
        self._gauges.sessions.set(len(self._held))

    def released(self, session: EndpointSession) -> None:
        """Handle the end of a call: drop a session without recorded calls, and others beyond the limits."""
        if _key(session) not in self._held or session.busy or self._make is None:
            return
        if not session.recorder.calls:
            self.remove(session)
            return
        self._used(session)
        self._drop_old()
        while len(self._held) > self._most and self._drop_of_heaviest(session, "number"):
            pass
        while sum(each.tokens for each in self._held.values()) > self._most_tokens:
            if not self._drop_of_heaviest(session, "tokens"):
                break

    def answered(self, session: EndpointSession, answer: str) -> None:
        """Record the id of a response."""
        if not session.closed and answer not in self._by_answer:
            session.answers.append(answer)
            self._by_answer[answer] = _key(session)

    def find(self, client: str, *, name: str | None = None, answer: str | None = None) -> EndpointSession:
        """Find a client's session by its name or by the id of one of its responses.

        Raises ApiError, the same one for a session of another client as for one that does not exist.
        """
        if (name is None) == (answer is None):
            text = "name either a `session` or a `completion`"
            raise ApiError(text, code="invalid_value", param="session")
        self._drop_old()
        wanted = (client, name) if name is not None else self._by_answer.get(answer or "")
        if wanted is not None and wanted not in self._held:
            self._require_kept(wanted)
        if wanted is None or wanted[0] != client or wanted not in self._held:
            what = f"session {name!r}" if answer is None else f"completion {answer[:100]!r}"
            text = f"{what} is not held: you never asked for it, or it was committed or dropped before"
            raise ApiError(text, 404, code="session_not_found")
        return self._used(self._held[wanted])

    def rewarded(self, client: str) -> list[EndpointSession]:
        """Sessions of a client that have a reward and no running call."""
        own = [each for each in self._held.values() if each.owner == client]
        return [each for each in own if each.parts and each.recorder.calls and not each.busy]

    def remove(self, session: EndpointSession) -> None:
        """Remove a session; it takes no more calls."""
        session.closed = True
        if self._held.pop(_key(session), None) is not None and self._journal is not None:
            self._journal.closed(_key(session))
        for answer in session.answers:
            self._by_answer.pop(answer, None)
        self._gauges.sessions.set(len(self._held))

    async def commit(self, sessions: Sequence[EndpointSession], sink: SessionSink, decode: DecodeTokens) -> int:
        """Hand sessions over, all or none; return the number of experiences. Raises ApiError if one cannot be.

        Other requests are answered between two sessions. Those that the sink fails to take are held again.
        """
        for session in sessions:
            if session.busy:
                text = f"session {session.id} is being answered; commit it afterwards"
                raise ApiError(text, 409, code="session_busy")
            if not session.recorder.calls:
                text = f"session {session.id} has recorded no completion; there is nothing to commit"
                raise ApiError(text, 409, code="session_empty")
            sink.check(session)
        left = list(sessions)
        for session in sessions:
            self.remove(session)
        try:
            return await self._hand_over(left, sink, decode)
        finally:
            for session in left:
                self._restore(session)

    async def _hand_over(self, left: list[EndpointSession], sink: SessionSink, decode: DecodeTokens) -> int:
        count = 0
        while left:
            finished = self._finished(left[0], decode)
            if dropped := sink.take(finished):
                self._gauges.dropped.labels("unmatched").inc(dropped)
            del left[0]
            count += len(finished.experiences)
            self._gauges.committed.inc()
            self._gauges.experiences.inc(len(finished.experiences))
            await asyncio.sleep(0)
        return count

    def _restore(self, session: EndpointSession) -> None:
        if _key(session) in self._held:
            self._gauges.dropped.labels("replaced").inc()  # its client has begun another one of that name
            return
        session.closed = False
        self.add(session)
        if self._journal is not None and session.id not in session.answers:  # it has a name
            self._journal.opened(_key(session))
        self._by_answer |= dict.fromkeys(session.answers, _key(session))

    def _finished(self, session: EndpointSession, decode: DecodeTokens) -> FinishedSession:
        id, self._count = f"{self._start}-{self._count:06d}", self._count + 1
        calls = session.recorder.calls
        made = session.recorder.experiences(id=id, task_id=session.id, group=id, decode=decode)
        for experience in made:
            experience.reward, experience.reward_parts = session.reward, dict(session.parts)
            experience.info |= {"session": session.id, "client": session.owner}
            if len(made) > 1:
                experience.step_reward = (session.reward or 0.0) if experience is made[-1] else 0.0
        repeated = any(call.learned and call.completion.stop_reason is StopReason.REPETITION for call in calls)
        apply_repetition_penalty(made, session.sampling, repeated)
        seen = [image.sha256 for turn in calls[0].turns or () for image in turn.images]
        return FinishedSession(id, "\n".join([calls[0].prompt, *seen]), made)

    def _require_kept(self, key: tuple[str, str]) -> None:
        """Raise ApiError if a session was open when the server was started again."""
        if self._journal is not None and self._journal.was_lost(key):
            text = f"the server was started again, and has lost the calls of session {key[1]!r}; begin it again"
            raise ApiError(text, 410, code="session_lost")

    def _drop_old(self) -> None:
        limit = time.monotonic() - self._idle_s
        for session in list(self._held.values()):
            if session.used_at > limit:
                break  # later ones were used more recently
            if not session.busy:
                self._drop(session, "age")

    def _drop_of_heaviest(self, kept: EndpointSession, why: str) -> bool:
        """Drop a session of the client with the most, so that no client can push out those of others."""
        share = Counter[str]()
        for each in self._held.values():
            share[each.owner] += 1 if why == "number" else each.tokens
        for owner, _ in share.most_common():
            for each in self._held.values():
                if each.owner == owner and not each.busy and each is not kept:
                    self._drop(each, why)
                    return True
        return False

    def _used(self, session: EndpointSession) -> EndpointSession:
        session.used_at = time.monotonic()
        self._held.move_to_end(_key(session))
        return session

    def _drop(self, session: EndpointSession, why: str) -> None:
        self.remove(session)
        self._gauges.dropped.labels(why).inc()


def _key(session: EndpointSession) -> tuple[str, str]:
    return session.owner, session.id
