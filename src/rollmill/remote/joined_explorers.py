"""Explorers that are processes of their own and join the run of a trainer with `mode: train`, at any time."""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from rollmill.errors import RollmillError
from rollmill.orchestrator.stages import Stage
from rollmill.remote.connection import LOST, ConnectedWorker, accept_worker
from rollmill.remote.rollouts import RemoteRollouts, WeightTransport
from rollmill.remote.run_state import EXPLORER, TRAINER_STATUS, TrainerStatus, describe_explorers
from rollmill.remote.scaling import (
    LEAVE_S,
    ScaleAnswer,
    ScaleRequest,
    answer_requests,
    count_explorers,
    describe_change,
    read_answer,
)
from rollmill.remote.stage_worker import WorkerSetup
from rollmill.remote.worker_pool import WorkerHandle, WorkerLostError, WorkerPool

HEALTH_S = 60.0
"""An explorer that does not answer for so long is no longer asked, and may join again."""
_HANDSHAKE_S = 60.0
_STATUS_LOOK_S = 1.0
_KEY_BYTES = 32


class JoinedExplorers:
    """Listens for explorers; an ExplorerFleet whose workers the user launches."""

    display_name, transport, folder = "explorers", WeightTransport("folder"), Path()

    def __init__(self, run_dir: Path, run_id: str, silent_s: float = math.inf) -> None:
        self._run_dir, self._run_id = run_dir, run_id
        self.pool = WorkerPool(EXPLORER, {}, health_s=HEALTH_S, silent_s=silent_s, run_dir=run_dir)
        join = f"rollmill run {run_dir}/config.yaml --set mode=explore --out {run_dir}"
        self.location = f"explorers join by: {join}"
        self._key = secrets.token_bytes(_KEY_BYTES)
        answer = read_answer(run_dir)
        self._limit = None if answer is None else answer.explorers  # None: any number may join

    def rollouts(self, stage: Stage) -> RemoteRollouts:
        return RemoteRollouts(stage, self)

    def share(self, setup: WorkerSetup) -> WorkerSetup:
        """Explorers load the model themselves, on their own devices."""
        return replace(setup, policy=None)

    def describe(self) -> str:
        return describe_explorers(self._run_dir)

    @asynccontextmanager
    async def serving(self, message: Callable[[str], None] = print) -> AsyncIterator[None]:
        """Afterwards explorers know that the run is done, unless it has failed."""
        listening = socket.create_server(("", 0), family=_family(), dualstack_ipv6=_family() == socket.AF_INET6)
        server = await asyncio.start_server(self.welcome, sock=listening)
        host, port = socket.gethostname(), listening.getsockname()[1]
        status = TrainerStatus(self._run_id, host, tuple(_own_addresses(host)), port, self._key.hex())
        try:
            status.write(self._run_dir)
            tasks = [
                asyncio.ensure_future(each)
                for each in (self._keep(status), answer_requests(self._run_dir, self._scale, message))
            ]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
            replace(status, key="", done=True).write(self._run_dir)
        finally:
            server.close()
            for worker in self.pool.workers:
                worker.handle.kill()

    async def _keep(self, status: TrainerStatus) -> None:
        """Write the trainer's status again if somebody removes its file."""
        while True:
            await asyncio.sleep(_STATUS_LOOK_S)
            if self._run_dir.is_dir() and not (self._run_dir / TRAINER_STATUS).exists():
                with suppress(RollmillError):  # a run directory that cannot be written is noticed by others
                    status.write(self._run_dir)

    async def welcome(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Add a process that connects and has the key."""
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                number = int(await accept_worker(reader, writer, self._key))
        except (TimeoutError, *LOST):
            writer.transport.abort()
            return
        name, handle = f"{EXPLORER} {number}", ConnectedWorker(reader, writer)
        if self._limit is not None and len(set(self._names()) - {name}) >= self._limit:
            await _dismiss(handle, self._limit)
        else:
            self.pool.add(name, handle)

    def _names(self) -> list[str]:
        """Names of the explorers that are to stay, those with the lowest numbers first."""
        names = [each.name for each in self.pool.workers if not each.leaving]
        return sorted(names, key=lambda name: int(name.rpartition(" ")[2]))

    async def _scale(self, request: ScaleRequest) -> ScaleAnswer:
        """Have explorers above the requested number leave."""
        names, self._limit = self._names(), request.explorers
        leaving, missing = names[request.explorers :], max(0, request.explorers - len(names))
        workers = [each for each in self.pool.workers if each.name in leaving]
        await asyncio.gather(*(self.pool.retire(name, LEAVE_S) for name in leaving))
        await asyncio.gather(*(_dismiss(each.handle, request.explorers) for each in workers))
        text = describe_change(len(names), request.explorers)
        if leaving:
            text += f": {', '.join(leaving)} left"
        if missing:
            text += f"; {missing} more {'has' if missing == 1 else 'have'} to be started; {self.location}"
        return ScaleAnswer(request.id, request.explorers, len(names), text, missing)


async def _dismiss(handle: WorkerHandle, explorers: int) -> None:
    """Tell an explorer to leave, and end its connection."""
    why = f"the run was scaled to {count_explorers(explorers)} (rollmill scale), so this one leaves"
    with suppress(TimeoutError, WorkerLostError):
        async with asyncio.timeout(_HANDSHAKE_S):
            await handle.call("dismiss", why)
    handle.kill()


def _family() -> socket.AddressFamily:
    return socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET


def _own_addresses(host: str) -> list[str]:
    """Addresses of this host for others: that of its default route first, then those of its name."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing; chooses the interface
        found.append(probe.getsockname()[0])
    with suppress(OSError):
        found += [str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys(found))
