"""The caller's side of the fork server: starts it, hands it jobs, notices its end."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollmill.sandbox.backend import BackendName
from rollmill.sandbox.cgroups import remove_groups
from rollmill.sandbox.errors import SandboxError
from rollmill.sandbox.protocol import CONTROL
from rollmill.sandbox.root_filesystem import FilesystemView
from rollmill.sandbox.visible_files import find_interpreter

START_LIMIT_S = 60.0
"""Longest wait for a server to be ready; it takes about 50 ms."""
_END_LIMIT_S = 5.0
_PACKAGE = Path(__file__).resolve().parents[1]


class ForkServer:
    """One fork server. Raises SandboxError if it cannot start."""

    def __init__(self, backend: BackendName, view: FilesystemView) -> None:
        self.backend = backend
        self.cgroups = ""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [str(theirs.fileno()), json.dumps({"backend": backend, "binds": view.binds, "hidden": view.hidden})]
        with theirs:
            self._popen = subprocess.Popen(
                [*interpreter_command("from rollmill.sandbox.fork_server import main; main()"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=program_environment_vars(),
                cwd="/",
                start_new_session=True,
            )
        words = self._first_words()
        self.landlock = int(words["landlock"])
        self.cgroups, self.no_cgroups = str(words["cgroups"]), str(words["no_cgroups"])
        """The folder of its control groups; or why there are none."""

    @property
    def safe(self) -> bool:
        """Whether its backend isolates programs."""
        return self.backend != "plain"

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """Whether it still holds its end of the control socket."""
        if self._control.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._control, 0)
        return not poll.poll(0)

    def submit(self, seconds: float) -> socket.socket | None:
        """The socket of a new job, which the server kills after so many seconds; None if the server has ended."""
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [CONTROL.pack(seconds)], [theirs.fileno()])
            except OSError:  # it ended, or another job closed it
                mine.close()
                return None
        return mine

    def close(self) -> None:
        """End it, and with it every job, and wait until it is gone."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold the socket as well
        self._control.close()
        if self.backend != "namespaces":  # it has folders to remove
            self._popen.send_signal(signal.SIGCONT)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(_END_LIMIT_S)
        self._popen.kill()
        self._popen.wait()
        assert self._popen.stderr is not None
        self._popen.stderr.close()
        if self.cgroups:
            remove_groups(self.cgroups)

    def _first_words(self) -> dict[str, Any]:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        came = poll.poll(START_LIMIT_S * 1000)
        words = self._control.recv(1 << 16) if came else b""
        found = json.loads(words or b'{"error": ""}')
        if "error" in found:
            self._popen.kill()
            assert self._popen.stderr is not None
            said = found["error"] or self._popen.stderr.read().decode(errors="replace").strip()[-2000:]
            self.close()
            raise SandboxError(f"the sandbox's server cannot start: {said or f'no word in {START_LIMIT_S:g} s'}")
        return dict(found)


def interpreter_command(statements: str) -> list[str]:
    """The command that runs statements in a bare interpreter with this package, but none of its dependencies."""
    names = {"rollmill": "", "rollmill.sandbox": "sandbox"}
    folders = {name: str(_PACKAGE / below) for name, below in names.items()}
    packages = (  # empty packages: their own __init__ would import the rest
        "import sys, types\n"
        f"for name, folder in {folders!r}.items():\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "    sys.modules[name].__path__ = [folder]\n"
    )
    return [find_interpreter(), "-I", "-S", "-B", "-X", "utf8", "-c", packages + statements]


def program_environment_vars() -> dict[str, str]:
    """The whole environment of a program; nothing of the caller's."""
    return {
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "sandbox",
        "LANG": "C.UTF-8",
        "PATH": os.path.dirname(find_interpreter()),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
