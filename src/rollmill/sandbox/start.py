"""Starts the server of the first backend that keeps hostile programs in."""

from __future__ import annotations

import sys
from typing import Literal, get_args

import rollmill.sandbox.probe as probe
from rollmill.sandbox.errors import SandboxError
from rollmill.sandbox.exchange import exchange
from rollmill.sandbox.process import Server
from rollmill.sandbox.root import View
from rollmill.sandbox.walls import BackendName
from rollmill.sandbox.wire import Job, killed

Backend = Literal["auto", "namespaces", "landlock", "plain"]
SAFE: tuple[BackendName, ...] = ("namespaces", "landlock")
"""The backends that isolate, in the order in which they are tried."""

_NEEDS: dict[BackendName, str] = {
    "namespaces": (
        "It needs Linux 5.12, seccomp, and user namespaces (user.max_user_namespaces above 0, and neither "
        "kernel.unprivileged_userns_clone nor AppArmor against them; in a container, a seccomp profile that lets "
        "`unshare` and `mount` through)"
    ),
    "landlock": "It needs Linux 6.2 with Landlock among its security modules, and seccomp",
    "plain": "It needs Linux",
}


def start(backend: Backend, view: View) -> Server:
    """A server that has passed the probe. Raises SandboxError that says what is missing."""
    if backend not in get_args(Backend):
        raise SandboxError(f"there is no backend {backend!r}; there are {', '.join(get_args(Backend))}")
    if sys.platform != "linux":
        raise SandboxError(f"no sandbox on {sys.platform}: it needs Linux")
    missing = []
    for name in SAFE if backend == "auto" else (backend,):
        try:
            return _probed(Server(name, view))
        except SandboxError as error:
            missing.append(f"{name}: {error}. {_NEEDS[name]}.")
    raise SandboxError(
        "\n".join(["no safe sandbox can be built here.", *missing])
        + '\nbackend="plain" runs programs without any isolation.'
    )


def _probed(server: Server) -> Server:
    if server.backend != "plain":
        try:
            probe.check(exchange(server, Job(probe.PROGRAM, b"", {}, probe.LIMITS)) or killed(0.0))
        except BaseException:
            server.close()
            raise
    return server
