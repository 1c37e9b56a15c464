"""Checks that every request passes first: the key, the session it belongs to, rate limits, and size; and metrics."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from rollmill.apps.serve.endpoint.protocol import ApiError
from rollmill.apps.serve.web import ConnectionLimits, RequestRefusedError, is_own_host
from rollmill.apps.serve.web.keys import ANYONE, KeyRateLimiter, KeyRing
from rollmill.apps.serve.web.middleware import BODY_S, MOST_BODIES, ASGIApp, ASGIMessage, GuardMiddleware, Scope

_CALLER = "rollmill.caller"
_PREFIX = re.compile(r"/s/([^/]*)(/v1/.*|/feedback|/commit)")
_NAME = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_OPEN = ("/health",)
_ROUTES = frozenset(
    (
        *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/responses", "/v1/models", "/health", "/metrics", "/feedback", "/commit"),
    )
)


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Access rules of the server.

    Attributes:
        host: the address listened on.
        keys: keys of clients, to which a request may append `:SESSION`; None: not required.
        connections: bounds of connections.
        body_s: seconds for a whole body to arrive.
        bodies: bodies of the largest size that are read at the same time.
    """

    host: str
    keys: KeyRing | None
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    body_s: float = BODY_S
    bodies: int = MOST_BODIES


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request, and the session that it names."""

    client: str  #: name of its key
    session: str | None


def caller_of(scope: Scope) -> Caller:
    """The caller of an admitted request."""
    found: Caller = scope[_CALLER]
    return found


class EndpointMetrics:
    """The metrics of one server for Prometheus; all names begin with `rollmill_`.

    Raises ImportError without prometheus_client (extra `serve`).
    """

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        options: Any = {"namespace": "rollmill", "registry": self.registry}
        self.requests = Counter(
            "requests", "Requests by route, HTTP status and client.", ["route", "status", "key"], **options
        )
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts by client.", ["key"], **options)
        self.completion_tokens = Counter("completion_tokens", "Tokens of completions by client.", ["key"], **options)
        self.tool_calls = Counter("tool_calls", "Tool calls of answers by client.", ["key"], **options)
        self.tool_call_errors = Counter(
            "tool_call_errors", "Tool calls of answers that are malformed or cut off, by client.", ["key"], **options
        )
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
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


class EndpointMiddleware(GuardMiddleware):
    """Applies the rules of one endpoint, and counts its requests."""

    routes: frozenset[str] = _ROUTES  #: paths that metrics tell apart
    without_key: tuple[str, ...] = _OPEN

    def __init__(
        self, app: ASGIApp, rules: AccessRules, gauges: EndpointMetrics, rates: KeyRateLimiter, most_bytes: int
    ) -> None:
        super().__init__(app, rates, most_bytes, rules.body_s, rules.bodies)
        self._rules, self._gauges = rules, gauges

    def admit(self, scope: Scope, headers: dict[str, str]) -> str:
        self._check_origin(headers)
        scope[_CALLER] = self._caller(scope, headers)
        return caller_of(scope).client

    def refusal(self, scope: Scope, error: RequestRefusedError) -> tuple[str, bytes]:
        return "application/json", json.dumps(ApiError.of(error).body(scope["path"])).encode()

    def answered(self, scope: Scope, start: ASGIMessage) -> None:
        path = scope["path"]
        of_response = path.startswith("/v1/responses/") and path.count("/") == 3
        route = path if path in self.routes else "/v1/responses/ID" if of_response else "other"
        caller: Caller | None = scope.get(_CALLER)
        self._gauges.requests.labels(route, start["status"], "" if caller is None else caller.client).inc()
        start["headers"] = [*start.get("headers", []), (b"x-content-type-options", b"nosniff")]
        if caller is not None and caller.session is not None:
            start["headers"].append((b"x-session-id", caller.session.encode()))

    def _check_origin(self, headers: dict[str, str]) -> None:
        """Refuse requests made by web pages in a browser on this machine."""
        if not is_own_host(headers.get("host", ""), self._rules.host):
            text = "the request is for another host than this server; use its address, or the name that --host gives"
            raise ApiError(text, 403, code="wrong_host")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise ApiError("requests of web pages are refused", 403, code="cross_site")

    def _caller(self, scope: Scope, headers: dict[str, str]) -> Caller:
        """The client, and the session named by the request's path, header or key."""
        named: list[str] = []
        if (match := _PREFIX.fullmatch(scope["path"])) is not None:
            named.append(match[1])
            scope["path"] = match[2]
            scope["raw_path"] = match[2].encode("utf-8", "replace")
        if "x-session-id" in headers:
            named.append(headers["x-session-id"])
        client, of_key = self._of_key(_shown_key(headers), scope["path"])
        named += of_key
        for name in named:
            if not _NAME.fullmatch(name):
                text = "a session's name has 1 to 128 letters, digits and . _ ~ -"
                raise ApiError(text, code="invalid_session", param="X-Session-Id")
        if len(set(named)) > 1:
            text = f"the request names {len(set(named))} sessions ({', '.join(named)}); name one"
            raise ApiError(text, code="invalid_session", param="X-Session-Id")
        return Caller(client, named[0] if named else None)

    def _of_key(self, shown: str, path: str) -> tuple[str, list[str]]:
        """The client's name, and the session in its API key. Raises ApiError if the key is wrong."""
        key, colon, session = shown.partition(":")
        named = [session] if colon else []
        if self._rules.keys is None or path in self.without_key:
            return ANYONE, named
        if (found := self._rules.keys.find(key)) is None:
            text = "the API key is wrong or missing; send `Authorization: Bearer KEY`, or KEY:SESSION"
            raise ApiError(text, 401, code="invalid_api_key")
        return found.name, named


def _shown_key(headers: dict[str, str]) -> str:
    """The key of a request: OpenAI's clients send it as a bearer token, Anthropic's in a header of its own."""
    scheme, _, shown = headers.get("authorization", "").partition(" ")
    return shown.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
