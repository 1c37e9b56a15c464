"""The fork server: a process with one thread, warm and without rights, that starts a jail for each job.

It runs in a root of its own and knows nothing of the caller's process but one socket. It never reads a job.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import NoReturn

from rollmill.sandbox import kernel
from rollmill.sandbox.jail import NAMESPACES, both_filters, serve_job
from rollmill.sandbox.landlock import landlock_version
from rollmill.sandbox.root import PACKAGES, View, enter_root
from rollmill.sandbox.wire import CONTROL, Ending, pack_ending

PRELOADED = (
    *("abc", "array", "ast", "base64", "bisect", "calendar", "cmath", "collections", "collections.abc", "copy", "csv"),
    *("dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools"),
    *("json", "math", "operator", "queue", "random", "re", "statistics", "string", "struct", "sys", "textwrap"),
    *("threading", "time", "timeit", "traceback", "types", "typing", "unittest", "uuid", "encodings.idna"),
)
"""What programs import most; a child has it for nothing."""


def serve(descriptor: int, view: View) -> NoReturn:
    """Serve until the caller's end of the control socket closes."""
    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a handler would make process 1 of a job hear it
    os.umask(0o022)
    try:
        for name in PRELOADED:
            importlib.import_module(name)
        filters, landlock = both_filters(), landlock_version()
        proc = os.open("/proc", os.O_PATH)
        enter_root(view)
        gc.freeze()  # children then touch, and so copy, fewer pages
    except OSError as error:
        control.sendall(json.dumps({"error": str(error)}).encode())
        sys.exit(1)
    control.sendall(json.dumps({"landlock": landlock}).encode())
    deadlines: dict[int, tuple[int, float]] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll(1000 if deadlines else None):
            if ready != control.fileno():
                pid, _ = deadlines.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                os.waitpid(pid, 0)
                continue
            message, sockets, _, _ = socket.recv_fds(control, CONTROL.size, 1)
            if not message:
                sys.exit(0)
            caller = socket.socket(fileno=sockets[0])
            try:
                pid = kernel.clone(NAMESPACES)
            except OSError as error:
                _refuse(caller, error)
                continue
            if pid == 0:
                control.close()
                serve_job(caller, proc, landlock, filters)
            caller.close()
            process = os.pidfd_open(pid)
            deadlines[process] = (pid, time.monotonic() + CONTROL.unpack(message)[0])
            poll.register(process, select.POLLIN)
        now = time.monotonic()
        for process, (_, deadline) in deadlines.items():
            if now > deadline:  # its process 1 keeps the limit; this is for one that cannot
                signal.pidfd_send_signal(process, signal.SIGKILL)


def _refuse(caller: socket.socket, error: OSError) -> None:
    with caller, suppress(OSError):
        caller.sendall(pack_ending(Ending("broken", 1, 0.0, 0.0, 0.0, b"", str(error).encode())))


def main() -> NoReturn:
    """The program of the process: its arguments are the control socket and the view."""
    view = json.loads(sys.argv[2])
    if any(path.startswith(PACKAGES) for path in view["binds"]):
        sys.path.append(PACKAGES)
    serve(int(sys.argv[1]), View(view["binds"], view["hidden"]))
