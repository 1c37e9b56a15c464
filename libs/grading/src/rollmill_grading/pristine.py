"""Calls a function in children of a process that has done nothing else, so that no call finds traces of another."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1


class PristineProcess:
    """A process that forks for each call and waits for its child. It ends with this process.

    Args:
        function: takes and returns what JSON holds.
        prepare: called once in the process, before any call; the caller does not wait for it.
    """

    def __init__(self, function: Callable[..., Any], prepare: Callable[[], object]) -> None:
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        if os.fork() == 0:
            os.close(self._requests)
            os.close(self._replies)
            _end_with_parent()
            prepare()
            _serve(function, requests, replies)
            os._exit(0)
        os.close(requests)
        os.close(replies)
        self._lines = os.fdopen(self._replies, "rb")

    def call(self, *arguments: Any) -> Any:
        """Return what the function returns. Raises MemoryError, and RuntimeError for any other failure of the child."""
        os.write(self._requests, json.dumps(arguments).encode() + b"\n")
        reply = json.loads(self._lines.readline() or '{"error": "its process has ended"}')
        if reply.get("error") == "memory":
            raise MemoryError
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["value"]


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(function: Callable[..., Any], requests: int, replies: int) -> None:
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            child = os.fork()
            if child == 0:
                _end_with_parent()
                os.write(replies, json.dumps(_result(function, json.loads(line))).encode() + b"\n")
                os._exit(0)
            if status := os.waitpid(child, 0)[1]:
                text = f"a child ended with status {status}"
                os.write(replies, json.dumps({"error": text}).encode() + b"\n")


def _result(function: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    try:
        return {"value": function(*arguments)}
    except MemoryError:
        return {"error": "memory"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
