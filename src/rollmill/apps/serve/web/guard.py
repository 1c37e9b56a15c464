"""Request checks of servers with pages: hosts, cross-site requests and tokens, and security headers of responses.

A page in the same browser may send requests to a server on this machine. Four checks reject them: the name in `Host`
must be this machine's (against DNS rebinding), `Origin` and `Sec-Fetch-Site` must be the page's own, forms carry a
secret of the server, and JSON needs a content type that other sites may not send without a preflight request.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollmill.apps.serve.web import RequestRefusedError, is_own_host
from rollmill.apps.serve.web.keys import ANYONE, KeyRing

if TYPE_CHECKING:
    from starlette.requests import Request

TOKEN_COOKIE, TOKEN_CLIENT = "rollmill-token", "token"
CLIENT = "rollmill.client"
"""Key of the ASGI scope: the name of the client."""
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "form-action": "'self'",
    "base-uri": "'none'",
    "frame-ancestors": "'none'",
}
_HEADERS = {
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
        """Returns the name of the client. Raises RequestRefusedError for a request that must not be answered."""
        host = request.headers.get("host", "")
        if not is_own_host(host, self.host):
            raise RequestRefusedError(
                f"the request is for the host {host[:100]!r}, which is not this server", 403, code="refused"
            )
        site, mode = request.headers.get("sec-fetch-site"), request.headers.get("sec-fetch-mode")
        reads = request.method in ("GET", "HEAD")
        navigates = reads and mode == "navigate"
        if site not in (None, "same-origin", "none") and not navigates:
            raise _refused("requests from other sites are refused", 403)
        origin = request.headers.get("origin")
        if not reads and origin is not None and origin.partition("://")[2] != host:
            raise _refused(f"requests from other sites ({origin[:100]!r}) are refused", 403)
        client = self._client(request)
        if request.method == "POST" and (
            "content-length" not in request.headers or "transfer-encoding" in request.headers
        ):
            raise _refused("send Content-Length", 411)
        return client

    def check_form(self, form: dict[str, str]) -> None:
        """Raises RequestRefusedError unless the form comes from a page of this server."""
        if not secrets.compare_digest(form.get("secret", "").encode(), self.form_secret.encode()):
            raise RequestRefusedError(
                "the form is of another server or an earlier start of it: reload the page", 403, code="refused"
            )

    def is_key(self, shown: str) -> bool:
        """Returns whether `shown` is one of the server's keys."""
        return self.keys is not None and self.keys.find(shown) is not None

    def _client(self, request: Request) -> str:
        if self.keys is None:
            return ANYONE
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        shown = bearer if scheme.lower() == "bearer" else request.cookies.get(TOKEN_COOKIE, "")
        if (key := self.keys.find(shown)) is None:
            raise RequestRefusedError(
                "open the address that was printed, or send `Authorization: Bearer TOKEN`", 401, code="refused"
            )
        return key.name


def _refused(message: str, status: int) -> RequestRefusedError:
    return RequestRefusedError(message, status, code="refused")


def security_headers(policy: Mapping[str, str] | None = None) -> list[tuple[bytes, bytes]]:
    """Returns security headers: run only this server's scripts, forbid frames, store nothing.

    Args:
        policy: further directives of the Content-Security-Policy, or others in place of these.
    """
    directives = "; ".join(f"{name} {sources}" for name, sources in (_POLICY | dict(policy or {})).items())
    headers = {"content-security-policy": directives} | _HEADERS
    return [(name.encode(), value.encode()) for name, value in headers.items()]
