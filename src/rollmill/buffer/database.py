"""A buffer's database: connections, transactions that survive short outages, and error messages with advice."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from sqlalchemy import Connection, Engine, create_engine, event, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

import rollmill.buffer.schema as schema
from rollmill.buffer.connection_watch import ConnectionWatch
from rollmill.errors import StoreError, StoreLostError
from rollmill.files import lock_holder

WAL_COPY_BYTES = 64 << 20
"""Size of SQLite's write-ahead log from which a thread copies it to the database; writers continue meanwhile."""
WAL_MAX_BYTES = 4 * WAL_COPY_BYTES
"""Size from which a writer has to copy the log first."""


class WriteAheadLog:
    """Write-ahead log of a SQLite database: commits go there first, and are copied to the database later.

    Args:
        engine: of a SQLite file. Its connections have `journal_size_limit=WAL_COPY_BYTES`, so that a longer log has
            pages that were not copied yet.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._path = Path(f"{engine.url.database}-wal")
        self._copying = threading.Lock()

    def written(self) -> None:
        """Call after each write: starts to copy the log if it is long."""
        if self._size() > WAL_COPY_BYTES and self._copying.acquire(blocking=False):
            threading.Thread(target=self._copy, name="rollmill-log").start()

    def close(self) -> None:
        """Wait for a running copy."""
        with self._copying:
            pass

    def _copy(self) -> None:
        try:
            with (
                suppress(SQLAlchemyError),
                self._engine.connect() as connection,
            ):  # writers get such errors at WAL_MAX_BYTES
                plain = connection.execution_options(rollmill_plain=True)
                plain.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")
        finally:
            self._copying.release()

    def _size(self) -> int:
        try:
            return os.path.getsize(self._path)
        except OSError:  # a file system without shared memory has no such log
            return 0


_TRANSIENT = ("08", "25P03", "40", "53300", "55P03", "57014", "57P01", "57P02", "57P03")
"""Transient SQLSTATEs of PostgreSQL: no connection, deadlocks, too many connections, timeouts, restarts."""


def redact_url(url: URL) -> str:
    """A database's address for messages: SQLite's path, or the URL without its password."""
    if url.get_backend_name() == "sqlite" and url.database:
        return unquote(url.database.removeprefix("file:")) if url.query else url.database
    return url.render_as_string(hide_password=True)


def database_error(url: URL, error: Exception, waited_s: float | None = None) -> StoreError:
    """Build the error for the user from one of the database, with advice: a StoreLostError if trying again may help."""
    cause = getattr(error, "orig", None) or error
    reason = " ".join(str(cause).split())
    state = getattr(cause, "sqlstate", None) or ""
    low = reason.lower()
    if "disk is full" in low or state == "53100" or "no space left" in low:
        advice = "free some space; nothing that was written before is damaged, and a resumed run goes on from there"
    elif "malformed" in low or "not a database" in low or state.startswith("XX"):
        advice = (
            "the file is damaged or is something else; move it away and start a new run, or put a copy back that was "
            "made while nothing was running"
        )
    elif "readonly" in low or "read-only" in low or state == "25006" or state == "42501":
        advice = "it can be read but not written; fix the permissions of the file and its folder, or of the user"
    elif "unable to open" in low:
        advice = "check that the folder exists and may be written"
    elif "locked" in low or "busy" in low:
        holder = "another program"
        if url.get_backend_name() == "sqlite":
            path = redact_url(url)
            holder = lock_holder(Path(path), Path(f"{path}-shm"))
        advice = f"{holder} holds it; let that go on, or end it"
    elif "disk i/o" in low:
        advice = "the disk refuses to read or write; check that it is there, not full, and no network file system"
    elif "password" in low or "authentication" in low or state.startswith("28"):
        advice = "check the user, and give the password in PGPASSWORD or ~/.pgpass"
    elif "does not exist" in low and state in ("", "3D000"):
        advice = "make the database first: `createdb NAME`"
    elif is_transient(error):
        advice = "check that the server runs and that buffer.url is right, then `rollmill resume RUN`"
    else:
        advice = "check buffer.url and the server's log"
    waited = f" for {waited_s:.0f} s" if waited_s is not None else ""
    kind = StoreLostError if is_transient(error) else StoreError
    return kind(f"the buffer's database {redact_url(url)} failed{waited}: {reason}; {advice}")


def is_transient(error: Exception) -> bool:
    """True if a retry may succeed."""
    if not isinstance(error, DBAPIError):
        return False
    cause = error.orig
    state = getattr(cause, "sqlstate", None)
    if type(cause).__module__.startswith("sqlite3"):
        return any(word in str(cause).lower() for word in ("locked", "busy"))
    if state is not None:
        return str(state).startswith(_TRANSIENT)
    low = str(cause).lower()
    if "password" in low or "authentication" in low or "does not exist" in low:
        return False
    return error.connection_invalidated or type(cause).__name__ in ("OperationalError", "InterfaceError")


Result = TypeVar("Result")

PAGE_BYTES = 32768
"""Large pages, because rows are about 100 KB: fewer pages to write and to check."""
BUSY_S = 30.0
_LOCK = 0x726F6C6C  # "roll": PostgreSQL's advisory lock while tables are created
_PATIENCE = 5.0
"""Longest transaction on a server, as a multiple of `outage_s`."""
_TIMEOUTS = {"connect_timeout": 10, "keepalives_idle": 20, "keepalives_interval": 5, "keepalives_count": 4}
"""Timeouts and keep-alives in seconds, which detect a server that no longer responds."""


class Database:
    """An SQLAlchemy engine with retried transactions.

    Args:
        url: SQLAlchemy URL.
        read_only: create no tables and change nothing.
        outage_s: seconds for which the database may be unreachable before an error is raised. A transaction without an
            answer of the server counts as lost after five times as long.
    """

    def __init__(self, url: str | URL, *, read_only: bool = False, outage_s: float = 60.0) -> None:
        self.url = _parsed(url)
        self.outage_s = outage_s
        self.read_only = read_only
        self.engine = _engine(self.url, read_only, _PATIENCE * outage_s)
        self._log = WriteAheadLog(self.engine) if self.is_sqlite and not read_only else None
        self._watch = None if self.is_sqlite else ConnectionWatch(_PATIENCE * outage_s)
        self._file: os.stat_result | None = None
        try:
            if not read_only:
                self.write(_make_tables)
            self.read(_check_format)
            if self.is_sqlite:
                with suppress(FileNotFoundError):  # an address that only SQLite can read
                    self._file = os.stat(redact_url(self.url))
        except BaseException:
            self.close()
            raise

    @property
    def is_sqlite(self) -> bool:
        """True if it is a SQLite file."""
        return self.url.get_backend_name() == "sqlite"

    def __str__(self) -> str:
        return redact_url(self.url)

    def write(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in one transaction.

        It is retried when the connection is lost, even in the middle of a commit, so it has to be idempotent.

        Raises:
            StoreError: the database fails, or is unreachable for `outage_s`.
        """
        return self._persist(work, write=True)

    def read(self, work: Callable[[Connection], Result]) -> Result:
        """Run `work` in one read-only transaction. Raises StoreError like `write`."""
        return self._persist(work, write=False)

    def sync(self, work: Callable[[Connection], Result]) -> Result:
        """Like `write`, but this transaction and all earlier ones survive a power failure."""
        return self._persist(work, write=True, synced=True)

    def vacuum(self) -> None:
        """Return the space of deleted rows to the disk. Raises StoreError."""
        try:
            with self.engine.connect() as connection:
                if self.is_sqlite:
                    plain = connection.execution_options(rollmill_plain=True)
                    plain.exec_driver_sql("VACUUM")
                    plain.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
                    return
                plain = connection.execution_options(isolation_level="AUTOCOMMIT")
                plain.exec_driver_sql(f"VACUUM {', '.join(schema.metadata.tables)}")
        except SQLAlchemyError as error:
            raise database_error(self.url, error) from error

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        if self._watch is not None:
            self._watch.close()
        self.engine.dispose()

    def _persist(self, work: Callable[[Connection], Result], *, write: bool, synced: bool = False) -> Result:
        self._require_file()
        deadline, pause = time.monotonic() + self.outage_s, 0.02
        while True:
            try:
                with self.engine.connect() as connection:
                    connection = connection.execution_options(rollmill_write=write, rollmill_synced=synced)
                    with self._watch.watching(connection) if self._watch else nullcontext(), connection.begin():
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

    def _require_file(self) -> None:
        """Check that SQLite's file is the one that was opened: it would be written though its name is gone."""
        if self._file is None:
            return
        try:
            there = os.path.samestat(self._file, os.stat(redact_url(self.url)))
        except FileNotFoundError:
            there = False
        if not there:
            raise StoreError(
                f"the buffer's file {self} was removed or replaced while it was in use, and its experiences are gone; "
                "put it back, or start a new run"
            )


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


