"""Explorers as Ray actors: Ray starts them again when their process ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollmill.config.placement import ExplorerSpec, RayPlacement
from rollmill.orchestrator.stages import Stage
from rollmill.ray_session import host_address, join, ray_module
from rollmill.remote.explorer_worker import ExplorerWorker
from rollmill.remote.rollouts import RemoteRollouts, WeightTransport
from rollmill.remote.run_state import EXPLORER, WEIGHTS
from rollmill.remote.scaling import LEAVE_S, count_explorers
from rollmill.remote.stage_worker import WorkerSetup
from rollmill.remote.worker_pool import WorkerHandle, WorkerLostError, WorkerPool
from rollmill.trackers.heartbeat import HeartbeatWriter


class ExplorerActor(ExplorerWorker):
    """An ExplorerWorker that writes its own heartbeats. A process that replaces it has the same name and kind."""

    def __init__(self, run_dir: Path, name: str, kind: ExplorerSpec) -> None:
        super().__init__(HeartbeatWriter(run_dir, name), kind, lambda setup: replace(setup, name=name))


class RayWorkerHandle:
    """A worker that is a Ray actor; a WorkerHandle."""

    restartable = True

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def call(self, method: str, *arguments: Any) -> Any:
        ray = ray_module()
        reference = getattr(self._actor, method).remote(*arguments)
        try:
            return await reference
        except ray.exceptions.RayActorError as error:
            forever = isinstance(error, ray.exceptions.ActorDiedError)
            raise WorkerLostError(str(error).strip().splitlines()[-1], forever=forever) from error
        except ray.exceptions.RayTaskError as error:
            raise (getattr(error, "cause", None) or error) from None
        except BaseException:  # cancelled
            with suppress(ray.exceptions.RayError):
                ray.cancel(reference)
            raise

    def notify(self, method: str, *arguments: Any) -> None:
        getattr(self._actor, method).remote(*arguments)

    def kill(self) -> None:
        ray_module().kill(self._actor, no_restart=False)


class RayExplorers:
    """The actors of a run, as an ExplorerFleet. They outlive the trainer's process that uses them.

    Args:
        actors: those that `start_explorers` returned, by name.
        silent_s: seconds without an answer or a heartbeat after which an explorer counts as dead.
    """

    def __init__(self, placement: RayPlacement, run_dir: Path, actors: dict[str, Any], silent_s: float) -> None:
        self._address, self._loop = join(placement.address), None  # type: str, asyncio.AbstractEventLoop | None
        handles: dict[str, WorkerHandle] = {name: RayWorkerHandle(actor) for name, actor in actors.items()}
        health, replacements = placement.health_s, placement.replacements
        self.pool = WorkerPool(
            EXPLORER, handles, health_s=health, replacements=replacements, silent_s=silent_s, run_dir=run_dir
        )
        self.folder = run_dir.absolute()
        folder = str(Path(placement.weights_folder or run_dir / WEIGHTS).absolute())
        engines = [kind.engine for kind in placement.explorers]
        self.transport = WeightTransport(placement.weights, folder, host_address(), placement.nccl, engines)

    def rollouts(self, stage: Stage) -> RemoteRollouts:
        return RemoteRollouts(stage, self)

    def share(self, setup: WorkerSetup) -> Any:
        """All explorers of a host read one copy."""
        return ray_module().put(setup)

    def describe(self) -> str:
        """Empty: Ray starts explorers again by itself."""
        return ""

    @property
    def location(self) -> str:
        staying = [each for each in self.pool.workers if not each.leaving]
        return f"{count_explorers(len(staying))} on Ray at {self._address}"

    @property
    def display_name(self) -> str:
        return self.location

    @asynccontextmanager
    async def serving(self, message: Callable[[str], None]) -> AsyncIterator[None]:
        """Accepts `use` during the body; Ray can always reach the explorers, and `rollmill run` tells of them."""
        self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._loop = None

    async def use(self, actors: dict[str, Any]) -> str | None:
        """Use these actors from now on, in place of others; may be called in the event loop of another thread.

        Returns "" once new ones have begun, and removed ones have finished their groups or left them to others; an
        error if new ones cannot begin, which are not used then; None if the run does not use explorers now.
        """
        if self._loop is None:
            return None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._use(actors), self._loop))

    async def _use(self, actors: dict[str, Any]) -> str:
        names = {each.name for each in self.pool.workers}
        new = [self.pool.admit(name, RayWorkerHandle(each)) for name, each in actors.items() if name not in names]
        old = [self.pool.retire(name, LEAVE_S) for name in names - actors.keys()]
        found = await asyncio.gather(*new, *old, return_exceptions=True)
        return "; ".join(str(each) or type(each).__name__ for each in found if isinstance(each, Exception))
