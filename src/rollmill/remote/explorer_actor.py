"""Ray actor of an explorer: it outlives stages and trainers, and serves the trainer that called `begin` last."""

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
    """Start the actor; Ray restarts it when its process ends."""
    made = ray_module().remote(ExplorerActor)
    chosen = made.options(max_restarts=-1, max_task_retries=0, max_concurrency=10_000, **options)
    return chosen.remote(run_dir, name, kind)


class ExplorerActor:
    """An explorer in an ActorPool; `use` identifies one stage of one trainer process.

    Args:
        name: shown name; a process that replaces it has the same name and kind.
    """

    def __init__(self, run_dir: Path, name: str, kind: ExplorerSpec) -> None:
        self._kind = kind
        self._rolls = "roll out" if kind.engine is None else f"roll out with {kind.engine.name}"
        self._heartbeat = HeartbeatWriter(run_dir, name)
        self._heartbeat.set_activity(*_IDLE)
        self._use, self._stage = "", None  # type: str, ExplorerWorker | None
        self._running: set[asyncio.Task[RolloutReply]] = set()
        self._lock = asyncio.Lock()

    async def ready(self) -> int:
        """Return the process id; answers while rollouts are running."""
        return os.getpid()

    async def begin(self, use: str, setup: WorkerSetup) -> None:
        """Start another stage, or serve another trainer; rollouts requested before are dropped."""
        async with self._lock:
            await self._leave()
            self._heartbeat.set_activity("begin a stage")
            self._stage, self._use = ExplorerWorker(setup, self._kind), use
            self._heartbeat.set_activity(*_IDLE)

    async def update(self, use: str, version: int) -> None:
        """Update to weights of this version."""
        if use == self._use and self._stage is not None:
            await self._stage.update(version)
            self._report(version)

    async def rollout(self, use: str, request: RolloutRequest) -> RolloutReply:
        """See ExplorerWorker. Raises ActorNotReadyError if it serves nobody, or another trainer."""
        if use != self._use or self._stage is None:
            raise ActorNotReadyError(use)
        task = asyncio.ensure_future(self._stage.rollout(request))
        self._running.add(task)
        self._report(request.version)
        try:
            return await task
        finally:
            self._running.discard(task)
            self._report()

    async def end(self, use: str) -> None:
        """End the stage, unless it serves another trainer by now. An empty `use` ends any."""
        async with self._lock:
            if use in ("", self._use):
                await self._leave()
                self._heartbeat.set_activity(*_IDLE)

    async def close(self) -> None:
        """Stop at the end of the run."""
        await self.end("")
        self._heartbeat.close("done")

    async def _leave(self) -> None:
        self._use = ""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        stage, self._stage = self._stage, None
        if stage is not None:
            await stage.close()

    def _report(self, version: int | None = None) -> None:
        self._heartbeat.set_activity(*((self._rolls, "") if self._running else _IDLE), version=version)
