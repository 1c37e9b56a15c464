"""Explorers that are Ray actors, which Ray restartable when their process ends."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rollmill.config.placement import ExplorerSpec, RayPlacement
from rollmill.ray_session import host_address, join, ray_module
from rollmill.remote.explorer_worker import ExplorerWorker
from rollmill.remote.placement_group import PlacementGroup, ResourceRequest
from rollmill.remote.rollout_backend import WeightTransport
from rollmill.remote.run_state import EXPLORER, WEIGHTS
from rollmill.remote.stage_worker import WorkerSetup
from rollmill.remote.worker_pool import WorkerHandle, WorkerLostError, WorkerPool
from rollmill.trackers.heartbeat import HeartbeatWriter


class ExplorerActor(ExplorerWorker):
    """An ExplorerWorker that writes its own heartbeats. A process that replaces it has the same name and kind."""

    def __init__(self, run_dir: Path, name: str, kind: ExplorerSpec) -> None:
        super().__init__(HeartbeatWriter(run_dir, name), kind)


class RayWorkerHandle:
    """A worker that is a Ray actor; a WorkerHandle."""

    restartable = True

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def call(self, method: str, *arguments: Any) -> Any:
        """See WorkerHandle."""
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
        """See WorkerHandle."""
        getattr(self._actor, method).remote(*arguments)

    def kill(self) -> None:
        """See WorkerHandle."""
        ray_module().kill(self._actor, no_restart=False)


class RayExplorers:
    """The actors of a run, as an ExplorerFleet. They outlive the trainer's process that uses them.

    Args:
        actors: by name; see `start_explorers`.
        silent_s: see WorkerPool.
    """

    def __init__(self, placement: RayPlacement, run_dir: Path, actors: dict[str, Any], silent_s: float) -> None:
        address = join(placement.address)
        handles: dict[str, WorkerHandle] = {name: RayWorkerHandle(actor) for name, actor in actors.items()}
        health, replacements = placement.health_s, placement.replacements
        self.pool = WorkerPool(
            EXPLORER, handles, health_s=health, replacements=replacements, silent_s=silent_s, run_dir=run_dir
        )
        self.location = f"{len(actors)} explorer{'s' * (len(actors) > 1)} on Ray at {address}"
        self.display_name = self.location
        folder = str(Path(placement.weights_folder or run_dir / WEIGHTS).absolute())
        engines = [kind.engine for kind in placement.explorers]
        self.transport = WeightTransport(placement.weights, folder, host_address(), placement.nccl, engines)

    def share(self, setup: WorkerSetup) -> Any:
        """See ExplorerFleet. All explorers of a host read one copy."""
        return ray_module().put(setup)

    def describe(self) -> str:
        """Empty: Ray restartable explorers."""
        return ""

    def serving(self) -> AbstractAsyncContextManager[None]:
        """See ExplorerFleet: Ray can always reach them."""
        return nullcontext()


def explorer_needs(placement: RayPlacement) -> list[ResourceRequest]:
    """Resources that each explorer reserves, by number."""
    return [
        ResourceRequest(
            placement.cpus if kind.cpus is None else kind.cpus,
            placement.gpus if kind.gpus is None else kind.gpus,
        )
        for kind in placement.every_explorer
    ]


def start_explorers(placement: RayPlacement, group: PlacementGroup, run_dir: Path) -> dict[str, Any]:
    """Start the actors, by name, in the first bundles of the placement group; Ray restartable one that ends."""
    started = {}
    for number, kind in enumerate(placement.every_explorer):
        options = group.options(number) | {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": 10_000}
        name = f"{EXPLORER} {number}"
        started[name] = ray_module().remote(ExplorerActor).options(**options).remote(run_dir, name, kind)
    return started