def _engine(url: URL, read_only: bool, limit_s: float) -> Engine:
    try:
        if url.get_backend_name() == "sqlite":
            if read_only:
                url = url.set(database=f"file:{quote(str(url.database))}", query={"mode": "ro", "uri": "true"})
            engine = create_engine(url, connect_args={"timeout": BUSY_S, "check_same_thread": False})
            event.listen(engine, "connect", _configure_read_only if read_only else _configure)
            event.listen(engine, "begin", _begin)
            return engine
        engine = create_engine(url, connect_args=_TIMEOUTS)
        event.listen(engine, "begin", partial(_begin_on_server, read_only=read_only, limit_s=limit_s))
        return engine
    except ModuleNotFoundError as error:
        raise StoreError(f"buffer.url needs the package `{error.name}`: pip install 'rollmill[postgres]'") from error
    except NoSuchModuleError as error:
        raise StoreError(f"buffer.url: {error}; use postgresql+psycopg (pip install 'rollmill[postgres]')") from error


def _configure(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # SQLAlchemy starts transactions, by `_begin`
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


def _begin_on_server(connection: Connection, *, read_only: bool, limit_s: float) -> None:
    """Have the server end what takes too long: it then gives back its locks, even if this process is stopped."""
    if read_only:
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
    limits = dict.fromkeys(("statement_timeout", "idle_in_transaction_session_timeout"), limit_s)
    if connection.get_execution_options().get("rollmill_write"):
        limits["lock_timeout"] = BUSY_S
    calls = ", ".join(f"set_config('{name}', '{limit * 1000:.0f}ms', true)" for name, limit in limits.items())
    connection.exec_driver_sql(f"SELECT {calls}")


def _make_tables(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":  # two processes may open an empty database at once
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    if not connection.dialect.has_table(connection, schema.meta.name):
        schema.metadata.create_all(connection)
        if connection.dialect.name == "postgresql":  # avoid compression, which is slow and useless here
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
