"""Replies kept on disk, so that no question is asked twice: one SQLite file, for any number of processes."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollmill.errors import ConfigError
from rollmill.rewards.judges.chat import STOP, ChatMessage, ChatModel, ChatModelReply, ChatSamplingParams

BUSY_TIMEOUT_S = 30.0
"""Longest wait for another process that writes."""
_PAUSE_S = 0.01


class ChatReplyStore:
    """Keys and replies in a file. The first reply of a key stays. Raises ConfigError where the file cannot be used."""

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
        """What is kept under a key."""
        row = self._execute("SELECT text, finish FROM replies WHERE key = ?", key)
        return None if row is None else ChatModelReply(row[0], row[1], cached=True)

    def put(self, key: str, reply: ChatModelReply) -> None:
        """Keep a reply, unless another process was quicker."""
        self._execute("INSERT OR IGNORE INTO replies VALUES (?, ?, ?)", key, reply.text, reply.finish)

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            self._connection.close()

    def _execute(self, statement: str, *values: str) -> Any:
        """The first row. SQLite waits for other writers by itself, but not to change a file's journal."""
        started = time.monotonic()
        while True:
            try:
                with self._lock:
                    return self._connection.execute(statement, values).fetchone()
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() - started > BUSY_TIMEOUT_S:
                    raise
            time.sleep(_PAUSE_S)


class CachedChatModel:
    """A chat model that asks another one only what is not in a store. Replies that did not end are not kept."""

    def __init__(self, model: ChatModel, store: ChatReplyStore) -> None:
        self._model, self._store = model, store
        self.loop, self.identity = model.loop, model.identity

    async def chat(
        self, messages: Sequence[ChatMessage], sampling: ChatSamplingParams, indices: Sequence[int]
    ) -> list[ChatModelReply]:
        """See ChatModel."""
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
