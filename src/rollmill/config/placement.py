"""`placement`: in which processes a run's components live."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rollmill.config.base import Section
from rollmill.config.parts import name_alone


class Inline(Section):
    """Everything in one process: the engine decodes with the trainer's own parameters."""

    name: Literal["inline"] = "inline"


class OnRay(Section):
    """Explorers are Ray actors, each with an engine, rewards and environments of its own. Master, trainer and buffer
    are another one; `rollmill run` watches over all. With max_staleness 1 or more explorers roll out while it trains.
    """

    name: Literal["ray"] = "ray"
    address: str | None = None
    """Of a cluster: `HOST:PORT` of its head (port 6379 by default), or `auto` on one of its hosts. Without one, the run
    starts a Ray of its own on this machine."""
    explorers: int = Field(1, ge=1)
    """How many."""
    cpus: float = Field(1.0, ge=0)
    """Cores that Ray reserves for each."""
    gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves for each."""
    trainer_cpus: float = Field(0.0, ge=0)
    """Cores that Ray reserves for the trainer; 0: it takes what explorers leave."""
    trainer_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves for the trainer; 0: it sees all of its host."""
    weights: Literal["memory", "folder"] = "memory"
    """How new weights reach explorers: by shared memory, where all are on this host, or by a folder that all see."""
    weights_folder: str | None = None
    """That folder; default RUN/weights."""
    health_s: float = Field(60.0, ge=2)
    """An explorer or trainer that does not answer for so long is started again. A trainer may take a second."""
    replacements: int = Field(3, ge=0)
    """How many explorers may be replaced between two steps before the run gives up."""
    restarts: int = Field(3, ge=0)
    """How often the trainer may be started again, from its newest checkpoint, before it gets further than ever."""


PlacementConfig = Annotated[
    Annotated[Inline | OnRay, Field(discriminator="name")],
    BeforeValidator(name_alone),
]
