"""A buffer's database: connecting, transactions that outlast short outages, and what to say when it fails."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

import rollmill.buffer.schema as schema
from rollmill.buffer.database_errors import database_error, is_transient, redact_url
from rollmill.buffer.wal import WAL_COPY_BYTES, WAL_MAX_BYTES, WriteAheadLog
from rollmill.errors import StoreError

Result = TypeVar("Result")

PAGE_BYTES = 32768
"""Large pages, since rows are about 100 KB: fewer of them to write and to check."""
BUSY_S = 30.0
_LOCK = 0x726F6C6C  # "roll": PostgreSQL's advisory lock while tables are made
_NOTICE_SILENCE = {"connect_timeout": 10, "keepalives_idle": 20, "keepalives_interval": 5, "keepalives_count": 4}
"""Seconds after which a server that no longer answers counts as gone."""


class Database:
    """An engine, and transactions on it.

    Args:
        url: SQLAlchemy URL.
        read_only: make no tables and change nothing.
        outage_s: how long a database may be unreachable before an error is raised.
    """

    def __init__(self, url: str | URL, *, read_only: bool = False, outage_s: float = 60.0) -> None:
        self.url = _parsed(url)
        self.outage_s = outage_s
        self.read_only = read_only
        self.engine = _engine(self.url, read_only)
        self._log = WriteAheadLog(self.engine) if self.is_sqlite and not read_only else None
        try:
            if not read_only:
                self.write(_make_tables)
            self.read(_check_format)
        except BaseException:
            self.engine.dispose()
            raise

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file."""
        return self.url.get_backend_name() == "sqlite"

    def __str__(self) -> str:
        return redact_url(self.url)

    def write(self, work: Callable[[Connection], Result]) -> Result:
        """`work` in one transaction. It is repeated when the connection is lost, even in the middle of a commit, so it
        has to come to the same when it runs twice.

        Raises:
            StoreError: it cannot be done, or not within `outage_s`.
        """
        return self._persist(work, write=True)

    def read(self, work: Callable[[Connection], Result]) -> Result:
        """`work` in one transaction that changes nothing. Raises StoreError like `write`."""
        return self._persist(work, write=False)

    def sync(self, work: Callable[[Connection], Result]) -> Result:
        """Like `write`; afterwards this transaction and all before it survive a power failure."""
        return self._persist(work, write=True, synced=True)

    def vacuum(self) -> None:
        """Give space that deleted rows had back to the disk. Raises StoreError."""
        try:
            with self.engine.connect() as connection:
                if self.is_sqlite:
                    alone = connection.execution_options(rollmill_plain=True)
                    alone.exec_driver_sql("VACUUM")
                    alone.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
                    return
                alone = connection.execution_options(isolation_level="AUTOCOMMIT")
                alone.exec_driver_sql(f"VACUUM {', '.join(schema.metadata.tables)}")
        except SQLAlchemyError as error:
            raise database_error(self.url, error) from error

    def close(self) -> None:
        """Close all connections."""
        if self._log is not None:
            self._log.close()
        self.engine.dispose()

    def _persist(self, work: Callable[[Connection], Result], *, write: bool, synced: bool = False) -> Result:
        deadline, pause = time.monotonic() + self.outage_s, 0.02
        while True:
            try:
                with self.engine.connect() as connection:
                    connection = connection.execution_options(rollmill_write=write, rollmill_synced=synced)
                    with connection.begin():
                        result = work(connection)
                if write and self._log is not None:
                    self._log.written()
                return result
            except SQLAlchemyError as error:
                if not is_transient(error):
                    raise database_error(self.url, error) from error
                if time.monotonic() + pause > deadline:
                    raise database_error(self.url, error, self.outage_s) from error
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, 2.0)


def sqlite_url(path: Path) -> URL:
    """The URL of a SQLite file."""
    return URL.create("sqlite", database=str(path.absolute()))


