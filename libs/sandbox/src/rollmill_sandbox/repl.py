"""The interpreter of a session: executes texts in one namespace, in a confined process."""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import sys
import threading
from typing import Any, NoReturn

from rollmill_sandbox.frames import FrameReader, pack_frame
from rollmill_sandbox.program import MEMORY_ERROR, add_lines, print_traceback, start_main

_CHUNK = 1 << 16


def serve_repl(descriptor: int, most: int) -> NoReturn:
    """Execute texts from a socket until it closes. `most` is the longest value or message to `host`, in bytes."""
    channel = _Channel(descriptor)
    names = start_main("").__dict__

    def host(text: str) -> str:
        """Return the caller's answer to `text`."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("host() can be called in the main thread only")
        message = str(text).encode(errors="surrogatepass")
        if len(message) > most:
            raise ValueError(f"a message to host() of {len(message)} bytes; {most} are allowed")
        kind, answer = channel.ask(pack_frame(b"host", message))
        if kind != b"answer":
            raise RuntimeError(answer.decode())
        return answer.decode(errors="surrogatepass")

    names["host"] = host
    while True:
        number, text = channel.read()
        outcome, shown = _execute(text.decode(errors="surrogatepass"), f"<call {int(number)}>", names)
        value = b"" if shown is None else str.encode(shown, errors="surrogatepass")
        if len(value) > most:
            outcome, shown, value = "output", None, b""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        channel.write(pack_frame(b"done", number, outcome.encode(), b"" if shown is None else b"1", value))


def _execute(text: str, name: str, names: dict[str, Any]) -> tuple[str, str | None]:
    """Return the outcome, and the last expression as in a REPL."""
    add_lines(name, text)
    try:
        body: Any = compile(text, name, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
        exec(compile(body, name, "exec", dont_inherit=True), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)
            return "ok", None if value is None else repr(value)
    except MemoryError:
        names.clear()
        gc.collect()
        os.write(2, MEMORY_ERROR)
        return "memory", None
    except BaseException as error:
        print_traceback(error)
        return "error", None
    return "ok", None


class _Channel:
    """The program's end of the socket, which is blocking. The process ends when the other end closes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._frames = FrameReader(1 << 32)

    def ask(self, frame: bytes) -> list[bytes]:
        self.write(frame)
        return self.read()

    def read(self) -> list[bytes]:
        while (frame := self._frames.take()) is None:
            chunk = os.read(self._descriptor, _CHUNK)
            if not chunk:
                os._exit(0)
            self._frames.feed(chunk)
        return frame

    def write(self, frame: bytes) -> None:
        view = memoryview(frame)
        while view:
            view = view[os.write(self._descriptor, view) :]
