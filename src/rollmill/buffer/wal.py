"""SQLite's write-ahead log: what is committed stands there first, and is copied into the database later."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

WAL_COPY_BYTES = 64 << 20
"""How long the log gets before a thread of its own copies it: writers go on meanwhile, and so the log grows."""
WAL_MAX_BYTES = 4 * WAL_COPY_BYTES
"""How long it gets before who writes has to copy it first."""


class WriteAheadLog:
    """The log of one database.

    Args:
        engine: of a SQLite file. Its connections have `journal_size_limit=WAL_COPY_BYTES`, so that a longer file holds
            something that was not copied yet.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._path = Path(f"{engine.url.database}-wal")
        self._copying = threading.Lock()

    def written(self) -> None:
        """To be called after each write: begins to copy the log if it is long."""
        if self._size() > WAL_COPY_BYTES and self._copying.acquire(blocking=False):
            threading.Thread(target=self._copy, name="rollmill-log").start()

    def close(self) -> None:
        """Wait until nothing is being copied."""
        with self._copying:
            pass

    def _copy(self) -> None:
        try:
            with (
                suppress(SQLAlchemyError),
                self._engine.connect() as connection,
            ):  # writers meet errors at WAL_MAX_BYTES
                alone = connection.execution_options(rollmill_plain=True)
                alone.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")
        finally:
            self._copying.release()

    def _size(self) -> int:
        try:
            return os.path.getsize(self._path)
        except OSError:  # a file system without shared memory has no such log
            return 0
