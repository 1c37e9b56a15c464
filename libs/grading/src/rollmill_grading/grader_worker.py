"""The program of a `WorkerProcess`. It handles one request at a time; the parent can kill it, unlike a thread.

It is run by path. It imports the standard library, and with the first `load` request the module of a function. Frames
are a 4-byte big-endian length and a body: pickle towards this process, JSON back, because output of a process that
evaluates a model's text is not trusted.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, BinaryIO

from rollmill_grading.errors import FunctionRaisedError

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Handle the parent's requests until it closes the pipe or ends. Arguments: its process id, a memory limit."""
    _die_with(int(sys.argv[1]))
    if memory_bytes := int(sys.argv[2]):
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    requests, replies = _take_pipes()
    while len(header := requests.read(4)) == 4:
        kind, payload = pickle.loads(requests.read(struct.unpack("!I", header)[0]))
        body = json.dumps(_handle_request(kind, payload)).encode()
        replies.write(struct.pack("!I", len(body)) + body)
        replies.flush()


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the two pipes, out of reach of code that prints or reads standard input. Printed text goes to stderr."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return requests, replies


_functions: dict[tuple[str, str], Callable[[Any], Any]] = {}


def _handle_request(kind: str, payload: Any) -> dict[str, Any]:
    """Answer `load`, (path, setup), and `call`, (path, setup, argument): see `WorkerFunction` in worker_process.py."""
    try:
        path, setup, *arguments = payload
        if kind == "load":
            module, _, name = path.partition(":")
            _functions[path, setup] = getattr(import_module(module), name)(setup)
            return {"value": 1.0}
        return {"value": _functions[path, setup](*arguments)}
    except MemoryError:
        return {"outcome": "memory"}
    except FunctionRaisedError as error:
        return {"error": error.text, "traceback": error.traceback}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
