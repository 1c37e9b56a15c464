"""ASGI middleware of every server here: who may ask, how often, and how long and how slow a request may be."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any

from rollmill.apps.serve.web import RequestRefusedError
from rollmill.apps.serve.web.keys import KeyRateLimiter

Scope = MutableMapping[str, Any]
ASGIMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[ASGIMessage]]
Send = Callable[[ASGIMessage], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_S = 60.0
"""Seconds for a whole body to arrive."""
_SHORT_BODY, _SHORT_BODY_S = 2**14, 2.0
"""Bytes of a body that a refusal waits for, and seconds for them."""
MOST_BODIES = 32
"""Bodies of the largest size that are held at the same time; this bounds their memory."""


class GuardMiddleware(ABC):
    """Admits or refuses requests, applies rate limits, and reads bodies before the application sees them.

    Args:
        most_bytes: longest body.
        body_s: seconds for a whole body to arrive.
        bodies: longest bodies that are held at the same time.
    """

    unlimited = ("/health", "/metrics")
    """Paths without rate limits, whose bodies are not read: a server can always be watched, and those without a key
    cannot use up what others need."""
    holds = False  #: whether the application keeps a body until it has answered

    def __init__(
        self,
        app: ASGIApp,
        rates: KeyRateLimiter,
        most_bytes: int,
        body_s: float = BODY_S,
        bodies: int = MOST_BODIES,
    ) -> None:
        self.app, self._rates = app, rates
        self._most, self._body_s, self._most_held = most_bytes, body_s, bodies * most_bytes
        self._held = 0  # bytes of bodies

    @abstractmethod
    def admit(self, scope: Scope, headers: dict[str, str]) -> str:
        """Return the name of the client. Raises RequestRefusedError."""

    @abstractmethod
    def refusal(self, scope: Scope, error: RequestRefusedError) -> tuple[str, bytes]:
        """Return the content type and body of a refusal."""

    @abstractmethod
    def answered(self, scope: Scope, start: ASGIMessage) -> None:
        """Handle the start of a response: add headers, for example."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}

        async def watched(message: ASGIMessage) -> None:
            if message["type"] == "http.response.start":
                self.answered(scope, message)
            await send(message)

        held, was_read = 0, False
        try:
            try:
                client = self.admit(scope, headers)
                body = b""
                if scope["path"] not in self.unlimited:
                    self._rates.take_request(client)
                    held = self._hold(headers)
                    was_read = True
                    body = await self._body(receive)
            except RequestRefusedError as error:
                if not was_read:
                    await self._skip_short_body(headers, receive)
                kind, text = self.refusal(scope, error)
                return await send_response(watched, error.status, error.headers() | {"content-type": kind}, text)
            if not self.holds:
                held = self._release(held)
            await self.app(scope, _replayed(body, receive), watched)
        finally:
            self._release(held)

    def _hold(self, headers: dict[str, str]) -> int:
        """Count the bytes of a body that is about to be read. Raises RequestRefusedError if it is too long."""
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdecimal()) or int(length[:20]) > self._most:
            raise self._too_long()
        size = self._most if "transfer-encoding" in headers else int(length)
        if self._held + size > self._most_held:
            text = "too many long requests come at the same time; try again in a moment"
            raise RequestRefusedError(text, 503, code="too_many_bodies", retry_s=1)
        self._held += size
        return size

    def _release(self, size: int) -> int:
        self._held -= size
        return 0

    async def _body(self, receive: Receive) -> bytes:
        try:
            async with asyncio.timeout(self._body_s):
                return await self._parts(receive)
        except TimeoutError:
            text = f"the body had not come after {self._body_s:g} s; send it again"
            raise RequestRefusedError(text, 408, code="body_timeout") from None

    async def _skip_short_body(self, headers: dict[str, str], receive: Receive) -> None:
        """Wait for the body of a request that is refused already, if it is short and on its way.

        A connection whose body has not come whole is closed after the answer, and a client that has just sent its next
        request on it would get no answer to that one.
        """
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdecimal()) or int(length[:20]) > _SHORT_BODY or "expect" in headers:
            return
        with suppress(TimeoutError, RequestRefusedError):
            async with asyncio.timeout(_SHORT_BODY_S):
                await self._parts(receive)

    async def _parts(self, receive: Receive) -> bytes:
        parts, size = list[bytes](), 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestRefusedError("the body ended too early; send it again", code="incomplete_body")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most:
                raise self._too_long()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_long(self) -> RequestRefusedError:
        text = f"the body has more than the {self._most} bytes that are allowed; send less"
        return RequestRefusedError(text, 413, code="body_too_long")


async def send_response(send: Send, status: int, headers: dict[str, str], body: bytes) -> None:
    given = headers | {"content-length": str(len(body))}
    pairs: Iterable[tuple[bytes, bytes]] = [
        (key.encode("latin-1"), text.encode("latin-1")) for key, text in given.items()
    ]
    await send({"type": "http.response.start", "status": status, "headers": list(pairs)})
    await send({"type": "http.response.body", "body": body})


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the whole body at once, then the server's further messages."""
    parts: list[ASGIMessage] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_one() -> ASGIMessage:
        return parts.pop() if parts else await receive()

    return next_one
