"""The fork server of the tests: imports what most programs import, then forks a child for each request (forks.py).

run as: python -m support.fork_server NUMBER_OF_THE_LISTENING_SOCKET FOLDER
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from support.forks import fork_ranks_and_workers


def import_modules() -> None:
    """Import all commands, and what runs of a tiny model import."""
    for module in ("cli", "launch", "quickstart.addition", "trainer.distributed.worker"):
        import_module(f"rollmill.{module}")
    with redirect_stdout(io.StringIO()):
        import_module("rollmill.cli").main(["--version"])
    fork_ranks_and_workers()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread"
    assert "ray" not in sys.modules, "it reads the environment when it is imported"


class ForkServer:
    """Forks children and tells their ends, until no process holds the pipe of its users open."""

    def __init__(self, listener: socket.socket, folder: Path) -> None:
        self._listener, self._folder = listener, folder
        self._users = os.open(folder / "users", os.O_RDONLY | os.O_NONBLOCK)
        self._children: dict[int, socket.socket] = {}
        self._ended, ended = os.pipe()
        os.set_blocking(self._ended, False)
        os.set_blocking(ended, False)
        signal.set_wakeup_fd(ended, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()
        for number, events in ((listener, select.POLLIN), (self._ended, select.POLLIN), (self._users, 0)):
            self._poll.register(number, events)

    def serve(self) -> None:
        while not self._is_unused():
            ready = dict(self._poll.poll())
            if self._ended in ready:
                with suppress(BlockingIOError):
                    while os.read(self._ended, 4096):
                        pass
            self._reap()
            if self._listener.fileno() in ready:
                self._fork(self._listener.accept()[0])

    def _is_unused(self) -> bool:
        """True if all users have ended; no process can begin to use the server then."""
        users = select.poll()
        users.register(self._users, 0)
        if not users.poll(0):
            return False
        with suppress(FileNotFoundError), (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not users.poll(0):
                return False
            (self._folder / "socket").unlink()
        return True

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                with self._children.pop(found[0]) as connection, suppress(OSError):  # who asked may have ended
                    connection.sendall(f"{found[1]}\n".encode())

    def _fork(self, connection: socket.socket) -> None:
        with suppress(OSError):
            head, numbers, _, _ = socket.recv_fds(connection, 8, 64)
            if not head:
                connection.close()
                return
            body = bytearray()
            while len(body) < int.from_bytes(head, "big"):
                if not (part := connection.recv(1 << 20)):
                    return
                body += part
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for number in (self._ended, self._users):
                    os.close(number)
                for each in (self._listener, connection, *self._children.values()):
                    each.close()
                run_program(json.loads(body), numbers)
            for number in numbers:
                os.close(number)
            self._children[pid] = connection
            connection.sendall(f"{pid}\n".encode())


def run_program(request: dict[str, Any], numbers: list[int]) -> NoReturn:
    """Become the program: its own files, folder, user, environment and arguments."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
        _place(numbers, request["numbers"])
        os.chdir(request["folder"])
        uid, gid, gids = request["ids"]
        if gids is not None:
            os.setgroups(gids)
        if gid is not None:
            os.setgid(gid)
        if uid is not None:
            os.setuid(uid)
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [each for each in path if each and each not in sys.path] + sys.path
        for number in request["closed"]:  # as Python does it at its start
            os.close(number)
            name = ("stdin", "stdout", "stderr")[number]
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
        code = _exit_code(request["argv"])
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.flush()
    except BaseException:
        traceback.print_exc()
        code = code or 1
    finally:
        os._exit(code)


def _exit_code(words: list[str]) -> int:
    """Run a program as `python WORDS` does."""
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def _place(numbers: list[int], targets: list[int]) -> None:
    """Give files the numbers that the program knows them by."""
    above = [fcntl.fcntl(number, fcntl.F_DUPFD, max(targets) + 1) for number in numbers]
    for number in numbers:
        os.close(number)
    for number, target in zip(above, targets, strict=True):
        os.dup2(number, target)
        os.close(number)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as opened:
        server = ForkServer(opened, Path(sys.argv[2]))
        import_modules()
        gc.collect()
        gc.freeze()
        server.serve()
