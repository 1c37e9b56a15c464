"""The caller's side of the fork server: starts it, sends it jobs, and detects its end."""

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

from rollmill_sandbox.backend import BackendName
from rollmill_sandbox.cgroups import remove_groups
from rollmill_sandbox.errors import SandboxError
from rollmill_sandbox.protocol import CONTROL, EARLY_BINDING
from rollmill_sandbox.root_filesystem import FilesystemView
from rollmill_sandbox.visible_files import find_interpreter

START_LIMIT_S = 60.0
"""Timeout of a server's start, which takes about 50 ms."""
_END_LIMIT_S = 5.0
_PACKAGE = Path(__file__).resolve().parent


class ForkServer:
    """One fork server. Raises SandboxError if it cannot start."""

    def __init__(self, backend: BackendName, view: FilesystemView) -> None:
        self.backend = backend
        self.cgroups = self._folders = ""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [str(theirs.fileno()), json.dumps({"backend": backend, "binds": view.binds, "hidden": view.hidden})]
        with theirs:
            self._popen = subprocess.Popen(
                [*interpreter_command("from rollmill_sandbox.fork_server import main; main()"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                env=program_environment_vars() | EARLY_BINDING,
                cwd="/",
                start_new_session=True,
            )
        status = self._read_status()
        self.landlock = int(status["landlock"])
        self.cgroups, self.no_cgroups = str(status["cgroups"]), str(status["no_cgroups"])
        """The folder of its control groups, and the reason if there are none."""
        self._folders = str(status["folders"])

    @property
    def safe(self) -> bool:
        """True if its backend isolates programs."""
        return self.backend != "plain"

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """True if it still holds its end of the control socket."""
        if self._control.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._control, 0)
        return not poll.poll(0)

    def submit(self, seconds: float) -> socket.socket | None:
        """Return the socket of a new job, which the server kills after `seconds`; None if the server has ended."""
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [CONTROL.pack(seconds)], [theirs.fileno()])
            except OSError:  # it ended, or another job closed it
                mine.close()
                return None
        return mine

    def close(self) -> None:
        """Stop it and every job, and wait for its end."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold the socket as well
        self._control.close()
        if self.backend != "namespaces":  # it has folders to remove
            self._popen.send_signal(signal.SIGCONT)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(_END_LIMIT_S)
            if self._popen.poll() and self._folders:
                self._remove_folders()
        self._popen.kill()
        self._popen.wait()
        assert self._popen.stderr is not None
        self._popen.stderr.close()
        if self.cgroups:
            remove_groups(self.cgroups)

    def _remove_folders(self) -> None:
        """Remove the folders of a server that was killed, in a process that goes on if that takes long."""
        statements = "import sys; from rollmill_sandbox.job_folders import remove_finally; remove_finally(sys.argv[1])"
        nothing = subprocess.DEVNULL
        remover = subprocess.Popen(
            [*interpreter_command(statements), self._folders],
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):
            remover.wait(_END_LIMIT_S)

    def _read_status(self) -> dict[str, Any]:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        ready = poll.poll(START_LIMIT_S * 1000)
        message = self._control.recv(1 << 16) if ready else b""
        found = json.loads(message or b'{"error": ""}')
        if "error" in found:
            self._popen.kill()
            assert self._popen.stderr is not None
            error = found["error"] or self._popen.stderr.read().decode(errors="replace").strip()[-2000:]
            self.close()
            raise SandboxError(f"the sandbox's server cannot start: {error or f'no reply in {START_LIMIT_S:g} s'}")
        return dict(found)


def interpreter_command(statements: str) -> list[str]:
    """Return the command that runs statements in a bare interpreter that can import the modules of this package."""
    package = (  # an empty one: its own __init__ would import the caller's side
        "import sys, types\n"
        "package = sys.modules['rollmill_sandbox'] = types.ModuleType('rollmill_sandbox')\n"
        f"package.__path__ = [{str(_PACKAGE)!r}]\n"
    )
    return [find_interpreter(), "-I", "-S", "-B", "-X", "utf8", "-c", package + statements]


def program_environment_vars() -> dict[str, str]:
    """Return all environment variables of a program; none are inherited from the caller."""
    return {
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "sandbox",
        "LANG": "C.UTF-8",
        "PATH": os.path.dirname(find_interpreter()),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
