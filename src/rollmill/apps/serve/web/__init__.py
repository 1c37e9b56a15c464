"""Listening sockets, Host checks and refusals, shared by the servers of this package."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from rollmill.errors import ConfigError, RollmillError


class RequestRefusedError(RollmillError):
    """A request that is not answered.

    Args:
        status: of HTTP.
        code: identifies the error for programs.
        param: the field that is wrong.
        retry_s: seconds after which to retry.
    """

    def __init__(
        self, message: str, status: int = 400, *, code: str, param: str | None = None, retry_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_s = status, code, param, retry_s

    def headers(self) -> dict[str, str]:
        """HTTP headers of the response."""
        found = {"retry-after": str(self.retry_s)} if self.retry_s is not None else {}
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of a server's connections.

    Attributes:
        connections: open ones. Beyond it the oldest that waits for a client is closed, so that new clients are served;
            one without a whole request is answered with 503.
        header_s: seconds until the headers of a request are complete, from the connection or its first byte.
        write_s: seconds without progress until a client that does not read its answer is given up.
        linger_s: seconds for a refused client to read the answer; up to four times `connections` may do that.
        keep_alive_s: seconds that a connection may rest between two requests.
    """

    connections: int = 1000
    header_s: float = 10.0
    write_s: float = 60.0
    linger_s: float = 5.0
    keep_alive_s: int = 120


def open_listener(host: str, port: int) -> socket.socket:
    """Opens a listening socket; port 0 is any free one. Raises ConfigError if that is impossible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error}; give another --port (0: any)") from error


def server_url(host: str, listener: socket.socket) -> str:
    """Returns `http://HOST:PORT` of a socket that listens on `host`, as other machines would write it."""
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_host(header: str, listening: str) -> bool:
    """Returns whether a Host header names the server that listens on `listening`.

    This stops DNS rebinding, where a page's own domain name resolves to this machine. IP addresses cannot be rebound;
    any port is accepted, because it may be forwarded.
    """
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        own = {"localhost"} if is_loopback(listening) else {"localhost", listening.lower(), *_own_names()}
        return name.removesuffix(".") in own
    return address.is_loopback or not is_loopback(listening)


@cache
def _own_names() -> frozenset[str]:
    """Returns this machine's host names; cached, because a name server may take seconds to answer."""
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})
