"""A service for applications: anybody may begin a session."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rollmill.config.rollout import SamplingConfig
from rollmill.core.errors import ConfigError
from rollmill.engines.base import RolloutEngine
from rollmill.explorer.chat import ChatFormat
from rollmill.explorer.serving.generation import Gate
from rollmill.explorer.serving.service import Service
from rollmill.explorer.serving.session import Session
from rollmill.explorer.serving.sessions import Sessions, Sink

MISSING = "the endpoint needs the fastapi, uvicorn and prometheus-client libraries: pip install 'rollmill[serve]'"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server bears."""

    requests: int = 256  #: that are answered or wait at the same time
    deadline_s: float = 600.0  #: longest wait for an answer
    sessions: int = 2000
    session_tokens: int = 20_000_000  #: that all sessions hold; some 60 bytes each
    idle_s: float = 3600.0  #: after which a session is dropped
    most_bytes: int = 8 * 2**20  #: longest body


def application_service(
    engine: RolloutEngine,
    chat: ChatFormat,
    *,
    name: str,
    context: int,
    sampling: SamplingConfig,
    limits: Limits,
    sink: Sink | None = None,
) -> Service:
    """A model behind the endpoint; without a sink nothing is kept of calls that name no session.

    Raises ConfigError where the web libraries are missing.
    """
    try:
        from rollmill.explorer.serving.gauges import Gauges
    except ImportError as error:
        raise ConfigError(MISSING) from error
    gauges = Gauges()
    make = partial(Session, chat=chat, sampling=sampling)
    return Service(
        engine=engine,
        chat=chat,
        name=name,
        context=context,
        sessions=Sessions(gauges, make, most=limits.sessions, most_tokens=limits.session_tokens, idle_s=limits.idle_s),
        gate=Gate(limits.requests, limits.deadline_s, gauges),
        gauges=gauges,
        anonymous=make,
        sink=sink,
        takes_feedback=sink is not None,
    )
