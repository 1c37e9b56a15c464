"""What all stages of a run share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmill.config.placement import InlinePlacement, PlacementConfig
from rollmill.orchestrator.buffers import Buffers
from rollmill.remote.actor_pool import ActorPool
from rollmill.trackers.heartbeat import HeartbeatWriter


@dataclass(frozen=True)
class RunContext:
    """Settings of a run that its components need, wherever they are."""

    run_dir: Path
    run_id: str  #: what a database and shared memory know the run by
    seed: int
    precision: str  #: bf16 or fp32
    threads: int  #: of each process
    buffers: Buffers
    plugins: Sequence[Path] = ()  #: files that processes import
    placement: PlacementConfig = field(default_factory=InlinePlacement)
    heartbeat: HeartbeatWriter | None = None  #: of this process, where it works on a run
    explorers: ActorPool | None = None  #: those of the run, on Ray; without, a stage starts its own
    ranks: Sequence[dict[str, Any]] = ()  #: how Ray starts the trainer's other ones; without, child processes

    def set_activity(self, doing: str, waits_for: str = "", *, version: int | None = None) -> None:
        """What this process does from now on, and what it waits for; see `rollmill status`."""
        if self.heartbeat is not None:
            self.heartbeat.set_activity(doing, waits_for, version=version)
