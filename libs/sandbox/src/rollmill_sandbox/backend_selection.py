"""Starts the server of the first backend that contains hostile programs."""

from __future__ import annotations

import sys
from typing import Literal, get_args

import rollmill_sandbox.probe as probe
from rollmill_sandbox.backend import BackendName
from rollmill_sandbox.client import ForkServer
from rollmill_sandbox.errors import SandboxError
from rollmill_sandbox.exchange import submit_job
from rollmill_sandbox.protocol import Job, killed_result
from rollmill_sandbox.root_filesystem import FilesystemView

BackendChoice = Literal["auto", "namespaces", "landlock", "plain"]
SAFE_BACKENDS: tuple[BackendName, ...] = ("namespaces", "landlock")
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


def start_server(backend: BackendChoice, view: FilesystemView) -> ForkServer:
    """Start a server that passes the probe. Raises SandboxError naming what is missing."""
    if backend not in get_args(BackendChoice):
        raise SandboxError(f"unknown backend {backend!r}; valid: {', '.join(get_args(BackendChoice))}")
    if sys.platform != "linux":
        raise SandboxError(f"no sandbox on {sys.platform}: it needs Linux")
    missing = []
    for name in SAFE_BACKENDS if backend == "auto" else (backend,):
        try:
            return _run_probe(ForkServer(name, view))
        except SandboxError as error:
            missing.append(f"{name}: {error}. {_NEEDS[name]}.")
    raise SandboxError(
        "\n".join(["no safe sandbox can be built here.", *missing])
        + '\nbackend="plain" runs programs without any isolation.'
    )


def _run_probe(server: ForkServer) -> ForkServer:
    if server.backend != "plain":
        try:
            probe.check_probe(submit_job(server, Job(probe.PROGRAM, b"", {}, probe.LIMITS)) or killed_result(0.0))
        except BaseException:
            server.close()
            raise
    return server
