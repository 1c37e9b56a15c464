"""The chat model protocol: messages in, replies out. Implemented by an endpoint and the native engine."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rollmill.concurrency import EventLoopThread
from rollmill.errors import ConfigError, RewardError
from rollmill.files import lock_holder

ChatMessage = dict[str, Any]
"""`role` and `content`: text, or a list of parts as OpenAI's chat API has them."""

STOP, LENGTH = "stop", "length"
TOO_LONG, REFUSED, UNPARSABLE = "too_long", "refused", "unparsable"
TOO_LONG_ADVICE = "shorten the prompt or `rubric`, lower max_tokens, or take a judge with a longer context"
"""Advice if a prompt is too long."""


@dataclass(frozen=True, slots=True)
class ChatSamplingParams:
    """Sampling parameters of replies. `schema` is a JSON schema for the server to enforce."""

    temperature: float
    max_tokens: int
    seed: int
    schema: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ChatModelReply:
    """One reply. `finish` is "stop" if the model ended it by itself; tokens are 0 if the server does not count them."""

    text: str
    finish: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retries: int = 0
    cached: bool = False


class NoReplyError(Exception):
    """These messages get no reply, perhaps because of their content. `outcome`: too_long, refused or timeout.

    `advice` tells how to fix it if the response is not the cause; empty if it is.
    """

    def __init__(self, outcome: str, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.outcome, self.advice = outcome, advice


class ChatModel(Protocol):
    """A model that replies to chat messages."""

    loop: EventLoopThread
    """The event loop in which `chat` is called."""
    identity: str
    """Distinguishes this model from others in a cache."""

    async def chat(
        self, messages: Sequence[ChatMessage], sampling: ChatSamplingParams, indices: Sequence[int]
    ) -> list[ChatModelReply]:
        """Return one reply per index. A sample depends on messages, sampling and its index, not on the other indices.

        Raises:
            NoReplyError: these messages get no reply, though others do.
            RewardError: no request gets one, or the model cannot be called this way.
        """
        ...


# Cache of judge replies on disk: one SQLite file, shared by any number of processes.

BUSY_TIMEOUT_S = 30.0
"""Longest wait for another process that writes."""
_PAUSE_S = 0.01


class ChatReplyStore:
    """Keys and replies in a file. The first reply of a key is kept. Raises ConfigError if the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None
            )
            self._execute("PRAGMA journal_mode=WAL")
            self._execute("PRAGMA synchronous=NORMAL")
            self._execute(
                "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, text TEXT NOT NULL, finish TEXT NOT NULL) "
                "WITHOUT ROWID"
            )
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"rewards: cache {path} cannot be used: {error}; name another file") from error

    def get(self, key: str) -> ChatModelReply | None:
        """Return the reply stored under a key."""
        row = self._execute("SELECT text, finish FROM replies WHERE key = ?", key)
        return None if row is None else ChatModelReply(row[0], row[1], cached=True)

    def put(self, key: str, reply: ChatModelReply) -> None:
        """Store a reply, unless another process was first."""
        self._execute("INSERT OR IGNORE INTO replies VALUES (?, ?, ?)", key, reply.text, reply.finish)

    def close(self) -> None:
        """Close the file. May be called twice."""
        with self._lock:
            self._connection.close()

    def _execute(self, statement: str, *values: str) -> Any:
        """Return the first row. SQLite itself waits for other writers, but not to change a file's journal mode."""
        started = time.monotonic()
        while True:
            try:
                with self._lock:
                    return self._connection.execute(statement, values).fetchone()
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not busy:
                    raise
                if time.monotonic() - started > BUSY_TIMEOUT_S:
                    holder = lock_holder(self._path, Path(f"{self._path}-shm"))
                    text = f"cache {self._path} was locked for {BUSY_TIMEOUT_S:.0f} s by {holder}"
                    raise RewardError(f"{text}; let that go on, or end it") from error
            time.sleep(_PAUSE_S)


class CachedChatModel:
    """A chat model that calls another one only for replies that are not in a store.

    Truncated replies are not stored.
    """

    def __init__(self, model: ChatModel, store: ChatReplyStore) -> None:
        self._model, self._store = model, store
        self.loop, self.identity = model.loop, model.identity

    async def chat(
        self, messages: Sequence[ChatMessage], sampling: ChatSamplingParams, indices: Sequence[int]
    ) -> list[ChatModelReply]:
        keys = {index: self._key(messages, sampling, index) for index in indices}
        found = {index: reply for index, key in keys.items() if (reply := self._store.get(key)) is not None}
        missing = [index for index in indices if index not in found]
        if missing:
            for index, reply in zip(missing, await self._model.chat(messages, sampling, missing), strict=True):
                found[index] = reply
                if reply.finish == STOP:
                    self._store.put(keys[index], reply)
        return [found[index] for index in indices]

    def _key(self, messages: Sequence[ChatMessage], sampling: ChatSamplingParams, index: int) -> str:
        text = json.dumps([self.identity, list(messages), asdict(sampling), index], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
