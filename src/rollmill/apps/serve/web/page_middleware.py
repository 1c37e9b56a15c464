"""ASGI middleware of servers with pages: applies a guard to every request, and adds security headers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import RedirectResponse

from rollmill.apps.serve.web import RequestRefusedError
from rollmill.apps.serve.web.guard import CLIENT, TOKEN_COOKIE, RequestGuard, security_headers
from rollmill.apps.serve.web.keys import KeyRateLimiter
from rollmill.apps.serve.web.middleware import BODY_S, ASGIApp, ASGIMessage, GuardMiddleware, Receive, Scope, Send


class PageMiddleware(GuardMiddleware):
    """Applies the rules of a guard to every request, and adds security headers to every response.

    Args:
        is_program: whether a request is to be refused as JSON rather than as text.
        policy: further directives of the Content-Security-Policy, or others in place of the usual ones.
    """

    holds = True

    def __init__(
        self,
        app: ASGIApp,
        guard: RequestGuard,
        is_program: Callable[[Request], bool],
        *,
        most_bytes: int,
        body_s: float = BODY_S,
        policy: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(app, KeyRateLimiter(guard.keys.keys if guard.keys else ()), most_bytes, body_s)
        self._guard, self._is_program, self._headers = guard, is_program, security_headers(policy)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The printed address sets a cookie, so that the key does not stay in the browser's address bar."""
        if scope["type"] == "http":
            request = Request(scope)
            shown = request.query_params.get("token")
            if shown is not None and request.url.path == "/" and self._guard.is_key(shown):
                opened = RedirectResponse("/", status_code=303)
                opened.set_cookie(TOKEN_COOKIE, shown, httponly=True, samesite="strict")
                opened.raw_headers += self._headers
                return await opened(scope, receive, send)
        await super().__call__(scope, receive, send)

    def admit(self, scope: Scope, headers: dict[str, str]) -> str:
        scope[CLIENT] = client = self._guard.check(Request(scope))
        return client

    def refusal(self, scope: Scope, error: RequestRefusedError) -> tuple[str, bytes]:
        """Not a page: it would contain the form secret."""
        if self._is_program(Request(scope)):
            return "application/json", json.dumps({"error": str(error)}).encode()
        return "text/plain; charset=utf-8", str(error).encode()

    def answered(self, scope: Scope, start: ASGIMessage) -> None:
        start["headers"] = [*start.get("headers", []), *self._headers]
