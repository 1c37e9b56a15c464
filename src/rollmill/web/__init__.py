"""What the servers of this package share."""

from __future__ import annotations

import ipaddress
import socket
from functools import cache
from urllib.parse import urlsplit

from rollmill.errors import ConfigError

# Where a server listens, and whether a request is meant for it.


def open_listener(host: str, port: int) -> socket.socket:
    """A socket that takes connections; port 0 is any free one. Raises ConfigError where that is impossible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error}; give another --port (0: any)") from error


def server_url(host: str, listener: socket.socket) -> str:
    """`http://HOST:PORT` of a socket that listens on `host`, as other machines would write it."""
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_host(header: str, listening: str) -> bool:
    """Whether a Host header names the server that listens on `listening`.

    A page may have a name of its own pointed here (DNS rebinding). Addresses cannot be rebound; any port may be
    forwarded here.
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
    """Asked for once: it may take a name server seconds to answer."""
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})
