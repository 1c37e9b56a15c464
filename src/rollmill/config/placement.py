"""`placement`: assignment of a run's components to processes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rollmill.config.engines import EngineConfig
from rollmill.config.section import Section, expand_name


class InlinePlacement(Section):
    """Everything in one process: the engine uses the trainer's parameters."""

    name: Literal["inline"] = "inline"


class ExplorerSpec(Section):
    """A set of identical explorers. Keys that are not set are taken from `placement`, the stage or the run."""

    count: int = Field(1, ge=1)
    """Number of explorers of this kind."""
    cpus: float | None = Field(None, ge=0)
    """Cores that Ray reserves for each. Default: placement.cpus."""
    gpus: float | None = Field(None, ge=0)
    """GPUs that Ray reserves for each. Default: placement.gpus."""
    engine: EngineConfig | None = None
    """Inference engine of these explorers in every stage: a name or a section. Default: the stage's."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of each. Default: the run's."""


def _number_alone(value: Any) -> Any:
    """Expands a number to that many identical explorers."""
    if isinstance(value, list) and value:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        found = "an empty list" if value == [] else "a section" if isinstance(value, dict) else f"`{value}`"
        raise ValueError(f"expected a whole number of at least 1, or a list of kinds, found {found}")
    return [{"count": value}]


ExplorerSpecs = Annotated[list[ExplorerSpec], BeforeValidator(_number_alone)]


class RayPlacement(Section):
    """Explorers are Ray actors, each with its own engine, rewards and environments. Orchestrator, trainer and buffer
    are another actor, and so is each further rank of the trainer; `rollmill run` supervises all. With max_staleness 1
    or more, explorers roll out while the trainer trains."""

    needs_extra = ("ray", "ray")

    name: Literal["ray"] = "ray"
    address: str | None = None
    """Address of a cluster: `HOST:PORT` of its head (port 6379 by default), or `auto` on one of its hosts. Default:
    start Ray on this machine."""
    explorers: ExplorerSpecs = Field(1)  # type: ignore[arg-type]  # defaults are validated
    """Number of explorers; or, for different kinds, a list with one section per kind."""
    cpus: float = Field(1.0, ge=0)
    """Cores that Ray reserves for each explorer."""
    gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves for each explorer."""
    trainer_cpus: float = Field(0.0, ge=0)
    """Cores that Ray reserves for each trainer rank; 0: they use what explorers leave."""
    trainer_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves for each trainer rank; 0: a rank sees all GPUs of its host."""
    weights: Literal["memory", "folder", "broadcast"] = "memory"
    """Transfer of new weights to explorers: shared memory (one host only), a shared folder, or a broadcast over the
    network."""
    nccl: bool = False
    """Broadcast with NCCL, if the trainer and each explorer have their own GPUs; otherwise with gloo. Untested."""
    weights_folder: str | None = None
    """Shared folder of `weights: folder`. Default: RUN/weights."""
    health_s: float = Field(60.0, ge=2)
    """Health check timeout: an explorer or trainer that does not respond within this time is restarted. A busy trainer
    may take a second to respond."""
    replacements: int = Field(3, ge=0)
    """Maximum explorers replaced between two steps before the run ends with an error."""

    @property
    def every_explorer(self) -> list[ExplorerSpec]:
        """The specification of each explorer, by number."""
        return [kind for kind in self.explorers for _ in range(kind.count)]

    def unused_keys(self) -> dict[str, str]:
        keys = {}
        for key, other in (("weights_folder", "folder"), ("nccl", "broadcast")):
            if self.weights != other:
                keys[key] = f"not honoured with weights `{self.weights}`; it is with `{other}`"
        for key in ("cpus", "gpus"):
            if all(getattr(kind, key) is not None for kind in self.explorers):
                keys[key] = "not honoured: every kind of placement.explorers has its own; remove it"
        return keys

    def conflicts(self) -> dict[str, str]:
        found = {}
        with_gpus = all((self.gpus if kind.gpus is None else kind.gpus) >= 1 for kind in self.explorers)
        if self.nccl and not (self.trainer_gpus >= 1 and with_gpus):
            text = "needs a GPU for each explorer and the trainer; set placement.gpus and placement.trainer_gpus to 1"
            found["nccl"] = text
        if self.address is not None and self.address.startswith("ray://"):
            text = "Ray Client cannot start runs; give HOST:PORT of the cluster's head (6379 by default), or `auto`"
            found["address"] = text
        return found


PlacementConfig = Annotated[
    Annotated[InlinePlacement | RayPlacement, Field(discriminator="name")],
    BeforeValidator(expand_name),
]
