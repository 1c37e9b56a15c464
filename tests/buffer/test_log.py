"""SQLite's write-ahead log is copied into the database while others write, and does not grow without end."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.buffer_groups import experience, ids

from rollmill.buffer import database as wal
from rollmill.buffer.base import ExperienceKind, Group
from rollmill.buffer.database import Database, sqlite_url
from rollmill.buffer.sql import SqlStore


def test_a_long_log_is_copied_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wal, "WAL_COPY_BYTES", 1 << 20)
    path = tmp_path / "b.sqlite"
    store = SqlStore(Database(sqlite_url(path)), "a1")
    names = [f"g{number}" for number in range(60)]
    for name in names:  # about 200 KB each
        store.put([Group(name, [experience(f"{name}/0", tokens=25_000)])])
    store.database._log.close()  # type: ignore[union-attr]
    assert path.stat().st_size > 5 << 20  # nothing was closed yet, and 12 MB are too few for a writer to copy them
    assert ids([group for _, group in store.read(ExperienceKind.ROLLOUT)]) == names
    store.close()
    assert not path.with_name("b.sqlite-wal").exists()
    again = SqlStore(Database(sqlite_url(path)), "a1")
    assert ids([group for _, group in again.read(ExperienceKind.ROLLOUT)]) == names
    again.close()
