"""`placement`: in which processes a run's components live."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from rollmill.config.engine import EngineConfig
from rollmill.config.section import Section, expand_name


class InlinePlacement(Section):
    """Everything in one process: the engine decodes with the trainer's own parameters."""

    is_remote: ClassVar[bool] = False  #: explorers have processes of their own

    name: Literal["inline"] = "inline"


class ExplorerSpec(Section):
    """Explorers that are alike. What is left out is as `placement`, the stage or the run has it."""

    count: int = Field(1, ge=1)
    """How many of this kind."""
    cpus: float | None = Field(None, ge=0)
    """Cores that Ray reserves for each. Default: placement.cpus."""
    gpus: float | None = Field(None, ge=0)
    """GPUs that Ray reserves for each. Default: placement.gpus."""
    engine: EngineConfig | None = None
    """What generates completions there, in every stage: a name, or a section. Default: the stage's."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of each. Default: the run's."""


def _number_alone(value: Any) -> Any:
    """A number stands for so many explorers that are alike."""
    if isinstance(value, list) and value:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        found = "an empty list" if value == [] else "a section" if isinstance(value, dict) else f"`{value}`"
        raise ValueError(f"expected a whole number of at least 1, or a list of kinds, found {found}")
    return [{"count": value}]


ExplorerSpecs = Annotated[list[ExplorerSpec], BeforeValidator(_number_alone)]


class RayPlacement(Section):
    """Explorers are Ray actors, each with an engine, rewards and environments of its own. Master, trainer and buffer
    are another one, and so is each further rank of the trainer; `rollmill run` watches over all. With max_staleness 1
    or more explorers roll out while it trains.
    """

    is_remote: ClassVar[bool] = True

    name: Literal["ray"] = "ray"
    address: str | None = None
    """Of a cluster: `HOST:PORT` of its head (port 6379 by default), or `auto` on one of its hosts. Without one, the run
    starts a Ray of its own on this machine."""
    explorers: ExplorerSpecs = Field(1)  # type: ignore[arg-type]  # defaults are validated
    """How many; or, where they differ, one section for every kind of them."""
    cpus: float = Field(1.0, ge=0)
    """Cores that Ray reserves for each explorer."""
    gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves for each explorer."""
    trainer_cpus: float = Field(0.0, ge=0)
    """Cores that Ray reserves for each of the trainer's ranks; 0: they take what explorers leave."""
    trainer_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves for each of the trainer's ranks; 0: it sees all of its host."""
    weights: Literal["memory", "folder", "broadcast"] = "memory"
    """How new weights reach explorers: by shared memory, where all are on this host, by a folder that all see, or by a
    broadcast over the network."""
    nccl: bool = False
    """Broadcast by NCCL, where the trainer and each explorer have GPUs of their own; else by gloo. Not yet tried."""
    weights_folder: str | None = None
    """That folder; default RUN/weights."""
    health_s: float = Field(60.0, ge=2)
    """An explorer or trainer that does not answer for so long is started again. A trainer may take a second."""
    replacements: int = Field(3, ge=0)
    """How many explorers may be replaced between two steps before the run gives up."""
    restarts: int = Field(3, ge=0)
    """How often the trainer may be started again, from its newest checkpoint, before it gets further than ever."""

    @property
    def every_explorer(self) -> list[ExplorerSpec]:
        """The kind of each, by number."""
        return [kind for kind in self.explorers for _ in range(kind.count)]


PlacementConfig = Annotated[
    Annotated[InlinePlacement | RayPlacement, Field(discriminator="name")],
    BeforeValidator(expand_name),
]
