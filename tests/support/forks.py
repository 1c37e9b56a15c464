"""Python programs in processes of their own, without paying for their imports each time.

A fork server (fork_server.py), one for all workers of pytest, has imported rollmill, torch and transformers. It forks
a child for each program. The child is a process like any other: it can be killed, interrupted, or run as another
user. `Forks` runs the command line, `ForkedPopen` any program as subprocess.Popen does.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from support.sources import PYTHONPATH

FOLDER = "ROLLMILL_FORK_SERVER"
"""Environment variable: a folder with the server's socket, and the pipe that its users keep open."""
_HERE = Path(__file__).parent
_ENVIRONMENT = dict(os.environ)  # tests change it


@dataclass(frozen=True)
class Ended:
    """How a command ended; `code` is negative for the signal that killed it."""

    code: int
    out: str
    err: str


class ForkedPopen(subprocess.Popen[Any]):
    """A Popen of a Python program (`sys.executable`, then a file, -c or -m) that the fork server starts.

    The child has a session of its own, and imports nothing from its folder, as with -P, which is the only option of the
    interpreter that may be given: programs that need a fresh one use subprocess.

    Args:
        closed: of the numbers 0 to 2, those of the standard streams that the program does not get.
    """

    def __init__(self, args: Sequence[Any], *, closed: Sequence[int] = (), **options: Any) -> None:
        self._closed_streams = list(closed)
        self._status: int | None = None
        super().__init__(args, **options)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *more: Any) -> None:
        (pass_fds, cwd, env, _, _, shell, *streams, _, gid, gids, uid, _, _, _) = more
        interpreter, *words = [os.fspath(each) for each in args]
        assert interpreter == sys.executable
        assert (shell, preexec_fn, executable) == (False, None, None)
        if words[0] == "-P":
            words = words[1:]
        given = [number if own == -1 else own for number, own in enumerate((streams[0], streams[3], streams[5]))]
        request = {
            "argv": words,
            "folder": os.fspath(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "closed": self._closed_streams,
            "numbers": [0, 1, 2, *pass_fds],
            "ids": [uid, gid, gids],
        }
        self._server = _connect()
        body = json.dumps(request).encode()
        socket.send_fds(self._server, [len(body).to_bytes(8, "big")], [*given, *pass_fds])
        self._server.sendall(body)
        self._replies = self._server.makefile("r")
        self.pid = self._number()
        self._child_created = True
        self._close_pipe_fds(*streams)

    def _number(self) -> int:
        line = self._replies.readline()
        assert line, "the fork server has ended"
        return int(line)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """As os.waitpid: 0 for the id while it runs."""
        if self._status is None:
            if not select.select([self._server], [], [], 0 if wait_flags & os.WNOHANG else None)[0]:
                return 0, 0
            self._status = self._number()
            self._replies.close()
            self._server.close()
        return self.pid, self._status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._child_created and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


class Forks:
    """Runs one command at a time."""

    def __init__(self) -> None:
        self._process: ForkedPopen | None = None
        self._output = tempfile.TemporaryDirectory(prefix="forks-")

    @property
    def busy(self) -> bool:
        """True from `start` to `wait`."""
        return self._process is not None

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
        self._end()  # a test that failed left it behind
        environment = _ENVIRONMENT | _defaults() | ({} if temporary is None else {"TMPDIR": str(temporary)})
        user = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
        with self._file("stdout") as out, self._file("stderr") as err:
            self._process = ForkedPopen(
                [sys.executable, "-m", "rollmill", *map(str, argv)],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, closed=closed, **user,
            )  # fmt: skip
        self.pid = self._process.pid
        return self.pid

    def wait(self) -> Ended:
        """How the command ended."""
        assert self._process is not None
        code, self._process = self._process.wait(), None
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
        """End a command that still runs."""
        self._end()
        self._output.cleanup()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self.wait()

    def _file(self, name: str) -> IO[bytes]:
        return Path(self._output.name, name).open("wb")

    def _written(self, name: str) -> str:
        return Path(self._output.name, name).read_text(errors="replace")


@contextmanager
def forks() -> Iterator[Forks]:
    """Commands whose last one ends with the block."""
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


def share_server() -> None:
    """Have this process, and all that it starts from now on, use one fork server, which ends after the last of them."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = _ENVIRONMENT[FOLDER] = tempfile.mkdtemp(prefix="forks-")
        os.mkfifo(Path(os.environ[FOLDER], "users"))
        atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)
    os.open(Path(os.environ[FOLDER], "users"), os.O_RDWR)  # until this process ends


def fork_ranks_and_workers() -> None:
    """Have rollmill's ranks and Ray's workers forked, too, as far as this process has imported what starts them."""
    if (rank_handle := sys.modules.get("rollmill.trainer.distributed.rank_handle")) is not None:
        names = {"Popen": ForkedPopen, **{name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT")}}
        rank_handle.__dict__["subprocess"] = SimpleNamespace(TimeoutExpired=subprocess.TimeoutExpired, **names)
    if (session := sys.modules.get("rollmill.ray_session")) is not None:
        join = session._joined

        def joined(*given: Any) -> Any:
            if (constants := sys.modules.get("ray._private.ray_constants")) is not None:
                constants.__dict__["SETUP_WORKER_FILENAME"] = str(_HERE / "ray_worker.py")
            return join(*given)

        session.__dict__["_joined"] = joined


def _defaults() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [PYTHONPATH, _ENVIRONMENT.get("PYTHONPATH")]))
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


def _connect() -> socket.socket:
    """Return a connection to the fork server, which the first one starts."""
    if FOLDER not in os.environ:
        share_server()
    folder = Path(os.environ[FOLDER])
    address = str(folder / "socket")
    connection = socket.socket(socket.AF_UNIX)
    with (folder / "lock").open("w") as lock:  # the server ends only while it holds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            Path(address).unlink(missing_ok=True)  # of a server that was killed
            _start_server(folder, address)
            connection.connect(address)
    return connection


def _start_server(folder: Path, address: str) -> None:
    """Start the fork server, to which processes can connect at once."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        command = [sys.executable, "-m", "support.fork_server", str(listener.fileno()), str(folder)]
        nothing, environment, fds = subprocess.DEVNULL, _ENVIRONMENT | _defaults(), [listener.fileno()]
        environment["PYTHONPATH"] = os.pathsep.join([str(_HERE.parent), environment["PYTHONPATH"]])
        subprocess.Popen(command, pass_fds=fds, stdin=nothing, stdout=nothing, env=environment, start_new_session=True)
