"""The command line in real processes, without paying for its imports each time.

One process imports rollmill, has one thread, and forks a server for each `Forks`; a server forks a child per command.
The child is a process like any other: it can be killed, interrupted, or run as another user.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sources import PYTHONPATH


@dataclass(frozen=True)
class Ended:
    """How a command ended; `code` is negative for the signal that killed it."""

    code: int
    out: str
    err: str


class Forks:
    """Runs one command at a time."""

    def __init__(self) -> None:
        self._socket = _new_server()
        self._replies = self._socket.makefile("r")
        self._busy = False
        self._output = tempfile.TemporaryDirectory(prefix="forks-")

    @property
    def busy(self) -> bool:
        """True from `start` to `wait`."""
        return self._busy

    def start(
        self,
        *argv: Any,
        folder: Path,
        uid: int | None = None,
        closed: Sequence[int] = (),
        temporary: Path | None = None,
    ) -> int:
        """Start a command in `folder`, which it may be unable to write to; returns its process id.

        Args:
            closed: of the numbers 0 to 2, those of the standard streams that the command does not get.
            temporary: the folder for its temporary files.
        """
        if self._busy:  # a test that failed left it behind
            send(self.pid)
            self.wait()
        request = {"argv": [str(word) for word in argv], "folder": str(folder), "uid": uid, "output": self._output.name}
        request["closed"] = list(closed)
        request["temporary"] = None if temporary is None else str(temporary)
        for name in ("stdout", "stderr"):  # else `output` may show what the command before has written
            Path(self._output.name, name).write_bytes(b"")
        self._socket.sendall((json.dumps(request) + "\n").encode())
        self.pid, self._busy = int(self._answer()), True
        return self.pid

    def wait(self) -> Ended:
        """How the command ended."""
        code, self._busy = int(self._answer()), False
        return Ended(code, self._written("stdout"), self._written("stderr"))

    def output(self) -> str:
        """Return what the command has written until now."""
        return self._written("stdout") + self._written("stderr")

    def run(self, *argv: Any, folder: Path, uid: int | None = None, closed: Sequence[int] = ()) -> Ended:
        """start, then wait."""
        self.start(*argv, folder=folder, uid=uid, closed=closed)
        return self.wait()

    def reaches(self, happened: Callable[[], bool], limit_s: float = 120.0) -> bool:
        """Wait until something happened; False when the command ended before."""
        deadline = time.monotonic() + limit_s
        while not happened():
            if ended(self.pid):
                return False
            assert time.monotonic() < deadline, "what the test waits for does not happen"
            time.sleep(0.001)
        return True

    def close(self) -> None:
        """End the server."""
        if self._busy:
            send(self.pid)
            self.wait()
        self._replies.close()
        self._socket.close()
        self._output.cleanup()

    def _written(self, name: str) -> str:
        return Path(self._output.name, name).read_text(errors="replace")

    def _answer(self) -> str:
        line = self._replies.readline()
        assert line, "the server ended"
        return line


@contextmanager
def forks() -> Iterator[Forks]:
    """A server that ends with the block."""
    server = Forks()
    try:
        yield server
    finally:
        server.close()


def send(pid: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal; False when the process has ended."""
    if ended(pid):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def ended(pid: int) -> bool:
    """Whether a process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


_importer: list[tuple[int, socket.socket]] = []
"""Id of the process that uses it, and the socket of the process that has imported rollmill."""


def _new_server() -> socket.socket:
    """Return a connection to a new server."""
    if not _importer or _importer[0][0] != os.getpid():
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(filter(None, [PYTHONPATH, os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, __file__, str(theirs.fileno())]
        fds, nothing = [theirs.fileno()], subprocess.DEVNULL
        subprocess.Popen(command, pass_fds=fds, stdin=nothing, stdout=nothing, env=environment, start_new_session=True)
        theirs.close()
        _importer[:] = [(os.getpid(), ours)]
    ours, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(_importer[0][1], [b"\n"], [theirs.fileno()])
    return ours


def _fork_servers(requests: socket.socket) -> None:
    """Fork a server for each socket that comes, until the tests have ended."""
    for module in ("cli", "launch", "quickstart.addition"):
        import_module(f"rollmill.{module}")
    with redirect_stdout(io.StringIO()):
        import_module("rollmill.cli").main(["--version"])  # imports all commands
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # servers are not waited for
    while (found := socket.recv_fds(requests, 1, 1))[0]:
        with socket.socket(fileno=found[1][0]) as connection:
            if os.fork() == 0:
                requests.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                _serve(connection)
                os._exit(0)


def _serve(connection: socket.socket) -> None:
    """Run one command after the other until the connection is closed."""
    for line in connection.makefile("r"):
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.close(connection.detach())
            _child(request)
        connection.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _child(request: dict[str, Any]) -> None:
    """Become the command: its own files for output, its own folder, its own user."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(request["output"], name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
    os.chdir(request["folder"])
    if request["uid"] is not None:
        os.setgroups([])
        os.setgid(request["uid"])
        os.setuid(request["uid"])
    for number in request["closed"]:  # as Python does it at its start
        os.close(number)
        name = ("stdin", "stdout", "stderr")[number]
        setattr(sys, name, None)
        setattr(sys, f"__{name}__", None)
    if request["temporary"] is not None:
        os.environ["TMPDIR"] = tempfile.tempdir = request["temporary"]
    code = 1
    try:
        from rollmill.cli import main

        code = main(request["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    _fork_servers(socket.socket(fileno=int(sys.argv[1])))
