"""The command line in real processes, without paying for its imports each time.

A server process imports rollmill once, has one thread, and forks a child per command; the child is a process like any
other: it can be killed, interrupted, or run as another user.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

SRC = Path(__file__).resolve().parents[1] / "src"


@dataclass(frozen=True)
class Ended:
    """How a command ended; `code` is negative for the signal that killed it."""

    code: int
    out: str
    err: str


class Forks:
    """Runs one command at a time."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SRC), "TOKENIZERS_PARALLELISM": "false"}
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._answer()
        self._busy = False
        self._output = tempfile.TemporaryDirectory(prefix="forks-")

    @property
    def busy(self) -> bool:
        """True from `start` to `wait`."""
        return self._busy

    def start(self, *argv: Any, folder: Path, uid: int | None = None) -> int:
        """Start a command in `folder`, which it may be unable to write to; returns its process id."""
        if self._busy:  # a test that failed left it behind
            send(self.pid)
            self.wait()
        request = {"argv": [str(word) for word in argv], "folder": str(folder), "uid": uid, "output": self._output.name}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        self.pid, self._busy = int(self._answer()), True
        return self.pid

    def wait(self) -> Ended:
        """How the command ended."""
        code, self._busy = int(self._answer()), False
        return Ended(code, self._written("stdout"), self._written("stderr"))

    def output(self) -> str:
        """Return what the command has written until now."""
        return self._written("stdout") + self._written("stderr")

    def run(self, *argv: Any, folder: Path, uid: int | None = None) -> Ended:
        """start, then wait."""
        self.start(*argv, folder=folder, uid=uid)
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
        assert self._server.stdin is not None
        if self._busy:
            send(self.pid)
        self._server.stdin.close()
        self._server.wait(timeout=30)
        self._output.cleanup()

    def _written(self, name: str) -> str:
        return Path(self._output.name, name).read_text(errors="replace")

    def _answer(self) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
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


def _serve() -> None:
    for module in ("cli", "launch", "quickstart.addition"):
        import_module(f"rollmill.{module}")
    with redirect_stdout(io.StringIO()):
        import_module("rollmill.cli").main(["--version"])  # imports all commands
    _say("ready")
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(request)
        _say(str(pid))
        _, status = os.waitpid(pid, 0)
        _say(str(os.waitstatus_to_exitcode(status)))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _child(request: dict[str, Any]) -> None:
    """Become the command: its own files for output, its own folder, its own user."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(request["output"], name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    os.chdir(request["folder"])
    if request["uid"] is not None:
        os.setgroups([])
        os.setgid(request["uid"])
        os.setuid(request["uid"])
    code = 1
    try:
        from rollmill.cli import main

        code = main(request["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
