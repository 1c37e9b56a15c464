"""Ends transactions of which a database server does not answer: its connections stay open where it is only stopped."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import Connection


class ConnectionWatch:
    """Shuts the connection of a transaction that takes longer than `limit_s`, which then fails and may be retried.

    One thread watches all transactions of a database; it starts with the first.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._watched: dict[object, tuple[int, float]] = {}  # descriptor of the connection, end of its time
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, connection: Connection) -> Iterator[None]:
        """Inside, the connection is shut when the time is over."""
        driver = connection.connection.dbapi_connection
        assert driver is not None
        key = object()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="rollmill-database", daemon=True)
                self._thread.start()
            self._watched[key] = driver.fileno(), time.monotonic() + self.limit_s
        try:
            yield
        finally:
            with self._lock:
                self._watched.pop(key, None)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self.limit_s / 10):
            with self._lock:  # inside, a connection that is watched is not closed, so its descriptor is its own
                now = time.monotonic()
                for key, (descriptor, ends) in list(self._watched.items()):
                    if now > ends:
                        del self._watched[key]
                        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connected:
                            connected.shutdown(socket.SHUT_RDWR)
