"""`buffer` and `offline_data`: storage and replay of experiences, and sources of demonstrations and preferences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rollmill.config.section import Section


class ReplayConfig(Section):
    """Replay of groups that earlier steps have trained on."""

    groups: int = Field(ge=1)
    """Number of replayed groups that join each step, if that many are eligible."""
    order: Literal["fifo", "uniform", "priority"] = "uniform"
    """`fifo`: the group that waited longest. `uniform`: each with equal probability. `priority`: with probability
    proportional to priority ** exponent * decay ** age, where age counts versions since the group's oldest token."""
    priority: Literal["given", "advantage"] = "given"
    """`given`: set by the pipeline operator `priority`, else 1. `advantage`: the mean absolute advantage when the group
    was last trained on. Only with order `priority`."""
    exponent: float = Field(1.0, ge=0)
    """Exponent of the priority. Only with order `priority`."""
    decay: float = Field(1.0, gt=0, le=1)
    """Decay of a group's probability per version of age. Only with order `priority`."""
    max_age: int | None = Field(None, ge=0)
    """Maximum number of versions between a group's oldest token and the current weights. Default: no limit."""
    max_uses: int | None = Field(None, ge=2)
    """Maximum number of times a group is trained on, the first time included. Default: no limit."""
    cooldown: int = Field(1, ge=1)
    """A group used in step s may be replayed from step s + cooldown on."""
    capacity: int = Field(10_000, ge=1)
    """Number of most recently used groups to choose from."""

    def unused_keys(self) -> dict[str, str]:
        text = f"not honoured by order `{self.order}`; it is by `priority`"
        return {key: text for key in ("priority", "exponent", "decay") if self.order != "priority"}

    def conflicts(self) -> dict[str, str]:
        if self.max_uses is None or self.max_age is None:
            return {}
        steps = self.cooldown * (self.max_uses - 1)
        text = f"{self.max_uses} uses with cool-down {self.cooldown} take {steps} steps, longer than max_age"
        return {"max_uses": f"{text} ({self.max_age}); change one of them"} if steps > self.max_age else {}


class BufferConfig(Section):
    """Storage of verified experiences until the trainer reads them, and replay."""

    store: Literal["auto", "memory", "sql"] = "auto"
    """`memory`: in this process. `sql`: a database that other processes may read and write. `auto`: memory for
    synchronous runs without replay and without operators that create experiences, else sql."""
    url: str | None = None
    """SQLAlchemy URL of the database, for example `postgresql+psycopg://user@host/name` (extra `postgres`); leave the
    password to PGPASSWORD or ~/.pgpass. Default: SQLite in RUN/buffer.sqlite. Only with store `sql` or `auto`."""
    max_age: int | None = Field(None, ge=0)
    """Drop waiting groups whose oldest token is more versions old than this. The run's own groups are already within
    `max_staleness`; this limits imported ones. Default: no limit."""
    replay: ReplayConfig | None = None

    def extras(self) -> dict[str, tuple[str, str]]:
        postgres = (self.url or "").startswith("postgresql")
        return {"url": ("postgres", "psycopg")} if postgres else {}

    def in_database(self, persistent: bool) -> bool:
        """Returns whether the store is a database. `auto` depends on whether the stage is persistent."""
        return self.store == "sql" or (self.store == "auto" and (persistent or self.url is not None))

    def unused_keys(self) -> dict[str, str]:
        return {"url": "not honoured by store `memory`; it is by `sql`"} if self.store == "memory" else {}


class OfflineDataConfig(Section):
    """Demonstrations and preferences for algorithms that learn from them."""

    sources: list[Annotated[str, Field(min_length=1)]] = Field(["taskset", "run"], min_length=1)
    """`taskset`: its worked solutions and pairs. `run`: feedback from people and applications on this run, and what its
    pipeline creates. Otherwise the directory of another run, or a Parquet file (`buffer export`)."""
    rated_at_least: float | None = 1.0
    """Also imitate completions that a person rated at least this high (0 to 1); null: none. With `kto` these are
    desirable, and those rated lower are undesirable."""

    learn: Literal["last", "all"] = "last"
    """Turns that are imitated of a conversation with several of the assistant: the last one, or all. A response of
    several messages is imitated in all of its turns in any case."""

    @property
    def others(self) -> list[Path]:
        """Run directories and Parquet files among the sources."""
        return [Path(source) for source in self.sources if source not in ("taskset", "run")]
