"""Sessions: one interpreter that executes several programs and keeps its state."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from rollmill_sandbox.errors import SandboxError
from rollmill_sandbox.exchange import GRACE_S
from rollmill_sandbox.frames import FrameError, FrameReader, pack_frame
from rollmill_sandbox.limits import SandboxLimits, SessionExecution
from rollmill_sandbox.protocol import parse_result
from rollmill_sandbox.semaphore import FairSemaphore

HostCallback = Callable[[str], Awaitable[str]]
"""Answers a program's `host(text)`. It runs in the caller's event loop."""
READY = pack_frame(b"ready")
_CHUNK = 1 << 16
_FRAME_ROOM = 1 << 10


class SandboxSession:
    """One interpreter in a separate sandbox. `Sandbox.session` opens it; one task at a time uses it."""

    def __init__(self, caller: socket.socket, limits: SandboxLimits, slots: FairSemaphore, safe: bool) -> None:
        self._caller, self._limits, self._slots, self._safe = caller, limits, slots, safe
        self._frames = FrameReader(2 * limits.output_bytes + _FRAME_ROOM)
        self._busy = self._ended = False

    @property
    def ended(self) -> bool:
        """True if every further execution will be `ended`."""
        return self._ended

    async def execute(
        self, program: str, wall_s: float | None = None, host: HostCallback | None = None
    ) -> SessionExecution:
        """Execute a program in the namespace of the previous executions.

        `wall_s` is limits.wall_s if None. `host` answers the program's calls of `host(text)`; its time does not count
        towards the program's, and its exceptions end the session and are raised here. A session that has ended, for
        whatever reason, returns the outcome "ended". A cancelled execution ends the session.

        Raises SandboxError when called while another execution runs, as from within `host`.
        """
        if self._busy:
            raise SandboxError("a session executes one program at a time; open another session for this one")
        wall_s = self._limits.wall_s if wall_s is None else wall_s
        if wall_s <= 0:
            raise ValueError(f"wall_s is {wall_s:g}; it has to be above 0")
        if self._ended or self._gone():
            self.close()
            return self._empty_result("ended")
        self._busy = True
        request = pack_frame(program.encode(errors="surrogatepass"), b"%.6f" % wall_s, b"" if host is None else b"host")
        try:
            while True:
                async with self._slots.turn_async():  # released while `host` answers, which may need one itself
                    reply = await self._ask(request, wall_s + GRACE_S)
                if reply is None:
                    self.close()
                    return self._empty_result("killed")
                if reply[0] != b"host":
                    return self._execution(reply)
                assert host is not None
                request = await self._answer(reply[1], host)
        except BaseException:
            self.close()
            raise
        finally:
            self._busy = False

    def close(self) -> None:
        """End the session; later executions are `ended`."""
        self._ended = True
        with suppress(OSError):
            self._caller.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold the socket as well
        self._caller.close()

    async def ready(self, job: bytes) -> bool:
        """Send the job and wait until the interpreter is ready; False if the server died.

        Raises SandboxError with the reason if a session cannot start.
        """
        received = bytearray()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(GRACE_S):
                await loop.sock_sendall(self._caller, job)
                while received != READY and (chunk := await loop.sock_recv(self._caller, _CHUNK)):
                    received += chunk
        except OSError:  # a TimeoutError is one
            return False
        return received == READY or parse_result(bytes(received), self._safe) is not None

    async def _ask(self, request: bytes, seconds: float) -> list[bytes] | None:
        """Return the reply to a request, None if it is invalid or does not come in time."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                await loop.sock_sendall(self._caller, request)
                while (reply := self._frames.take()) is None:
                    chunk = await loop.sock_recv(self._caller, _CHUNK)
                    if not chunk:
                        return None
                    self._frames.feed(chunk)
        except (OSError, FrameError):  # a TimeoutError is an OSError
            return None
        return reply

    async def _answer(self, message: bytes, host: HostCallback) -> bytes:
        answer = await host(message.decode(errors="replace"))
        if not isinstance(answer, str):
            raise TypeError(f"`host` has to return text, not {type(answer).__name__}")
        return pack_frame(b"answer", answer.encode(errors="surrogatepass"))

    def _gone(self) -> bool:
        """True if the other side has ended, for example after an idle timeout."""
        try:
            return not self._caller.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def _execution(self, reply: list[bytes]) -> SessionExecution:
        _, outcome, seconds, *texts = reply
        stdout, stderr, *value = (text.decode(errors="replace") for text in texts)
        named: Any = outcome.decode()
        if named not in ("ok", "error"):
            self.close()
        return SessionExecution(named, value[0] if value else None, stdout, stderr, float(seconds), self._safe)

    def _empty_result(self, outcome: Any) -> SessionExecution:
        return SessionExecution(outcome, None, "", "", 0.0, self._safe)
