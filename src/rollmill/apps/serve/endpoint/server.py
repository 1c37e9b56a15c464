"""The server of the endpoint. Importing it needs no web library."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rollmill.apps.serve.endpoint.middleware import AccessRules
from rollmill.apps.serve.endpoint.service import MISSING_LIBRARIES, EndpointService
from rollmill.apps.serve.web import ConnectionLimits
from rollmill.apps.serve.web.middleware import ASGIApp
from rollmill.errors import ConfigError, EngineError

SHUTDOWN_GRACE_S = 30


class WebServer:
    """Runs an application in the caller's event loop, from `start` to `stop`. Signals are left to the caller.

    Args:
        make: the application; it is called once the web libraries are there.

    Raises ConfigError if they are missing.
    """

    def __init__(self, make: Callable[[], ASGIApp], limits: ConnectionLimits, listener: socket.socket) -> None:
        try:
            import uvicorn

            from rollmill.apps.serve.web.connections import server_config

            app = make()
        except ImportError as error:
            raise ConfigError(MISSING_LIBRARIES) from error

        class _Server(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        config = server_config(app, limits, SHUTDOWN_GRACE_S)
        self._listener = listener
        self._server: Any = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start answering requests."""
        self._task = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                raise EngineError("the endpoint did not start") from self._task.exception()
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Stop once running requests are answered."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._task = None


class EndpointServer(WebServer):
    """The server of a model's endpoint."""

    def __init__(self, service: EndpointService, rules: AccessRules, listener: socket.socket) -> None:
        def make() -> ASGIApp:
            from rollmill.apps.serve.endpoint.app import make_app

            return make_app(service, rules)

        super().__init__(make, rules.connections, listener)
        self.service = service

    async def stop(self, *, abort: bool = False) -> None:
        """Refuse new requests, and stop once running ones are answered, or at once with `abort`."""
        if self._task is None:
            return
        self.service.gate.closing = True
        if abort:
            await self.service.gate.abort()
        await super().stop()
        self.service.close()
