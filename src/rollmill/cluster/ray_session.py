"""Ray: started where none is running, or joined by its address."""

from __future__ import annotations

import os
import socket
from typing import Any

from rollmill.core.errors import ConfigError

_CONNECT_S = 10.0


def ray_module() -> Any:
    """The library. Raises ConfigError where it is missing."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("placement: ray needs the library: pip install 'rollmill[ray]'") from error
    return ray


def join(address: str | None) -> str:
    """Join the Ray of `address`, or start one on this machine; says where it is. Once per process.

    Raises ConfigError where there is none at that address.
    """
    ray = ray_module()
    if ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # actors are the run itself
    if address is not None:
        _require_reachable(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        options["include_dashboard"] = False
    try:
        found = ray.init(address=address or "local", **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"placement.address: no Ray at {address}: {error}; start one with `ray start`") from error
    return str(found.address_info["gcs_address"])


def host_address() -> str:
    """By which other hosts of the cluster reach this one."""
    return str(ray_module().util.get_node_ip_address())


def _require_reachable(address: str) -> None:
    """Raises ConfigError where nothing listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        text = f"placement.address: no Ray at {address}: {error.strerror or error}; start one with `ray start --head`"
        raise ConfigError(text) from None
