"""An explorer in a worker process: it outlives stages and trainers, and serves the trainer that called `begin` last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from rollmill.config.placement import ExplorerSpec
from rollmill.remote.stage_worker import OffloadReply, RolloutReply, RolloutRequest, StageWorker, WorkerSetup
from rollmill.remote.worker_pool import WorkerNotReadyError
from rollmill.trackers.heartbeat import HeartbeatWriter
from rollmill.waiting import OUTAGES, Outage, OutageLog

_IDLE = "nothing", "the trainer"
_OFFLOADED = "hold nothing", "the trainer"
"""Activity while another phase has the device (section `offload`)."""


class ExplorerWorker:
    """An explorer in a WorkerPool; `use` identifies one stage of one trainer process.

    Args:
        kind: what sets it apart from others.
        localize: puts this process's policy, threads and paths into the trainer's setup.
        build_stage: builds what works on a stage.
        outages: the outages of this process.
    """

    def __init__(
        self,
        heartbeat: HeartbeatWriter,
        kind: ExplorerSpec,
        localize: Callable[[WorkerSetup], WorkerSetup] = lambda setup: setup,
        *,
        build_stage: Callable[[WorkerSetup, ExplorerSpec], StageWorker] = StageWorker,
        outages: OutageLog = OUTAGES,
    ) -> None:
        self._build_stage, self._outages = build_stage, outages
        self._heartbeat, self._kind, self._localize = heartbeat, kind, localize
        self._doing = "roll out" if kind.engine is None else f"roll out with {kind.engine.name}"
        self._heartbeat.set_activity(*_IDLE)
        self._use, self._stage = "", None  # type: str, StageWorker | None
        self._running: set[asyncio.Task[RolloutReply]] = set()
        self._lock = asyncio.Lock()
        self.groups = 0  #: number of groups rolled out
        self.dismissed = ""  #: why the trainer does not need this process any more; empty while it does

    async def ready(self) -> list[Outage]:
        """Return the endpoints that are unreachable for this process; answers while rollouts are running."""
        return self._outages.current()

    async def begin(self, use: str, setup: WorkerSetup) -> None:
        """Start another stage, or serve another trainer; rollouts requested before are dropped."""
        async with self._lock:
            await self._leave()
            self._heartbeat.set_activity("begin a stage")
            stage = self._build_stage(self._localize(setup), self._kind)
            if setup.starts_offloaded:
                try:
                    await stage.offload()
                except BaseException:
                    await stage.close()
                    raise
            self._stage, self._use = stage, use
            self._heartbeat.set_activity(*(_OFFLOADED if setup.starts_offloaded else _IDLE))

    async def update(self, use: str, version: int) -> None:
        """Update to weights of this version."""
        if use == self._use and self._stage is not None and not self._stage.is_offloaded:
            await self._stage.update(version)
            self._report(version)

    async def rollout(self, use: str, request: RolloutRequest) -> RolloutReply:
        """Raises WorkerNotReadyError if it serves nobody, or another trainer, or begins again."""
        if use != self._use or self._stage is None:
            raise WorkerNotReadyError(use)
        task = asyncio.ensure_future(self._stage.rollout(request))
        self._running.add(task)
        self._report(request.version)
        try:
            reply = await task
            self.groups += 1
            return replace(reply, told=self._outages.take_told())
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise WorkerNotReadyError(use) from None  # `begin` or `end` has dropped it, and its caller waits
        finally:
            self._running.discard(task)
            self._report()

    async def offload(self, use: str) -> OffloadReply:
        """Free the device until the next rollout, once those that are running have ended. Raises like `rollout`, and
        OffloadError if there is no room elsewhere."""
        if use != self._use or self._stage is None:
            raise WorkerNotReadyError(use)
        while self._running:  # dropped ones
            await asyncio.wait(self._running)
        reply = await self._stage.offload()
        self._heartbeat.set_activity(*_OFFLOADED)
        return reply

    async def tokens_generated(self, use: str) -> int:
        """Return the tokens generated since the stage began. Raises like `rollout`."""
        if use != self._use or self._stage is None:
            raise WorkerNotReadyError(use)
        return self._stage.tokens_generated

    async def interrupt(self, use: str, through: int) -> None:
        if use == self._use and self._stage is not None:
            self._stage.interrupt(through)

    async def end(self, use: str) -> None:
        """End the stage, unless it serves another trainer by now. An empty `use` ends any."""
        async with self._lock:
            if use in ("", self._use):
                await self._leave()
                self._heartbeat.set_activity(*_IDLE)

    async def dismiss(self, why: str) -> None:
        """Leave the run, which goes on without this process."""
        self.dismissed = why

    async def close(self, how: str = "done") -> None:
        """Stop at the end of the run, or because it has been scaled."""
        await self.end("")
        self._heartbeat.close(how)

    async def _leave(self) -> None:
        self._use = ""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        stage, self._stage = self._stage, None
        if stage is not None:
            await stage.close()

    def _report(self, version: int | None = None) -> None:
        self._heartbeat.set_activity(*((self._doing, "") if self._running else _IDLE), version=version)
