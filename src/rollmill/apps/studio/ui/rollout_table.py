"""A table of a run's stored completions, for searching and sorting: an SQLite file that lives as long as the server.

Files of steps are read a few at a time, the newest first, whenever somebody looks; one that a resumed run replaced is
read again. The table holds the beginning of every text, and where the completion's line begins in its file.
"""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rollmill.apps.serve.web import RequestRefusedError

_NAME = re.compile(r"step-(\d{1,12})\.jsonl")
_PROMPT, _RESPONSE = 1000, 4000
"""Characters of a prompt (its end) and of a response (its beginning) that are searched."""
_SNIPPET = 300
SORTS = {
    "newest": "step DESC, offset",
    "oldest": "step, offset",
    "reward": "reward",
    "length": "length",
    "staleness": "staleness",
    "turns": "turns",
}
_SCHEMA = """
CREATE TABLE files (step INTEGER PRIMARY KEY, signature TEXT);
CREATE TABLE rollouts (
    step INTEGER, offset INTEGER, id TEXT, task TEXT, "group" TEXT, episode TEXT, reward REAL, length INTEGER,
    staleness INTEGER, stop TEXT, source TEXT, turns INTEGER, prompt TEXT, response TEXT, PRIMARY KEY (step, offset)
) WITHOUT ROWID;
CREATE INDEX by_task ON rollouts (task, step);
CREATE INDEX by_reward ON rollouts (reward);
CREATE INDEX by_length ON rollouts (length);
CREATE INDEX by_staleness ON rollouts (staleness);
"""
_COLUMNS = 'step, offset, id, task, "group", episode, reward, length, staleness, stop, source, turns'


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """Filters and order of the list; None matches everything."""

    text: str = ""  #: in prompt, response, task or id; upper and lower case are the same
    task: str | None = None
    step: int | None = None
    source: str | None = None
    stop: str | None = None
    at_least: float | None = None  #: reward
    at_most: float | None = None
    sort: str = "newest"  #: a key of SORTS
    descending: bool = True
    offset: int = 0
    limit: int = 100

    def where(self) -> tuple[str, list[Any]]:
        """Return the condition in SQL and its values."""
        terms, values = ["1"], list[Any]()
        for term, value in (
            ("task = ?", self.task),
            ("step = ?", self.step),
            ("source = ?", self.source),
            ("stop = ?", self.stop),
            ("reward >= ?", self.at_least),
            ("reward <= ?", self.at_most),
        ):
            if value is not None:
                terms.append(term)
                values.append(value)
        if self.text:
            pattern = "%" + re.sub(r"([\\%_])", r"\\\1", _text(self.text)) + "%"
            names = ("response", "prompt", "task", "id")
            terms.append("(" + " OR ".join(rf"{name} LIKE ? ESCAPE '\'" for name in names) + ")")
            values += [pattern] * len(names)
        return " AND ".join(terms), values

    def order(self) -> str:
        """Return the order in SQL; rows without the number come last."""
        if self.sort in ("newest", "oldest"):
            return SORTS[self.sort]
        way = "DESC" if self.descending else "ASC"
        return f"{SORTS[self.sort]} IS NULL, {SORTS[self.sort]} {way}, step DESC, offset"


