"""Workers of a WorkerPool that a test holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmill.errors import ConfigError, RewardError
from rollmill.remote.connection import join_trainer, serve_calls
from rollmill.remote.run_state import (
    read_trainer_status,
)
from rollmill.remote.worker_pool import WorkerLostError, WorkerNotReadyError
from rollmill.waiting import Outage


class Held:
    """A worker whose calls end when it is told; a WorkerHandle."""

    restartable = False

    def __init__(self) -> None:
        self.begun: Any = None
        self.running: dict[str, asyncio.Future[str]] = {}
        self.ended = False

    async def call(self, method: str, *arguments: Any) -> Any:
        if self.ended:
            raise WorkerLostError("it has ended")
        if method == "begin":
            (self.begun,) = arguments
        if method == "rollout":
            name = arguments[0]
            self.running[name] = asyncio.get_running_loop().create_future()
            try:
                return await self.running[name]
            finally:
                self.running.pop(name, None)
        return None

    def notify(self, method: str, *arguments: Any) -> None: ...

    def kill(self) -> None:
        self.ended = True
        for future in list(self.running.values()):
            if not future.done():
                future.set_exception(WorkerLostError("killed"))


@dataclass
class Worker:
    """The methods that a joined process serves."""

    health: Callable[[], None] = lambda: None
    uses: list[str] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    outages: list[Outage] = field(default_factory=list)

    async def ready(self) -> list[Outage]:
        if self.uses:
            self.health()
        return self.outages

    async def begin(self, use: str) -> None:
        if use == "impossible":
            raise ConfigError("no such device")
        self.uses.append(use)

    async def rollout(self, use: str, what: str) -> Any:
        if use not in self.uses:
            raise WorkerNotReadyError(use)
        if what == "fails":
            raise RewardError("no good")
        if what == "cannot be sent":
            return lambda: None
        if what == "never ends":
            self.started.set()
            try:
                await asyncio.sleep(1000)
            finally:
                self.stopped.set()
        return what

    async def end(self, use: str) -> None:
        self.uses.remove(use)


@asynccontextmanager
async def joined(run_dir: Path, number: int, worker: Worker) -> AsyncIterator[asyncio.Task[Exception | None]]:
    """A worker that has joined the run, in this process; yields the task that serves the trainer."""
    trainer = read_trainer_status(run_dir)
    assert trainer is not None
    reader, writer = await asyncio.open_connection("localhost", trainer.port)
    await join_trainer(reader, writer, bytes.fromhex(trainer.key), number)
    serving = asyncio.ensure_future(serve_calls(reader, writer, worker))
    try:
        yield serving
    finally:
        writer.transport.abort()
        await asyncio.gather(serving, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)
