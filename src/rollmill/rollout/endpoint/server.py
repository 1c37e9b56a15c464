"""Running the endpoint in the event loop of whoever needs it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollmill.errors import ConfigError, EngineError
from rollmill.rollout.endpoint.application import MISSING_LIBRARIES
from rollmill.rollout.endpoint.middleware import AccessRules
from rollmill.rollout.endpoint.service import EndpointService

SHUTDOWN_GRACE_S = 30


class EndpointServer:
    """A server that answers since `start`, until `stop`. Signals are its owner's business.

    Raises ConfigError where the web libraries are missing.
    """

    def __init__(self, service: EndpointService, rules: AccessRules, listener: socket.socket) -> None:
        try:
            import uvicorn

            from rollmill.rollout.endpoint.app import make_app
        except ImportError as error:
            raise ConfigError(MISSING_LIBRARIES) from error

        class _Server(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        options: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
        options |= {"lifespan": "off", "ws": "none", "timeout_keep_alive": 120}
        config = uvicorn.Config(make_app(service, rules), **options, timeout_graceful_shutdown=SHUTDOWN_GRACE_S)
        self.service, self._listener = service, listener
        self._server: Any = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answer from now on."""
        self._task = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                raise EngineError("the endpoint did not start") from self._task.exception()
            await asyncio.sleep(0.005)

    async def stop(self, *, abort: bool = False) -> None:
        """Take no more requests, and end when those under way are answered, or at once."""
        if self._task is None:
            return
        self.service.gate.closing = True
        if abort:
            await self.service.gate.abort()
        self._server.should_exit = True
        await self._task
        self._task = None
