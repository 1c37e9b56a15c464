"""The trusted side of a session, in the supervisor's process: executes the caller's requests within its limits.

Between executions, and while the caller answers `host`, every process of the session is stopped: it uses no CPU and
writes nothing. The program's output on its channel is validated here and never trusted.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import time
from dataclasses import dataclass

from rollmill_sandbox.backend import IsolationBackend
from rollmill_sandbox.frames import FrameError, FrameReader, FrameTooLongError, pack_frame
from rollmill_sandbox.protocol import Job
from rollmill_sandbox.watchdog import DISK_FULL, FOREIGN_LOCK, RunningProgram, gather, has_ended

_CHUNK = 1 << 16
_REQUEST_BYTES = (1 << 32) - 1
_FRAME_ROOM = 256
"""Bytes of a frame besides its text."""
_OUTCOMES = (b"ok", b"error", b"memory", b"output")
_CONTINUING = (b"ok", b"error")
_NO_HOST = b"host() has nobody to answer it in this execution"


class SessionServer:
    """One session: `program` is its interpreter, `channel` the trusted end of its socket."""

    def __init__(
        self,
        caller: socket.socket,
        channel: socket.socket,
        program: RunningProgram,
        job: Job,
        backend: IsolationBackend,
    ) -> None:
        self._caller, self._channel, self._program, self._backend = caller, channel, program, backend
        self._limits, self._idle_s = job.limits, job.idle_s
        self._requests, self._frames = FrameReader(_REQUEST_BYTES), FrameReader(job.limits.output_bytes + _FRAME_ROOM)
        self._to_send = bytearray()
        self._output: dict[int, bytearray] = {program.stdout: bytearray(), program.stderr: bytearray()}
        self._process = os.pidfd_open(program.pid)
        self._poll = select.poll()
        for descriptor in (program.stdout, program.stderr, self._process, channel.fileno()):
            os.set_blocking(descriptor, False)
            self._poll.register(descriptor, select.POLLIN)
        self._poll.register(caller, 0)
        if program.locks is not None:
            self._poll.register(program.locks, select.POLLIN)

    def serve(self) -> None:
        """Serve until the session ends.

        Raises EOFError or TimeoutError if the caller disconnects or is idle for too long.
        """
        self._caller.settimeout(self._idle_s)
        self._caller.sendall(pack_frame(b"ready"))
        continues, number = True, 0
        while continues:
            number += 1
            text, wall_s, host = self._request()
            clock = _Clock(float(wall_s), self._cpu_clock() + self._limits.cpu_s)
            outcome, value = self._execute(b"%d" % number, text, bool(host), clock)
            continues = outcome in _CONTINUING
            stdout, stderr = self._collect(continues)
            if len(stdout) + len(stderr) > self._limits.output_bytes:
                outcome, value, continues = b"output", [], False
                self._signal_all(signal.SIGKILL)
                stdout = stdout[: self._limits.output_bytes]
                stderr = stderr[: self._limits.output_bytes - len(stdout)]
            self._caller.sendall(pack_frame(b"done", outcome, b"%.6f" % clock.used, stdout, stderr, *value))

    def _execute(self, number: bytes, text: bytes, host: bool, clock: _Clock) -> tuple[bytes, list[bytes]]:
        """Return the outcome, and the value if there is one. Afterwards everything is stopped, or must be killed."""
        self._to_send += pack_frame(number, text)
        while True:
            clock.resume()
            self._signal_all(signal.SIGCONT)
            found = self._until_frame(clock)
            self._signal_all(signal.SIGSTOP)
            clock.pause()
            match found:
                case [*_] if self._to_send:  # it cannot have read the request that it answers
                    return b"killed", []
                case [b"host", _] if not host:
                    self._to_send += pack_frame(b"refuse", _NO_HOST)
                case [b"host", message]:
                    self._caller.sendall(pack_frame(b"host", message))
                    self._to_send += pack_frame(*self._request())
                case [b"done", about, outcome, has_value, value] if about == number and outcome in _OUTCOMES:
                    return outcome, [value] if has_value else []
                case bytes(outcome):
                    return outcome, []
                case _:
                    return b"killed", []

    def _until_frame(self, clock: _Clock) -> list[bytes] | bytes:
        """Return the program's next frame, or the outcome that ends it before."""
        channel = self._channel.fileno()
        while True:
            try:
                frame = self._frames.take()
            except FrameTooLongError:
                return b"output"
            except FrameError:
                return b"killed"
            if frame is not None:
                return frame
            left, cpu_left = clock.left(), clock.cpu_end - self._cpu_clock()
            if left <= 0 or cpu_left <= 0:
                return b"timeout"
            self._poll.modify(channel, select.POLLIN | (select.POLLOUT if self._to_send else 0))
            locks = self._program.locks
            look_s = min(self._backend.look_s, locks.look_s() if locks is not None else math.inf)
            ready = dict(self._poll.poll(min(left, cpu_left / _CORES + 0.002, look_s) * 1000 + 1))
            for descriptor in ready.keys() & self._output.keys():
                if not gather(descriptor, self._output[descriptor]):
                    self._poll.unregister(descriptor)
            if sum(map(len, self._output.values())) > self._limits.output_bytes:
                return b"output"
            if self._caller.fileno() in ready:
                raise EOFError
            if channel in ready and not self._talk(ready[channel]):
                return b"killed"
            if self._process in ready and channel not in ready:  # its last output has been read
                return b"killed"
            if self._backend.full(self._program.pid, self._limits) and not has_ended(self._process):
                self._output[self._program.stderr] += DISK_FULL
                return b"killed"
            if locks is not None and locks.answer():
                self._output[self._program.stderr] += FOREIGN_LOCK
                return b"killed"

    def _talk(self, events: int) -> bool:
        """Move bytes over the channel; False if the program has closed it."""
        try:
            if self._to_send and events & select.POLLOUT:
                del self._to_send[: self._channel.send(self._to_send[:_CHUNK])]
            if events & ~select.POLLOUT:
                chunk = self._channel.recv(_CHUNK)
                self._frames.feed(chunk)
                return bool(chunk)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        return True

    def _request(self) -> list[bytes]:
        """Return the caller's next frame."""
        while (frame := self._requests.take()) is None:
            chunk = self._caller.recv(_CHUNK)
            if not chunk:
                raise EOFError
            self._requests.feed(chunk)
        return frame

    def _collect(self, continues: bool) -> tuple[bytes, bytes]:
        """Return the output that has not been sent yet; the processes are stopped, or killed here."""
        if not continues:
            self._signal_all(signal.SIGKILL)
        for descriptor, gathered in self._output.items():
            while len(gathered) <= self._limits.output_bytes and gather(descriptor, gathered):
                pass
        stdout, stderr = (bytes(gathered) for gathered in self._output.values())
        for gathered in self._output.values():
            gathered.clear()
        return stdout, stderr

    def _signal_all(self, number: int) -> None:
        self._backend.signal_all(self._program.pid, number)

    def _cpu_clock(self) -> float:
        """Return the CPU seconds of the interpreter so far; 0 after its end."""
        try:
            return time.clock_gettime((~self._program.pid << 3) | 2)  # its clock, as of clock_getcpuclockid(3)
        except OSError:
            return 0.0


@dataclass(slots=True)
class _Clock:
    """The wall clock of one execution, which is paused while the caller answers."""

    wall_s: float
    cpu_end: float
    used: float = 0.0
    since: float = 0.0

    def resume(self) -> None:
        self.since = time.monotonic()

    def pause(self) -> None:
        self.used += time.monotonic() - self.since

    def left(self) -> float:
        return self.wall_s - self.used - (time.monotonic() - self.since)


_CORES = os.cpu_count() or 1
