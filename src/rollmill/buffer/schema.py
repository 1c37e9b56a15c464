"""Tables of a buffer in a database. Several runs may share them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)

FORMAT = 1
"""Incremented when tables change in a way that older versions would misread."""

metadata = MetaData()


class RawBytes(LargeBinary):
    """Bytes without conversion: both drivers use `bytes`, which SQLAlchemy would wrap and copy."""

    cache_ok = True

    def bind_processor(self, dialect: Any) -> None:
        """None: no conversion."""

    def result_processor(self, dialect: Any, coltype: Any) -> None:
        """None: no conversion."""


meta = Table(
    "rollmill_meta",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
)
"""`format`: FORMAT."""

runs = Table(
    "rollmill_runs",
    metadata,
    Column("run", Integer, primary_key=True),
    Column("run_id", Text, nullable=False, unique=True),
    Column("last", BigInteger, nullable=False),  # number of the newest group; never reused
    Column("forgotten", BigInteger, nullable=False),  # expired groups that were deleted since
    Column("marked_at", Float(53)),
)
"""One row per run. Every change of a run locks its row first, so numbers are assigned in the order of commits."""

groups = Table(
    "rollmill_groups",
    metadata,
    Column("run", Integer, primary_key=True, autoincrement=False),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("id", Text, nullable=False),
    Column("shelf", Text, nullable=False),
    Column("writer", Text, nullable=False),
    Column("author", Text, nullable=False),
    Column("task_id", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("priority", Float(53), nullable=False),
    Column("oldest_version", Integer, nullable=False),
    Column("size", Integer, nullable=False),  # experiences
    Column("bytes", BigInteger, nullable=False),  # of their rows
    Column("reward", Float(53)),  # mean of the scored ones
    Column("rewards", Text, nullable=False),  # JSON list
    Column("body", Text, nullable=False),  # JSON: author and info, exactly
    Column("taken", Integer),  # the step it was first handed out for
    Column("expired", Integer),  # the step for which it was too old
    Column("removed_at", Float(53)),
    Column("removed_by", Text),
)
"""One row per group, with all that is needed to choose one without reading its experiences."""

not_removed = groups.c.removed_at.is_(None)
"""Condition: the group was not removed."""
waiting = not_removed & groups.c.taken.is_(None) & groups.c.expired.is_(None)
"""Condition: the group may be handed out for the first time."""
Index("rollmill_groups_id", groups.c.run, groups.c.id, unique=True)
Index("rollmill_groups_shelf", groups.c.run, groups.c.shelf, groups.c.number)
Index(
    "rollmill_groups_waiting",
    groups.c.run,
    groups.c.shelf,
    groups.c.number,
    sqlite_where=waiting,
    postgresql_where=waiting,
)

Index(
    "rollmill_groups_expired",
    groups.c.run,
    sqlite_where=groups.c.expired.is_not(None),
    postgresql_where=groups.c.expired.is_not(None),
)

experiences = Table(
    "rollmill_experiences",
    metadata,
    Column("run", Integer, primary_key=True, autoincrement=False),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("body", Text, nullable=False),  # JSON: everything but arrays, in a list
    Column("lengths", RawBytes, nullable=False),  # of the arrays
    Column("token_ids", RawBytes, nullable=False),
    Column("logprobs", RawBytes, nullable=False),
    Column("versions", RawBytes, nullable=False),
    Column("action_mask", RawBytes, nullable=False),
    Column("advantage", RawBytes, nullable=False),
)
"""One row per group: its experiences. Separate from `groups`, so that queries on groups do not read them."""

uses = Table(
    "rollmill_uses",
    metadata,
    Column("run", Integer, primary_key=True, autoincrement=False),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("first", Boolean, nullable=False),  # handed out by `take`, not by `replay`
    Column("position", Integer, nullable=False),  # among those of the step
    Column("priority", Float(53)),  # after the training step
)
"""One row per group and step that used it; replay's counts, cool-downs and priorities derive from these."""
Index("rollmill_uses_step", uses.c.run, uses.c.step)

tasks = Table(
    "rollmill_tasks",
    metadata,
    Column("run", Integer, primary_key=True, autoincrement=False),
    Column("key", Text, primary_key=True),
    Column("position", BigInteger, nullable=False),
    Column("body", Text, nullable=False),
)
"""The taskset, in order."""
Index("rollmill_tasks_position", tasks.c.run, tasks.c.position)

writers = Table(
    "rollmill_writers",
    metadata,
    Column("run", Integer, primary_key=True, autoincrement=False),
    Column("kind", Text, primary_key=True),
    Column("host", Text, primary_key=True),
    Column("pid", Integer, primary_key=True, autoincrement=False),
    Column("seen_at", Float(53), nullable=False),
    Column("wrote_at", Float(53)),
    Column("written", BigInteger, nullable=False),  # groups
)
"""Writers and when they last wrote, for the timeout errors of readers."""
