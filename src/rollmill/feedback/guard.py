"""Request checks of the feedback server: hosts, cross-site requests, tokens and sizes, and security headers of
responses.

A page in the same browser may send requests to a server on this machine. Four checks reject them: the name in `Host`
must be this machine's (against DNS rebinding), `Origin` and `Sec-Fetch-Site` must be the page's own, forms carry a
secret of the server, and JSON needs a content type that other sites may not send without a preflight request.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollmill.feedback.requests import FeedbackError
from rollmill.web import is_own_host
from rollmill.web.keys import ANYONE, KeyRing

if TYPE_CHECKING:
    from starlette.requests import Request

MAX_BODY = 8 * 2**20
TOKEN_COOKIE, TOKEN_CLIENT = "rollmill-token", "token"
CLIENT = "rollmill.client"
"""Key of the ASGI scope: the name of the client."""
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
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
    keys: KeyRing | None = None  #: one is required from every request; needed if others can reach the server
    form_secret: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    def check(self, request: Request) -> str:
        """Returns the name of the client. Raises FeedbackError for a request that must not be answered."""
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
        client = self._client(request)
        if request.method == "POST" and (
            "content-length" not in request.headers or "transfer-encoding" in request.headers
        ):
            raise FeedbackError("send Content-Length", status=411)
        return client

    def check_form(self, form: dict[str, str]) -> None:
        """Raises FeedbackError unless the form comes from a page of this server."""
        if not secrets.compare_digest(form.get("secret", "").encode(), self.form_secret.encode()):
            raise FeedbackError("the form is of another server or an earlier start of it: reload the page", status=403)

    def is_key(self, shown: str) -> bool:
        """Returns whether `shown` is one of the server's keys."""
        return self.keys is not None and self.keys.find(shown) is not None

    def _client(self, request: Request) -> str:
        if self.keys is None:
            return ANYONE
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        shown = bearer if scheme.lower() == "bearer" else request.cookies.get(TOKEN_COOKIE, "")
        if (key := self.keys.find(shown)) is None:
            raise FeedbackError("open the address that was printed, or send `Authorization: Bearer TOKEN`", status=401)
        return key.name


def security_headers() -> list[tuple[bytes, bytes]]:
    """Returns security headers: run only this server's scripts, forbid frames, store nothing."""
    return [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
