"""Prometheus metrics of the endpoint."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class EndpointMetrics:
    """The metrics of one server; all names begin with `rollmill_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: Any = {"namespace": "rollmill", "registry": self.registry}
        self.requests = Counter("requests", "Requests by route and HTTP status.", ["route", "status"], **options)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts.", **options)
        self.completion_tokens = Counter("completion_tokens", "Tokens of completions.", **options)
        self.aborted = Counter("aborted", "Requests whose client went away, or that were ended.", **options)
        self.under_way = Gauge("under_way", "Requests that are being answered or wait.", **options)
        self.sessions = Gauge("sessions", "Sessions that are held.", **options)
        self.dropped = Counter(
            "sessions_dropped", "Sessions that were dropped unfinished, by reason.", ["why"], **options
        )
        self.committed = Counter("sessions_committed", "Sessions that were handed over.", **options)
        self.experiences = Counter("experiences", "Experiences that were handed over.", **options)
        self.feedback = Counter("feedback", "Rewards that were given.", **options)
        self.version = Gauge("weights_version", "Version of the weights.", **options)
        self.seconds = Histogram("answer_seconds", "From a request to its whole answer.", buckets=_SECONDS, **options)
        self.first = Histogram("first_token_seconds", "From a request to its first token.", buckets=_SECONDS, **options)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)
