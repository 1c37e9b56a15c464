"""Stores of every kind."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollmill.buffer.base import ExperienceStore
from rollmill.buffer.database import Database, sqlite_url
from rollmill.buffer.memory import MemoryStore
from rollmill.buffer.sql import SqlStore

KINDS = ["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.service)]


@pytest.fixture(params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], ExperienceStore]]:
    """Opens the store of one run; in a database, a second call opens it a second time."""
    stores: list[ExperienceStore] = []
    run_id = uuid.uuid4().hex
    memory = MemoryStore(keep=1000)
    url = request.getfixturevalue("pg").url if request.param == "postgres" else sqlite_url(tmp_path / "b.sqlite")

    def open_one() -> ExperienceStore:
        if request.param == "memory":
            return memory
        stores.append(SqlStore(Database(url, outage_s=5.0), run_id))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def store(opened: Callable[[], ExperienceStore]) -> ExperienceStore:
    """A store."""
    return opened()
