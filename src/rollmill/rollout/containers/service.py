"""A service of the command podman on a socket of this process's own, which ends with the process."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from rollmill.errors import ConfigError

_START_S = 30.0
# The shell ends the service, and removes its folder, when the process that holds its stdin open is gone: a pipe notices
# that also after kill -9, and whichever thread had started the service.
_KEEPER = """
exec 3<&0
podman system service --time 0 "unix://$1/socket" </dev/null &
service=$!
(cat <&3 >/dev/null; kill $service) &
wait $service
rm -rf "$1"
"""


def default_ulimits() -> dict[str, int]:
    """Limits of a process that podman may set here: its own are above those that some machines allow."""
    files, processes = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    try:  # podman lowers its own limit to this number
        most = int(Path("/proc/sys/kernel/pid_max").read_text())
    except (OSError, ValueError):
        most = 32768
    return {
        "nofile": 1 << 16 if files == resource.RLIM_INFINITY else min(files, 1 << 16),
        "nproc": most if processes == resource.RLIM_INFINITY else min(processes, most),
    }


class PodmanService:
    """Podman with Docker's API, started at first use and again if it has ended."""

    def __init__(self, runtime: str | None) -> None:
        groups = Path("/sys/fs/cgroup")
        both = (groups / "unified").is_dir() or not (groups / "cgroup.controllers").exists()
        if runtime is None and both and shutil.which("runc"):  # where both versions are mounted crun starts nothing
            runtime = "runc"
        self._runtime = runtime
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path()

    def url(self) -> str:
        """Start it if it does not run; return the URL of its socket. Raises ConfigError if it cannot start."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return f"unix://{self._folder}/socket"
            # a socket's path has to be short
            self._folder = Path(tempfile.mkdtemp(prefix="rollmill-podman-", dir="/tmp"))
            limits = ", ".join(f'"{name}={limit}:{limit}"' for name, limit in default_ulimits().items())
            lines = ["[containers]", f"default_ulimits = [{limits}]", "[engine]", 'events_logger = "none"']
            if self._runtime is not None:
                lines.append(f'runtime = "{self._runtime}"')
            if not Path("/run/systemd/system").is_dir():
                lines.append('cgroup_manager = "cgroupfs"')
            configuration, log = self._folder / "containers.conf", self._folder / "log"
            configuration.write_text("\n".join(lines) + "\n")
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", _KEEPER, "sh", str(self._folder)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    cwd=self._folder,  # conmon notes there that memory ran out
                    env={**os.environ, "CONTAINERS_CONF": str(configuration)},
                    start_new_session=True,
                )
            until = time.monotonic() + _START_S
            while not answers(f"{self._folder}/socket"):
                said = log.read_text(errors="replace").strip()[-500:] if log.exists() else ""
                if self._process.poll() is not None or time.monotonic() > until:
                    raise ConfigError(
                        f"environment.engine: `podman system service` did not start: {said or 'no message'}"
                    )
                time.sleep(0.02)
            return f"unix://{self._folder}/socket"


def answers(path: str) -> bool:
    """True if something listens on a socket."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as tried:
        tried.connect(path)
        return True
    return False


@cache
def podman_service(runtime: str | None) -> PodmanService:
    """Returns the service of this process with this runtime."""
    return PodmanService(runtime)
