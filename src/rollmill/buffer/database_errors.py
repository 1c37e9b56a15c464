"""What errors of a database mean: which pass by themselves, and what to do about the others."""

from __future__ import annotations

from urllib.parse import unquote

from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from rollmill.errors import StoreError

_PASSING = ("08", "40", "53300", "55P03", "57P01", "57P02", "57P03")
"""SQLSTATEs of PostgreSQL that pass by themselves: no connection, deadlocks, too many connections, restarts."""


def redact_url(url: URL) -> str:
    """A database's address for people: SQLite's path, or the URL without its password."""
    if url.get_backend_name() == "sqlite" and url.database:
        return unquote(url.database.removeprefix("file:")) if url.query else url.database
    return url.render_as_string(hide_password=True)


def database_error(url: URL, error: Exception, waited_s: float | None = None) -> StoreError:
    """What to say of an error of the database."""
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
        advice = "it can be read but not written; mend the permissions of the file and its folder, or of the user"
    elif "unable to open" in low:
        advice = "check that the folder exists and may be written"
    elif "locked" in low or "busy" in low:
        advice = "another program holds it; find and end it (`fuser FILE`)"
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
    return StoreError(f"the buffer's database {redact_url(url)} failed{waited}: {reason}; {advice}")


def is_transient(error: Exception) -> bool:
    """Whether trying again may help."""
    if not isinstance(error, DBAPIError):
        return False
    cause = error.orig
    state = getattr(cause, "sqlstate", None)
    if type(cause).__module__.startswith("sqlite3"):
        return any(word in str(cause).lower() for word in ("locked", "busy"))
    if state is not None:
        return str(state).startswith(_PASSING)
    low = str(cause).lower()
    if "password" in low or "authentication" in low or "does not exist" in low:
        return False
    return error.connection_invalidated or type(cause).__name__ in ("OperationalError", "InterfaceError")
