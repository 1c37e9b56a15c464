"""A service for applications: anybody may begin a session."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rollmill.config.rollout import SamplingConfig
from rollmill.engines.base import RolloutEngine
from rollmill.errors import ConfigError
from rollmill.rollout.chat import ChatRenderer
from rollmill.rollout.endpoint.generation import AdmissionLimiter
from rollmill.rollout.endpoint.service import EndpointService
from rollmill.rollout.endpoint.session import EndpointSession
from rollmill.rollout.endpoint.session_store import SessionSink, SessionStore

MISSING_LIBRARIES = (
    "the endpoint needs the fastapi, uvicorn and prometheus-client libraries: pip install 'rollmill[serve]'"
)


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """What a server bears."""

    requests: int = 256  #: that are answered or wait at the same time
    deadline_s: float = 600.0  #: longest wait for an answer
    sessions: int = 2000
    session_tokens: int = 20_000_000  #: that all sessions hold; some 60 bytes each
    idle_s: float = 3600.0  #: after which a session is dropped
    most_bytes: int = 8 * 2**20  #: longest body


def build_application_service(
    engine: RolloutEngine,
    chat: ChatRenderer,
    *,
    name: str,
    context: int,
    sampling: SamplingConfig,
    limits: ServiceLimits,
    sink: SessionSink | None = None,
) -> EndpointService:
    """A model behind the endpoint; without a sink nothing is kept of calls that name no session.

    Raises ConfigError where the web libraries are missing.
    """
    try:
        from rollmill.rollout.endpoint.metrics import EndpointMetrics
    except ImportError as error:
        raise ConfigError(MISSING_LIBRARIES) from error
    gauges = EndpointMetrics()
    make = partial(EndpointSession, chat=chat, sampling=sampling)
    return EndpointService(
        engine=engine,
        chat=chat,
        name=name,
        context=context,
        sessions=SessionStore(
            gauges, make, most=limits.sessions, most_tokens=limits.session_tokens, idle_s=limits.idle_s
        ),
        gate=AdmissionLimiter(limits.requests, limits.deadline_s, gauges),
        gauges=gauges,
        anonymous=make,
        sink=sink,
        takes_feedback=sink is not None,
    )
