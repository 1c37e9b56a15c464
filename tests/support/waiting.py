"""Waiting for what another thread or process does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import uvicorn


def wait_until(happened: Callable[[], bool], limit_s: float = 60.0) -> None:
    ends = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < ends
        time.sleep(0.01)


@contextmanager
def answering(server: uvicorn.Server) -> Iterator[str]:
    """Run a server in a thread, at a free port; yields its address."""
    from rollmill.apps.serve.web import open_listener

    listener = open_listener("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
