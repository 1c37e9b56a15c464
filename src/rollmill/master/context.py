"""What all stages of a run share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollmill.cluster.pool import ActorPool
from rollmill.config.placement import Inline, PlacementConfig
from rollmill.master.buffers import Buffers

RANKS = "ranks"


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
    placement: PlacementConfig = field(default_factory=Inline)
    explorers: ActorPool | None = None  #: those of the run, on Ray; without, a stage starts its own

    @property
    def ranks_folder(self) -> Path:
        """For what ranks in other processes print."""
        return self.run_dir / RANKS
