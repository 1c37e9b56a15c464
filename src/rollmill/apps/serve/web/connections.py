"""HTTP connections with deadlines and a bound on their number, for uvicorn.

uvicorn closes connections that rest between two requests. It waits for ever for the rest of a request's headers, for
the rest of a body that nobody reads any more, and for a client that does not read its answer; and any number of
connections may wait so.
"""

from __future__ import annotations

import asyncio
import resource
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollmill.apps.serve.web import ConnectionLimits

_HEADER_BYTES = 16 * 1024
_SMALL_CHUNK, _FREE_CHUNKS = 256, 64
_BACKLOG = 256
_OTHER_FILES = 128
_REFUSED_SHARE = 4
"""Refused connections that may wait for their clients, for each that may be open."""
_BUSY = b"503 Service Unavailable"


def server_config(app: Any, limits: ConnectionLimits, shutdown_s: int) -> uvicorn.Config:
    """Configuration of a server whose connections obey `limits`, within the files that this process may open.

    Args:
        shutdown_s: seconds for running requests when the server stops.
    """
    wanted = limits.connections * (1 + _REFUSED_SHARE)
    files = _allow_files(wanted + _BACKLOG + _OTHER_FILES) - _BACKLOG - _OTHER_FILES
    most = max(16, min(limits.connections, files))

    table = ConnectionTable(most, max(0, min(wanted, files) - most))

    def connection(**options: Any) -> BoundedConnection:
        return BoundedConnection(limits, table, **options)

    return uvicorn.Config(
        app,
        http=cast(Any, connection),
        ws="none",
        lifespan="off",
        log_level="error",  # warnings are about what clients send, and clients could fill a disk with them
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=limits.keep_alive_s,
        timeout_graceful_shutdown=shutdown_s,
    )


def _allow_files(wanted: int) -> int:
    """Raise this process's limit of open files, if it is below `wanted` and may be raised; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (wanted if each == resource.RLIM_INFINITY else each for each in (soft, hard))
    if soft < min(wanted, hard):
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return soft


class _RequestParser(h11.Connection):
    """A parser that refuses bodies in tiny chunks: each chunk costs as much time as thousands of bytes."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _HEADER_BYTES)
        self._chunks = self._bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > _FREE_CHUNKS and self._bytes < self._chunks * _SMALL_CHUNK:
                raise h11.RemoteProtocolError("the body's chunks are too small")
        return event


class ConnectionTable:
    """The open connections of a server, by what they wait for; thousands may come at once, so nothing is searched.

    Args:
        most: maximum number.
        refused: maximum number of those that were refused, beside the others, until their clients have read why.
    """

    def __init__(self, most: int, refused: int) -> None:
        self._most, self._most_refused = most, refused
        self._refused = OrderedDict[BoundedConnection, None]()
        self._rank_of: dict[BoundedConnection, int | None] = {}
        self._waiting = [OrderedDict[BoundedConnection, None]() for _ in range(3)]  # by rank, the oldest first

    def place(self, connection: BoundedConnection) -> None:
        """Add a connection, or note that it waits for something else."""
        rank = connection.rank
        if connection in self._rank_of and self._rank_of[connection] == rank:
            return
        self.remove(connection)
        self._rank_of[connection] = rank
        if rank is not None:
            self._waiting[rank][connection] = None

    def remove(self, connection: BoundedConnection) -> None:
        """Forget a connection that is closed."""
        self._refused.pop(connection, None)
        if (rank := self._rank_of.pop(connection, None)) is not None:
            del self._waiting[rank][connection]

    def refuse(self, connection: BoundedConnection) -> None:
        """Note that a connection was refused, and drop the one that was first if there are too many."""
        self.remove(connection)
        self._refused[connection] = None
        if len(self._refused) > self._most_refused:
            oldest, _ = self._refused.popitem(last=False)
            oldest.transport.abort()

    def make_room(self, new: BoundedConnection) -> bool:
        """Close the oldest connection that waits for its client if there are too many; False if all are answered."""
        if len(self._rank_of) <= self._most:
            return True
        for rank in self._waiting:
            for oldest in rank:
                if oldest is not new:
                    oldest.give_up()
                    return True
        return False


class BoundedConnection(H11Protocol):
    """One connection."""

    def __init__(self, limits: ConnectionLimits, table: ConnectionTable, **options: Any) -> None:
        super().__init__(**options)
        self.conn = _RequestParser()
        self._limits, self._table = limits, table
        self._discarding = False  # answered before its body had come
        self._deadline: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    @property
    def rank(self) -> int | None:
        """Order in which connections are closed when there are too many: those without a whole request, those at rest,
        those whose body is coming. None: it is being answered."""
        if self._discarding or self.cycle is None:
            return 0
        if self.cycle.response_complete:
            return 0 if self._deadline is not None else 1
        return 2 if self.cycle.more_body else None

    # -- asyncio.Protocol --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(self._limits.header_s)
        self._table.place(self)
        if not self._table.make_room(self):
            self._close_with(_BUSY)

    def data_received(self, data: bytes) -> None:
        if self._discarding or self.transport.is_closing():
            return
        super().data_received(data)
        if self._discarding or self.transport.is_closing():
            return
        if self.conn.their_state is not h11.IDLE:
            self._expect(None)
        elif self._deadline is None:
            self._expect(self._limits.header_s)
        self._table.place(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self._table.remove(self)
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    # -- uvicorn -----------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Throw away what is left of a body, for as long as the client needs to see the answer."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect(self._limits.linger_s, self.transport.abort)
        elif self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            self._unset_keepalive_if_required()
            self._discarding = True
            self._expect(self._limits.linger_s, self.transport.abort)
            try:
                self.transport.write_eof()
            except OSError:  # the client has gone already
                self.transport.abort()
        if not self.transport.is_closing():
            self._table.place(self)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect(self._limits.linger_s, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Nothing can be added to an answer that has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
            self._expect(self._limits.linger_s, self.transport.abort)
        else:
            self.transport.abort()

    # -- deadlines ---------------------------------------------------------------------------------------------

    def _expect(self, seconds: float | None, otherwise: Callable[[], None] | None = None) -> None:
        """Set the only deadline; None: nothing is waited for."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, otherwise or self._too_slow)

    def _too_slow(self) -> None:
        """Close a connection whose request has not come."""
        self._close_with(b"408 Request Timeout" if self.conn.trailing_data[0] else b"")

    def give_up(self) -> None:
        """Make room for another connection; a client that has not been answered yet is told to try again."""
        heard = self._discarding or self.cycle is not None
        if heard:
            self._table.remove(self)
            self.transport.abort()
        else:
            self._close_with(_BUSY)

    def _close_with(self, status: bytes) -> None:
        """Answer, and let the client read that: what it sends until then is thrown away."""
        if self.transport.is_closing():
            return
        self._discarding = True
        self._expect(self._limits.linger_s, self.transport.abort)
        if not status:
            self._table.remove(self)
            self.transport.close()
            return
        self.transport.write(
            b"HTTP/1.1 " + status + b"\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
        )
        self._table.refuse(self)
        if not self.transport.is_closing():
            try:
                self.transport.write_eof()
            except OSError:  # the client has gone already
                self.transport.abort()
