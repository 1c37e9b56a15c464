"""A simulated network between a trainer and its explorers: streams like TCP, and actor calls like Ray's.

Messages of a link arrive in order, after a delay. While a link is partitioned they are held. A broken link loses what
is under way.
"""

from __future__ import annotations

import asyncio
import random
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from typing import Any

from rollmill.apps.plan.simulation.clock import SimulatedProcess, VirtualLoop

_APART_S = 1e-9
"""Timers of the same time have no order."""


class SimulatedLink:
    """A link between two hosts, with its delays in both directions.

    Args:
        delay_s: median delay of a message; delays are log-normal.
    """

    def __init__(self, loop: VirtualLoop, delay_s: float, seed: int, *, spread: float = 0.5) -> None:
        self._loop, self._delay_s, self._spread, self._random = loop, delay_s, spread, random.Random(seed)
        self._last = [0.0, 0.0]  # arrival of the last message, by direction
        self.held_until = 0.0
        self.duplicates = 0  #: messages that will arrive twice, of those that may
        self.breaks = 0  #: messages after which the link breaks, or whose answer is lost
        self._streams: list[_PipeTransport] = []

    def send(self, deliver: Callable[[], None], direction: int) -> None:
        """Let `deliver` be called when a message arrives at the other end."""
        delay = self._delay_s * self._random.lognormvariate(0.0, self._spread)
        at = max(self._loop.time() + delay, self.held_until, self._last[direction] + _APART_S)
        self._last[direction] = at
        self._loop.call_at(at, deliver)

    def taken(self, count: str) -> bool:
        """True if the next of the faults in this counter, `duplicates` or `breaks`, happens now."""
        left = getattr(self, count)
        if left:
            setattr(self, count, left - 1)
        return bool(left)

    def connect(self, server: SimulatedProcess, client: SimulatedProcess) -> tuple[_Ends, _Ends]:
        """Open a stream; returns reader and writer of the server, and of the client."""
        readers = [StreamReader(loop=self._loop), StreamReader(loop=self._loop)]
        pipes = [_PipeTransport(self, process, way) for way, process in enumerate((server, client))]
        for way, pipe in enumerate(pipes):
            pipe.mine, pipe.other, pipe.peer = readers[way], readers[1 - way], pipes[1 - way]
        self._streams += pipes
        made = []
        for reader, pipe in zip(readers, pipes, strict=True):
            protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
            made.append((reader, StreamWriter(pipe, protocol, reader, self._loop)))
        return made[0], made[1]

    def break_streams(self) -> None:
        """Reset all streams; what is under way is lost."""
        streams, self._streams = self._streams, []
        for each in streams:
            each.lose()


_Ends = tuple[StreamReader, StreamWriter]


class _PipeTransport(asyncio.Transport):
    """One end of a stream."""

    mine: StreamReader
    other: StreamReader
    peer: _PipeTransport

    def __init__(self, link: SimulatedLink, process: SimulatedProcess, direction: int) -> None:
        super().__init__()
        self._link, self._process, self._direction = link, process, direction
        self._open = True

    def write(self, data: Any) -> None:
        """A dead process writes nothing."""
        if not (self._open and self._process.alive):
            return
        payload = bytes(data)
        self._link.send(lambda: self._arrive(payload), self._direction)
        if self._link.taken("breaks"):
            self._link.break_streams()

    def _arrive(self, payload: bytes) -> None:
        if self.peer._open and self.peer._process.alive:
            self.other.feed_data(payload)

    def is_closing(self) -> bool:
        return not self._open

    def close(self) -> None:
        """Ends the connection once what was written has arrived."""
        if self._open:
            self._open = False
            if not self.mine.at_eof():
                self.mine.feed_eof()
            self._link.send(self.peer.lose, self._direction)

    def abort(self) -> None:
        self.close()

    def lose(self) -> None:
        """The connection is gone at this end."""
        if self._open:
            self._open = False
            self.mine.feed_eof()
