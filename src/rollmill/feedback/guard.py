"""Request checks of the feedback server: hosts, cross-site requests, tokens and sizes, and security headers of
responses.

A page in the same browser may send requests to a server on this machine. Four checks reject them: the name in `Host`
must be this machine's (against DNS rebinding), `Origin` and `Sec-Fetch-Site` must be the page's own, forms carry a
secret of the server, and JSON needs a content type that other sites may not send without a preflight request.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollmill.feedback.requests import FeedbackError
from rollmill.web import is_own_host

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

MAX_BODY = 8 * 2**20
BODY_TIMEOUT_S = 60.0
TOKEN_COOKIE = "rollmill-token"
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with no-referrer, browsers send `Origin: null` with the page's own forms
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class RequestGuard:
    """Access rules of one server."""

    host: str = "127.0.0.1"  #: the address it listens on
    token: str | None = None  #: required from every request; needed if others can reach the server
    form_secret: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    def check(self, request: Request) -> None:
        """Raises FeedbackError for a request that must not be answered."""
        host = request.headers.get("host", "")
        if not is_own_host(host, self.host):
            raise FeedbackError(f"the request is for the host {host[:100]!r}, which is not this server", status=403)
        site, mode = request.headers.get("sec-fetch-site"), request.headers.get("sec-fetch-mode")
        reads = request.method in ("GET", "HEAD")
        navigates = reads and mode == "navigate"
        if site not in (None, "same-origin", "none") and not navigates:
            raise FeedbackError("requests from other sites are refused", status=403)
        origin = request.headers.get("origin")
        if not reads and origin is not None and origin.partition("://")[2] != host:
            raise FeedbackError(f"requests from other sites ({origin[:100]!r}) are refused", status=403)
        self._check_token(request)
        if request.method == "POST":
            _check_size(request)

    def check_form(self, form: dict[str, str]) -> None:
        """Raises FeedbackError unless the form comes from a page of this server."""
        if not secrets.compare_digest(form.get("secret", "").encode(), self.form_secret.encode()):
            raise FeedbackError("the form is of another server or an earlier start of it: reload the page", status=403)

    def is_token(self, shown: str) -> bool:
        """Returns whether `shown` is the server's token."""
        return self.token is not None and secrets.compare_digest(shown.encode(), self.token.encode())

    def _check_token(self, request: Request) -> None:
        if self.token is None:
            return
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        shown = bearer if scheme.lower() == "bearer" else request.cookies.get(TOKEN_COOKIE, "")
        if not self.is_token(shown):
            raise FeedbackError("open the address that was printed, or send `Authorization: Bearer TOKEN`", status=401)


def add_headers(response: Response) -> None:
    """Adds security headers: run only this server's scripts, forbid frames, store nothing."""
    for name, value in _HEADERS.items():
        response.headers[name] = value


async def read_body(request: Request) -> bytes:
    """Reads the body. Raises FeedbackError if it does not arrive within BODY_TIMEOUT_S."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.body()
    except TimeoutError as error:
        raise FeedbackError(f"no complete body within {BODY_TIMEOUT_S:.0f} s; send it again", status=408) from error


def _check_size(request: Request) -> None:
    length = request.headers.get("content-length", "")
    if not length.isdecimal() or "transfer-encoding" in request.headers:
        raise FeedbackError("send Content-Length", status=411)
    if int(length) > MAX_BODY:
        raise FeedbackError(f"the body has {length} bytes, at most {MAX_BODY} are allowed; send less", status=413)
