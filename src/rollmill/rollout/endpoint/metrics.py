"""What the endpoint counts, for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class EndpointMetrics:
    """The metrics of one server; all names begin with `rollmill_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: Any = {"namespace": "rollmill", "registry": self.registry}
        self.requests = Counter("requests", "Requests by route and HTTP status.", ["route", "status"], **own)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts.", **own)
        self.completion_tokens = Counter("completion_tokens", "Tokens of completions.", **own)
        self.aborted = Counter("aborted", "Requests whose client went away, or that were ended.", **own)
        self.under_way = Gauge("under_way", "Requests that are being answered or wait.", **own)
        self.sessions = Gauge("sessions", "Sessions that are held.", **own)
        self.dropped = Counter("sessions_dropped", "Sessions that were dropped unfinished, by reason.", ["why"], **own)
        self.committed = Counter("sessions_committed", "Sessions that were handed over.", **own)
        self.experiences = Counter("experiences", "Experiences that were handed over.", **own)
        self.feedback = Counter("feedback", "Rewards that were given.", **own)
        self.version = Gauge("weights_version", "Version of the weights.", **own)
        self.seconds = Histogram("answer_seconds", "From a request to its whole answer.", buckets=_SECONDS, **own)
        self.first = Histogram("first_token_seconds", "From a request to its first token.", buckets=_SECONDS, **own)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
