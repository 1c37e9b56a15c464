"""An explorer's process: it outlives stages and trainers, and works for the one that began last."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from rollmill.config.placement import ExplorerSpec
from rollmill.remote.actor_pool import ActorNotReadyError
from rollmill.remote.explorer_worker import ExplorerWorker, RolloutReply, RolloutRequest, WorkerSetup
from rollmill.remote.ray_session import ray_module
from rollmill.trackers.heartbeat import HeartbeatWriter

_IDLE = "nothing", "the trainer"


def start_explorer(run_dir: Path, name: str, kind: ExplorerSpec, options: dict[str, Any]) -> Any:
    """The actor; Ray starts it again when its process ends."""
    made = ray_module().remote(ExplorerActor)
    chosen = made.options(max_restarts=-1, max_task_retries=0, max_concurrency=10_000, **options)
    return chosen.remote(run_dir, name, kind)


class ExplorerActor:
    """See ActorPool for when what is called; `use` names one stage in one life of the trainer.

    Args:
        name: that it is shown by; a process that takes its place has the same, and the same kind.
    """

    def __init__(self, run_dir: Path, name: str, kind: ExplorerSpec) -> None:
        self._kind = kind
        self._rolls = "roll out" if kind.engine is None else f"roll out with {kind.engine.name}"
        self._heart = HeartbeatWriter(run_dir, name)
        self._heart.set_activity(*_IDLE)
        self._use, self._stage = "", None  # type: str, ExplorerWorker | None
        self._running: set[asyncio.Task[RolloutReply]] = set()
        self._turns = asyncio.Lock()

    async def ready(self) -> int:
        """The process id; answers while rollouts are under way."""
        return os.getpid()

    async def begin(self, use: str, setup: WorkerSetup) -> None:
        """Work for another stage, or another trainer; groups that were asked for before are dropped."""
        async with self._turns:
            await self._leave()
            self._heart.set_activity("begin a stage")
            self._stage, self._use = ExplorerWorker(setup, self._kind), use
            self._heart.set_activity(*_IDLE)

    async def update(self, use: str, version: int) -> None:
        """There are weights of this version."""
        if use == self._use and self._stage is not None:
            await self._stage.update(version)
            self._tell(version)

    async def rollout(self, use: str, asked: RolloutRequest) -> RolloutReply:
        """See ExplorerWorker. Raises ActorNotReadyError where it works for nobody, or for another trainer."""
        if use != self._use or self._stage is None:
            raise ActorNotReadyError(use)
        task = asyncio.ensure_future(self._stage.rollout(asked))
        self._running.add(task)
        self._tell(asked.version)
        try:
            return await task
        finally:
            self._running.discard(task)
            self._tell()

    async def end(self, use: str) -> None:
        """The stage has ended, or its trainer; says nothing to who works for another one. `use` may be "": any."""
        async with self._turns:
            if use in ("", self._use):
                await self._leave()
                self._heart.set_activity(*_IDLE)

    async def close(self) -> None:
        """The run has ended."""
        await self.end("")
        self._heart.close("done")

    async def _leave(self) -> None:
        self._use = ""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        stage, self._stage = self._stage, None
        if stage is not None:
            await stage.close()

    def _tell(self, version: int | None = None) -> None:
        self._heart.set_activity(*((self._rolls, "") if self._running else _IDLE), version=version)