class RolloutTable:
    """The table of one folder of a run. Safe for threads.

    Args:
        folder: files of steps: RUN/rollouts, or RUN/evaluations.
        database: path of a file that may be created.
        versions: returns the version of the weights that each step's update began with; of other steps it is one less
            than their number.
        check_links: raises for entries of a folder that leave the root.
    """

    def __init__(
        self,
        folder: Path,
        database: Path,
        versions: Callable[[], dict[int, int]],
        check_links: Callable[[Iterable[os.DirEntry[str] | Path]], None],
    ) -> None:
        self._folder, self._versions, self._check_links = folder, versions, check_links
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(database, check_same_thread=False, isolation_level=None)
        self._connection.executescript(f"PRAGMA journal_mode = MEMORY; PRAGMA synchronous = OFF; {_SCHEMA}")
        self._pending = 0

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def refresh(self, seconds: float) -> int:
        """Read files of steps that are new or changed, the newest first; returns how many are left after `seconds`."""
        until = time.monotonic() + seconds
        with self._lock:
            there = self._files()
            known = dict(self._connection.execute("SELECT step, signature FROM files"))
            with self._transaction():
                for step in known.keys() - there.keys():
                    self._forget(step)
                versions = self._versions() if known != there else {}
                stale = sorted((step for step, sign in there.items() if known.get(step) != sign), reverse=True)
                for number, step in enumerate(stale):
                    if number and time.monotonic() > until:
                        self._pending = len(stale) - number
                        break
                    self._read(step, versions.get(step, step - 1))
                else:
                    self._pending = 0
            return self._pending

    def find(self, query: RolloutQuery) -> dict[str, Any]:
        """List completions: `rows`, the `total` number that match, `steps` that were read, files that are `pending`."""
        where, values = query.where()
        with self._lock:
            run = self._connection.execute
            [total] = run(f"SELECT count(*) FROM rollouts WHERE {where}", values).fetchone()
            [steps] = run("SELECT count(*) FROM files").fetchone()
            found = run(
                f"SELECT {_COLUMNS}, prompt, response FROM rollouts WHERE {where} "
                f"ORDER BY {query.order()} LIMIT ? OFFSET ?",
                [*values, query.limit, query.offset],
            )
            names = [column[0] for column in found.description]
            rows = [dict(zip(names, row, strict=True)) for row in found]
            for row in rows:  # cut here, since functions of SQLite end a text at its first zero character
                row |= {"prompt": row["prompt"][-_SNIPPET:], "response": row["response"][:_SNIPPET]}
            return {"rows": rows, "total": total, "steps": steps, "pending": self._pending}

    def episode(self, step: int, offset: int) -> list[int]:
        """Offsets of all experiences of the rollout that the one at `offset` belongs to, in order."""
        with self._lock:
            row = self._connection.execute(
                "SELECT episode FROM rollouts WHERE step = ? AND offset = ?", [step, offset]
            ).fetchone()
            if row is None or row[0] is None:
                return [offset]
            return [
                each
                for (each,) in self._connection.execute(
                    "SELECT offset FROM rollouts WHERE step = ? AND episode = ? ORDER BY offset", [step, row[0]]
                )
            ]

    def line(self, step: int, offset: int, id: str | None = None) -> dict[str, Any]:
        """Read one completion's line. Raises RequestRefusedError if the file has changed since it was listed, or if the
        line has another `id`."""
        self._check_links([self._folder, self._path(step)])
        try:
            with self._path(step).open("rb") as file:
                file.seek(offset)
                row = json.loads(file.readline())
        except (OSError, ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or id not in (None, _text(row.get("id"))):
            raise RequestRefusedError(
                f"step {step} has no completion {id or offset!r} any more", 404, code="no_rollout"
            )
        return row

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.jsonl"

    def _files(self) -> dict[int, str]:
        try:
            with os.scandir(self._folder) as entries:
                listed = list(entries)
        except FileNotFoundError:
            return {}
        self._check_links(listed)
        found = {}
        for entry in listed:
            if (match := _NAME.fullmatch(entry.name)) is not None:
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                found[int(match[1])] = f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"
        return found

    def _forget(self, step: int) -> None:
        for table in ("files", "rollouts"):
            self._connection.execute(f"DELETE FROM {table} WHERE step = ?", [step])

    def _read(self, step: int, version: int) -> None:
        try:
            with self._path(step).open("rb") as file:
                status = os.fstat(file.fileno())
                rows = list(_rows(step, version, file))
        except FileNotFoundError:
            return
        self._forget(step)
        self._connection.executemany(f"INSERT INTO rollouts VALUES ({', '.join('?' * 14)})", rows)
        sign = f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"
        self._connection.execute("INSERT INTO files VALUES (?, ?)", [step, sign])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


def _rows(step: int, version: int, file: BinaryIO) -> Iterator[tuple[Any, ...]]:
    offset = 0
    for line in file:
        start, offset = offset, offset + len(line)
        try:
            row = json.loads(line)
            mask = row["action_mask"]
            made = [at for at, counts in zip(row["versions"], mask, strict=True) if counts]
            episode = row["info"].get("episode")
            yield (
                *(step, start, _text(row["id"]), _text(row["task_id"]), _text(row["group"])),
                None if episode is None else _text(episode),
                _number(row["reward"]),
                sum(map(bool, mask)),
                max(version - min(made), 0) if made and min(made) >= 0 else None,
                *(_text(row["stop_reason"]), _text(row["source"])),
                sum(turn[0] == "assistant" for turn in row["turns"]),
                *(_text(row["prompt"])[-_PROMPT:], _text(row["response"])[:_RESPONSE]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            continue  # a damaged line: the others are worth looking at


def _text(value: object) -> str:
    """Text as SQLite can hold it: a lone surrogate becomes a question mark."""
    return str(value).encode("utf-8", "replace").decode()


def _number(value: object) -> float | None:
    number = None if value is None else float(str(value))
    return number if number is not None and math.isfinite(number) else None
