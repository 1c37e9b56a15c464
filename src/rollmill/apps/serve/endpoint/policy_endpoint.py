"""The explorer's endpoint, for rollouts by programs and frameworks that take a base URL."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollmill.apps.serve.endpoint.middleware import AccessRules, EndpointMetrics
from rollmill.apps.serve.endpoint.server import EndpointServer
from rollmill.apps.serve.endpoint.service import MISSING_LIBRARIES, AdmissionLimiter, EndpointService
from rollmill.apps.serve.endpoint.session import EndpointSession
from rollmill.apps.serve.endpoint.session_store import SessionStore
from rollmill.apps.serve.web import ConnectionLimits, open_listener
from rollmill.apps.serve.web.keys import KeyRing, make_key
from rollmill.data.padding import SWITCHES
from rollmill.engines.base import RolloutEngine
from rollmill.errors import ConfigError
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.workflow import Rollout

HOST, CLIENT = "127.0.0.1", "rollouts"
_MOST = 100_000
_MOST_TOKENS = 50_000_000


@dataclass(frozen=True, slots=True)
class SessionAccess:
    """The EndpointAccess of a session."""

    base_url: str  #: ends with /v1
    api_key: str
    session: EndpointSession

    @property
    def rewards(self) -> dict[str, float]:
        """Rewards posted to /feedback, by name."""
        return dict(self.session.parts)

    @property
    def called(self) -> bool:
        """True if the policy was asked at least once."""
        return bool(self.session.recorder.calls)

    @property
    def address(self) -> str:
        """Address of the server, to which /feedback is appended."""
        return self.base_url.removesuffix("/v1")


class PolicyEndpoint:
    """The PolicyServer of an engine in this process."""

    def __init__(self, engine: RolloutEngine, chat: ChatRenderer, context: int, deadline_s: float) -> None:
        self._engine, self._chat, self._context, self._deadline_s = engine, chat, context, deadline_s
        self._server: EndpointServer | None = None
        self._lock = asyncio.Lock()
        self._key = f"sk-{secrets.token_urlsafe(24)}"
        self._address = ""

    @asynccontextmanager
    async def one(self, rollout: Rollout, *, forced: bool = False) -> AsyncIterator[SessionAccess]:
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
            yield SessionAccess(f"{self._address}/v1", f"{self._key}:{session.id}", session)
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
