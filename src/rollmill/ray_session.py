"""Starts Ray if none is running, or joins it by its address."""

from __future__ import annotations

import os
import socket
from typing import Any

from rollmill.errors import ConfigError

_CONNECT_S = 10.0
_TOO_LATE = "timed out during startup"
_joined_address: list[str | None] = []  # the address that this process has joined


def ray_module() -> Any:
    """Import Ray. Raises ConfigError if it is missing."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("placement: ray needs the library: pip install 'rollmill[ray]'") from error
    return ray


def join(address: str | None) -> str:
    """Join the Ray at `address`, or start one on this machine; returns its address. Once per process.

    Raises ConfigError if there is none at that address, it is protected by a token that this process lacks, or this
    process has joined another one.
    """
    ray = ray_module()
    if ray.is_initialized():
        if _joined_address and _joined_address != [address]:
            text = f"this process has joined {_joined_address[0] or 'a Ray of its own'} before, and can join one only"
            raise ConfigError(f"placement.address: {text}; call ray.shutdown() first, or use another process")
        return str(ray.get_runtime_context().gcs_address)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # actors are the run itself
    if address is not None:
        _require_reachable(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        options["include_dashboard"] = False
    try:
        found = _joined(ray, address or "local", options)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.AuthenticationError) as error:
        raise ConfigError(f"placement.address: {_why_not(address, error)}") from error
    _joined_address[:] = [address]
    return str(found.address_info["gcs_address"])


def _joined(ray: Any, address: str, options: dict[str, Any]) -> Any:
    """Call `ray.init`, twice if Ray gives its own processes too little time to start: it does so on busy machines, with
    a plain Exception. Raises ConfigError if that happens again, and all other errors."""
    for _ in range(2):
        try:
            return ray.init(address=address, **options)
        except Exception as error:
            if _TOO_LATE not in str(error):
                raise
            ray.shutdown()
    raise ConfigError(
        "placement: Ray's own processes took longer to start than it waits for them (30 s), twice; is the machine very "
        "busy, or out of memory? Try again, or start one by `ray start --head` and name it as placement.address"
    )


def abandon_ray() -> None:
    """Leave a Ray that has died, and end what is left of one that this process has started."""
    ray_module().shutdown()
    _joined_address.clear()


def host_address() -> str:
    """The address of this host in the cluster."""
    return str(ray_module().util.get_node_ip_address())


def _why_not(address: str | None, error: BaseException) -> str:
    """Explain why Ray at that address cannot be joined. Ray reports a missing or wrong token only in a cause."""
    cause: BaseException | None = error
    while cause is not None:
        if "uthenticat" in f"{type(cause).__name__} {cause}":
            return (
                f"the Ray at {address} is protected, and this process has not its token; set RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN_PATH=FILE, or RAY_AUTH_TOKEN"
            )
        cause = cause.__cause__ or cause.__context__
    return f"no Ray at {address}: {error}; start one with `ray start`"


def _require_reachable(address: str) -> None:
    """Raise ConfigError if nothing listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        text = f"placement.address: no Ray at {address}: {error.strerror or error}; start one with `ray start --head`"
        raise ConfigError(text) from None
