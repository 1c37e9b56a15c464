"""Settings and resources that all stages of a run share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollmill.config.engines import EngineConfig
from rollmill.orchestrator.buffers import Buffers
from rollmill.trackers.heartbeat import HeartbeatWriter

if TYPE_CHECKING:
    from rollmill.orchestrator.rollouts import RolloutBackend
    from rollmill.orchestrator.stages import Stage


class ExplorerPool(Protocol):
    """Explorers in other processes, from which the stages of a run get their rollouts."""

    def rollouts(self, stage: Stage) -> RolloutBackend:
        """Make the explorers ready for a stage."""
        ...

    def serving(self, message: Callable[[str], None]) -> AbstractAsyncContextManager[None]:
        """Inside, explorers can be reached; `message` tells the user what happens to them."""
        ...


@dataclass(frozen=True)
class RunContext:
    """Settings of a run that its components need, in every process."""

    run_dir: Path
    run_id: str  #: identifies the run in a database and in shared memory
    seed: int
    precision: str  #: bf16 or fp32
    threads: int  #: threads of each process
    buffers: Buffers
    plugins: Sequence[Path] = ()  #: plugin files that every process imports
    heartbeat: HeartbeatWriter | None = None  #: of this process, while it works on a run
    explorers: ExplorerPool | None = None  #: in other processes; None: rollouts are made in this one
    engines: Sequence[EngineConfig | None] | None = None  #: of explorers elsewhere on the device (`engines_on_device`)
    ranks: Sequence[dict[str, Any]] = ()  #: how Ray starts the other ranks; empty: child processes

    @property
    def machine(self) -> dict[str, Any]:
        """The contents of machine.json."""
        return {"threads": self.threads, "precision": self.precision, "run_id": self.run_id}

    def set_activity(self, doing: str, waits_for: str = "", *, version: int | None = None) -> None:
        """Set what this process is doing and waiting for, as shown by `rollmill status`."""
        if self.heartbeat is not None:
            self.heartbeat.set_activity(doing, waits_for, version=version)
