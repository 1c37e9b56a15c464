"""Ray: started where none is running, or joined by its address."""

from __future__ import annotations

import os
import socket
from typing import Any

from rollmill.errors import ConfigError

_CONNECT_S = 10.0
_TOO_LATE = "timed out during startup"
_asked: list[str | None] = []  # the address that this process was told to join


def ray_module() -> Any:
    """The library. Raises ConfigError where it is missing."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("placement: ray needs the library: pip install 'rollmill[ray]'") from error
    return ray


def join(address: str | None) -> str:
    """Join the Ray of `address`, or start one on this machine; says where it is. Once per process.

    Raises ConfigError where there is none at that address, it is protected by a token that this process has not, or
    this process has joined another one.
    """
    ray = ray_module()
    if ray.is_initialized():
        if _asked and _asked != [address]:
            text = f"this process has joined {_asked[0] or 'a Ray of its own'} before, and can join one only"
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
    _asked[:] = [address]
    return str(found.address_info["gcs_address"])


def _joined(ray: Any, address: str, options: dict[str, Any]) -> Any:
    """What `ray.init` gives; tried twice where Ray gives its own processes too little time to start, which it does on
    busy machines and says by a plain Exception. Raises ConfigError when that happens again, and what else it raises.
    """
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


def host_address() -> str:
    """By which other hosts of the cluster reach this one."""
    return str(ray_module().util.get_node_ip_address())


def _why_not(address: str | None, error: BaseException) -> str:
    """Why there is no joining the Ray of that address, and what to do. Ray itself says only in a cause that a token is
    missing or wrong."""
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
    """Raises ConfigError where nothing listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        text = f"placement.address: no Ray at {address}: {error.strerror or error}; start one with `ray start --head`"
        raise ConfigError(text) from None
