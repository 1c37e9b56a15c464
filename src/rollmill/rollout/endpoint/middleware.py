"""Checks that every request passes first: access, body size, and the session it belongs to; and metrics of requests."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from rollmill.rollout.endpoint.protocol import ApiError
from rollmill.web import is_own_host

Scope = MutableMapping[str, Any]
ASGIMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[ASGIMessage]]
Send = Callable[[ASGIMessage], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

SESSION_SCOPE_KEY = "rollmill.session"
"""Key of the ASGI scope: the name of the request's session, or None."""
_PREFIX = re.compile(r"/s/([^/]*)(/v1/.*|/feedback|/commit)")
_NAME = re.compile(r"[A-Za-z0-9._~-]{1,128}")
_BODY_S = 60.0
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_OPEN = ("/health",)
_ROUTES = frozenset(
    ["/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/feedback", "/commit"]
)


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Access rules of the server.

    Attributes:
        host: the address listened on.
        key: API key of requests, which may append `:SESSION`; None: not required.
        most_bytes: longest body.
    """

    host: str
    key: str | None
    most_bytes: int = 8 * 2**20


class EndpointMetrics:
    """The metrics of one server for Prometheus; all names begin with `rollmill_`.

    Raises ImportError without prometheus_client (extra `serve`).
    """

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


class EndpointMiddleware:
    """ASGI middleware that applies the rules, reads the body and counts requests."""

    def __init__(self, app: ASGIApp, rules: AccessRules, gauges: EndpointMetrics) -> None:
        self._app, self._rules, self._gauges = app, rules, gauges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}

        async def counted(message: ASGIMessage) -> None:
            if message["type"] == "http.response.start":
                known = scope["path"] if scope["path"] in _ROUTES else "other"
                self._gauges.requests.labels(known, message["status"]).inc()
                message["headers"] = [*message.get("headers", []), (b"x-content-type-options", b"nosniff")]
                if (session := scope.get(SESSION_SCOPE_KEY)) is not None:
                    message["headers"].append((b"x-session-id", session.encode()))
            await send(message)

        try:
            self._check_origin(headers)
            scope[SESSION_SCOPE_KEY] = self._session(scope, headers)
            body = await self._body(headers, receive)
        except ApiError as error:
            return await _refuse(error, counted)
        await self._app(scope, _replayed(body, receive), counted)

    def _check_origin(self, headers: dict[str, str]) -> None:
        """Refuse requests made by web pages in a browser on this machine."""
        if not is_own_host(headers.get("host", ""), self._rules.host):
            text = "the request is for another host than this server; use its address, or the name that --host gives"
            raise ApiError(text, 403, code="wrong_host")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise ApiError("requests of web pages are refused", 403, code="cross_site")

    def _session(self, scope: Scope, headers: dict[str, str]) -> str | None:
        """The session named by the request's path, header or key."""
        named: list[str] = []
        if (match := _PREFIX.fullmatch(scope["path"])) is not None:
            named.append(match[1])
            scope["path"] = match[2]
            scope["raw_path"] = match[2].encode("utf-8", "replace")
        if "x-session-id" in headers:
            named.append(headers["x-session-id"])
        named += self._of_key(headers.get("authorization", ""), scope["path"])
        for name in named:
            if not _NAME.fullmatch(name):
                text = "a session's name has 1 to 128 letters, digits and . _ ~ -"
                raise ApiError(text, code="invalid_session", param="X-Session-Id")
        if len(set(named)) > 1:
            text = f"the request names {len(set(named))} sessions ({', '.join(named)}); name one"
            raise ApiError(text, code="invalid_session", param="X-Session-Id")
        return named[0] if named else None

    def _of_key(self, header: str, path: str) -> list[str]:
        """The session in the API key. Raises ApiError if the key is wrong."""
        scheme, _, shown = header.partition(" ")
        shown = shown.strip() if scheme.lower() == "bearer" else ""
        key, colon, session = shown.partition(":")
        needed = None if path in _OPEN else self._rules.key
        if needed is not None and not secrets.compare_digest(key.encode(), needed.encode()):
            text = "the API key is wrong or missing; send `Authorization: Bearer KEY`, or KEY:SESSION"
            raise ApiError(text, 401, code="invalid_api_key")
        return [session] if colon else []

    async def _body(self, headers: dict[str, str], receive: Receive) -> bytes:
        most = self._rules.most_bytes
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdecimal()) or int(length[:20]) > most:
            raise _too_long(most)
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(_BODY_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError("the body ended too early; send it again", code="incomplete_body")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise _too_long(most)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(f"the body had not come after {_BODY_S:.0f} s", 408, code="body_timeout") from None


def _too_long(most: int) -> ApiError:
    return ApiError(f"the body is longer than {most} bytes; send less", 413, code="body_too_long")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the whole body at once, then the server's further messages."""
    parts: list[ASGIMessage] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_one() -> ASGIMessage:
        return parts.pop() if parts else await receive()

    return next_one


async def _refuse(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body()).encode()
    headers = [(key.encode(), value.encode()) for key, value in error.headers().items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