def _parsed(url: str | URL) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:  # ValueError: a port that is no number
        raise StoreError(
            "buffer.url is no SQLAlchemy URL; write it like postgresql+psycopg://user@host/name or "
            "sqlite:////absolute/path.sqlite"
        ) from error
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise StoreError(f"buffer.url: {parsed.get_backend_name()} is not supported; use sqlite or postgresql+psycopg")
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise StoreError("buffer.url: a SQLite database needs a file; for a buffer in memory set buffer.store: memory")
    return parsed


def _engine(url: URL, read_only: bool) -> Engine:
    try:
        if url.get_backend_name() == "sqlite":
            if read_only:
                url = url.set(database=f"file:{quote(str(url.database))}", query={"mode": "ro", "uri": "true"})
            engine = create_engine(url, connect_args={"timeout": BUSY_S, "check_same_thread": False})
            event.listen(engine, "connect", _configure_read_only if read_only else _configure)
            event.listen(engine, "begin", _begin)
            return engine
        engine = create_engine(url, connect_args=_NOTICE_SILENCE)
        event.listen(engine, "begin", _begin_read_only if read_only else _begin_on_server)
        return engine
    except ModuleNotFoundError as error:
        raise StoreError(f"buffer.url needs the package `{error.name}`: pip install 'rollmill[postgres]'") from error
    except NoSuchModuleError as error:
        raise StoreError(f"buffer.url: {error}; use postgresql+psycopg (pip install 'rollmill[postgres]')") from error


def _configure(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # transactions begin where SQLAlchemy says, see `_begin`
    cursor = connection.cursor()
    for pragma in (
        f"page_size={PAGE_BYTES}",
        f"busy_timeout={int(BUSY_S * 1000)}",
        "journal_mode=WAL",
        "synchronous=NORMAL",
        f"wal_autocheckpoint={WAL_MAX_BYTES // PAGE_BYTES}",
        f"journal_size_limit={WAL_COPY_BYTES}",
        "temp_store=MEMORY",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _configure_read_only(connection: Any, _: Any) -> None:
    connection.isolation_level = None
    connection.execute(f"PRAGMA busy_timeout={int(BUSY_S * 1000)}")


def _begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get("rollmill_write"):
        connection.exec_driver_sql(f"PRAGMA synchronous={'FULL' if options.get('rollmill_synced') else 'NORMAL'}")
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    elif not options.get("rollmill_plain"):  # VACUUM is no part of a transaction
        connection.exec_driver_sql("BEGIN")


def _begin_on_server(connection: Connection) -> None:
    if connection.get_execution_options().get("rollmill_write"):
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{BUSY_S:.0f}s'")


def _begin_read_only(connection: Connection) -> None:
    connection.exec_driver_sql("SET TRANSACTION READ ONLY")


def _make_tables(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":  # two processes may open an empty database at once
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    if not connection.dialect.has_table(connection, schema.meta.name):
        schema.metadata.create_all(connection)
        if connection.dialect.name == "postgresql":  # which would try to compress them, in vain and slowly
            columns = ", ".join(f"ALTER {name} SET STORAGE EXTERNAL" for name in ("token_ids", "logprobs"))
            connection.execute(text(f"ALTER TABLE {schema.experiences.name} {columns}"))
        connection.execute(schema.meta.insert().values(key="format", value=str(schema.FORMAT)))


def _check_format(connection: Connection) -> None:
    place = redact_url(connection.engine.url)
    if not connection.dialect.has_table(connection, schema.meta.name):
        raise StoreError(f"the database {place} holds no buffer of rollmill; check buffer.url")
    found = connection.execute(select(schema.meta.c.value).where(schema.meta.c.key == "format")).scalar()
    if found != str(schema.FORMAT):
        newer = found is not None and found.isdigit() and int(found) > schema.FORMAT
        advice = (
            "install the rollmill that wrote it, or a newer one"
            if newer
            else "export it with the rollmill that \
wrote it (`rollmill buffer export`), and import that file"
        )
        raise StoreError(f"the buffer in {place} has format {found}, this rollmill reads {schema.FORMAT}; {advice}")
