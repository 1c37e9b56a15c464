"""The explorer's endpoint, for rollouts by programs and frameworks that take a base URL."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollmill.data.padding import SWITCHES
from rollmill.engines.base import RolloutEngine
from rollmill.errors import ConfigError
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.endpoint.middleware import AccessRules, EndpointMetrics
from rollmill.rollout.endpoint.server import EndpointServer
from rollmill.rollout.endpoint.service import MISSING_LIBRARIES, AdmissionLimiter, EndpointService
from rollmill.rollout.endpoint.session import EndpointSession
from rollmill.rollout.endpoint.session_store import SessionStore
from rollmill.rollout.workflow import Rollout
from rollmill.web import ConnectionLimits, open_listener
from rollmill.web.keys import KeyRing, make_key

HOST, CLIENT = "127.0.0.1", "rollouts"
_MOST = 100_000
_MOST_TOKENS = 50_000_000


@dataclass(frozen=True, slots=True)
class EndpointAccess:
    """The workflow argument `endpoint`: an OpenAI-compatible server that is this rollout's policy, and records."""

    base_url: str  #: ends with /v1
    api_key: str
    session: EndpointSession

    @property
    def rewards(self) -> dict[str, float]:
        """Rewards posted to /feedback, by name."""
        return dict(self.session.parts)

    @property
    def address(self) -> str:
        """Address of the server, to which /feedback is appended."""
        return self.base_url.removesuffix("/v1")


class PolicyEndpoint:
    """Serves an engine to the rollouts of this process; starts at the first use."""

    def __init__(self, engine: RolloutEngine, chat: ChatRenderer, context: int, deadline_s: float) -> None:
        self._engine, self._chat, self._context, self._deadline_s = engine, chat, context, deadline_s
        self._server: EndpointServer | None = None
        self._lock = asyncio.Lock()
        self._key = f"sk-{secrets.token_urlsafe(24)}"
        self._address = ""

    @asynccontextmanager
    async def one(self, rollout: Rollout, *, forced: bool = False) -> AsyncIterator[EndpointAccess]:
        """Open the endpoint for one rollout. `forced`: requests cannot change temperature and truncation."""
        service = (await self._started()).service
        session = EndpointSession(
            secrets.token_hex(8),
            self._chat,
            rollout.sampling,
            owner=CLIENT,
            recorder=rollout.recorder,
            seed=rollout.seed,
            index=rollout.index,
            forced=forced,
            most_tokens=_MOST_TOKENS,
            switches=rollout.task.metadata.get(SWITCHES),
        )
        service.sessions.add(session)
        try:
            yield EndpointAccess(f"{self._address}/v1", f"{self._key}:{session.id}", session)
        finally:
            service.sessions.remove(session)
            await session.abort()

    async def close(self) -> None:
        """Stop the server; may be called twice."""
        if self._server is not None:
            await self._server.stop(abort=True)
            self._server = None

    async def _started(self) -> EndpointServer:
        async with self._lock:
            if self._server is None:
                try:
                    gauges = EndpointMetrics()
                except ImportError as error:
                    raise ConfigError(MISSING_LIBRARIES) from error
                service = EndpointService(
                    engine=self._engine,
                    chat=self._chat,
                    name="policy",
                    context=self._context,
                    sessions=SessionStore(gauges, None, most=_MOST, idle_s=float("inf")),
                    gate=AdmissionLimiter(_MOST, self._deadline_s, gauges),
                    gauges=gauges,
                )
                listener = open_listener(HOST, 0)
                self._address = f"http://{HOST}:{listener.getsockname()[1]}"
                keys = KeyRing([make_key(CLIENT, self._key)])
                rules = AccessRules(HOST, keys, ConnectionLimits(_MOST), bodies=_MOST)
                server = EndpointServer(service, rules, listener)
                await server.start()
                self._server = server
            return self._server
