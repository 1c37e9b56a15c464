"""`buffer` and `experts`: where experiences are kept, which are learned from again, and what is imitated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rollmill.config.section import Section


class ReplayConfig(Section):
    """Groups that were learned from before and join later steps."""

    groups: int = Field(ge=1)
    """How many join each step, as far as there are any that may."""
    order: Literal["fifo", "uniform", "priority"] = "uniform"
    """`fifo`: the one that waited longest. `uniform`: each with the same chance. `priority`: with chances in
    proportion to priority ** exponent * decay ** age, where age counts versions since the group's oldest token."""
    priority: Literal["given", "advantage"] = "given"
    """`given`: what the pipeline's operator `priority` says, else 1. `advantage`: the mean absolute advantage when the
    group was last learned from. Only with order `priority`."""
    exponent: float = Field(1.0, ge=0)
    """How much priorities matter. Only with order `priority`."""
    decay: float = Field(1.0, gt=0, le=1)
    """Factor of a group's chance per version of age. Only with order `priority`."""
    max_age: int | None = Field(None, ge=0)
    """Versions between a group's oldest token and the weights that may still learn from it. Default: no bound."""
    max_uses: int | None = Field(None, ge=2)
    """How often a group is learned from at most, the first time included. Default: no bound."""
    cooldown: int = Field(1, ge=1)
    """A group that was learned from in step s may join again from step s + cooldown on."""
    capacity: int = Field(10_000, ge=1)
    """Only the newest N groups that were learned from are chosen from."""


class BufferConfig(Section):
    """Where verified experiences wait for the trainer, and which of them are kept for later steps."""

    store: Literal["auto", "memory", "sql"] = "auto"
    """`memory`: in this process. `sql`: a database, which other processes may read and write. `auto`: memory for
    synchronous runs without replay and without operators that make experiences, else sql."""
    url: str | None = None
    """SQLAlchemy URL of the database, for example `postgresql+psycopg://user@host/name` (extra `postgres`); leave the
    password to PGPASSWORD or ~/.pgpass. Default: SQLite in RUN/buffer.sqlite. Only with store `sql` or `auto`."""
    max_age: int | None = Field(None, ge=0)
    """Waiting groups whose oldest token is more versions old are never learned from. Those of the run itself are
    within `max_staleness`; this is for imported ones. Default: no bound."""
    replay: ReplayConfig | None = None

    def in_database(self, persistent: bool) -> bool:
        """Whether the store is a database; what `auto` stands for depends on whether the run is persistent."""
        return self.store == "sql" or (self.store == "auto" and (persistent or self.url is not None))


class ExpertsConfig(Section):
    """What is imitated or preferred, by algorithms that do."""

    sources: list[Annotated[str, Field(min_length=1)]] = Field(["taskset", "run"], min_length=1)
    """`taskset`: its worked solutions and pairs. `run`: what people and applications say about this run, and what its
    pipeline makes. Else what another run holds of these: its directory, or a Parquet file (`buffer export`)."""
    rated_at_least: float | None = 1.0
    """Completions that a person rated at least this much (0 to 1) are imitated, too; null: none. With `kto` these are
    desirable, and those with a lower rating undesirable."""

    @property
    def others(self) -> list[Path]:
        """Run directories and Parquet files among the sources."""
        return [Path(source) for source in self.sources if source not in ("taskset", "run")]
