"""Listening sockets and Host checks, shared by the servers of this package."""

from __future__ import annotations

import ipaddress
import socket
from functools import cache
from urllib.parse import urlsplit

from rollmill.errors import ConfigError


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
