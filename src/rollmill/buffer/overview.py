"""What a database holds, for people: groups by filters, and counts. Reads no experiences."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, select

import rollmill.buffer.schema as schema
from rollmill.buffer.base import ExperienceKind
from rollmill.buffer.row_codec import escape_for_database
from rollmill.buffer.sql import SqlStore
from rollmill.errors import ConfigError

_groups, _uses = schema.groups.c, schema.uses.c
_PAGE = 5000
_BINS = 10


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Which groups; None for all. Rewards are means of a group."""

    shelf: ExperienceKind | None = None
    task: str | None = None
    author: str | None = None
    reward_at_least: float | None = None
    reward_at_most: float | None = None

    def condition(self, run: int) -> ColumnElement[bool]:
        """As SQL."""
        found: ColumnElement[bool] = _groups.run == run
        if self.shelf is not None:
            found &= _groups.shelf == str(self.shelf)
        if self.task is not None:
            found &= _groups.task_id == escape_for_database(self.task)
        if self.author is not None:
            found &= _groups.author == escape_for_database(self.author)
        if self.reward_at_least is not None:
            found &= _groups.reward >= self.reward_at_least
        if self.reward_at_most is not None:
            found &= _groups.reward <= self.reward_at_most
        return found


def list_newest(store: SqlStore, which: GroupFilter, limit: int) -> list[dict[str, Any]]:
    """The newest groups, the newest one first: a row of plain values for each."""
    query = select(schema.groups).where(which.condition(store.run)).order_by(_groups.number.desc()).limit(limit)
    return [_listed(row) for row in store.select(query)]


def find_group(store: SqlStore, name: str) -> dict[str, Any]:
    """The group with this id or number, or that of the experience with this id.

    Raises:
        ConfigError: there is none.
    """
    name = escape_for_database(name)
    which: list[ColumnElement[bool]] = [_groups.id == name]
    if name.isascii() and name.isdigit() and len(name) < 19:
        which.append(_groups.number == int(name))
    if "/" in name:
        which.append(_groups.id == name.rpartition("/")[0])
    queries = (select(schema.groups).where(_groups.run == store.run, one) for one in which)
    rows = next(filter(None, map(store.select, queries)), None)
    if not rows:
        raise ConfigError(f"the buffer {store.database} has no group {name}; `rollmill buffer ls RUN` lists them")
    number = rows[0].number
    uses = select(_uses.step, _uses.first, _uses.priority).where(_uses.run == store.run, _uses.number == number)
    history = [{"step": use.step, "priority": use.priority} for use in store.select(uses.order_by(_uses.step))]
    return _listed(rows[0]) | {"uses": history, "removed_by": rows[0].removed_by}


def buffer_statistics(store: SqlStore) -> dict[str, Any]:
    """Counts of all groups, by what tells them apart, and where their rewards lie."""
    counts: dict[str, Counter[Any]] = {key: Counter() for key in ("shelf", "state", "writer", "author", "version")}
    rewards: Counter[float] = Counter()
    totals: Counter[str] = Counter()
    for row in _all(store):
        counts["shelf"][row.shelf] += 1
        counts["state"][f"{row.shelf}: {group_state(row)}"] += 1
        counts["writer"][row.writer] += 1
        counts["author"].update([row.author] if row.author else [])
        counts["version"].update([row.oldest_version] if row.oldest_version >= 0 else [])
        totals.update(groups=1, experiences=row.size, bytes=row.bytes)
        known = [reward for reward in json.loads(row.rewards) if reward is not None]
        rewards.update(known)
        totals["not_judged"] += row.size - len(known)
    tables = {"tasks": schema.tasks, "uses": schema.uses}
    for name, table in tables.items():
        totals[name] = store.select(select(func.count()).select_from(table).where(table.c.run == store.run))[0][0]
    return {
        **{key: totals[key] for key in ("groups", "experiences", "bytes", "not_judged", *tables)},
        **{f"by_{key}": dict(sorted(found.items())) for key, found in counts.items()},
        "rewards": reward_histogram(rewards),
        "writers": store.writers(),
    }


def group_state(row: Any) -> str:
    """Where a group stands: removed, expired, taken, waiting or kept."""
    if row.removed_at is not None:
        return "removed"
    if row.expired is not None:
        return "expired"
    if row.taken is not None:
        return "taken"
    return "waiting" if row.shelf in (ExperienceKind.ROLLOUT, ExperienceKind.PARTIAL) else "kept"


def reward_histogram(rewards: Counter[float]) -> list[dict[str, float]]:
    """Up to ten bins from the least to the greatest reward; single values where there are few. Leaves out NaN."""
    values = sorted(reward for reward in rewards if math.isfinite(reward))
    if len(values) <= _BINS:
        return [{"from": value, "to": value, "count": rewards[value]} for value in values]
    low, width = values[0], (values[-1] - values[0]) / _BINS
    counts = [0] * _BINS
    for value in values:
        counts[min(_BINS - 1, int((value - low) / width))] += rewards[value]
    return [{"from": low + i * width, "to": low + (i + 1) * width, "count": count} for i, count in enumerate(counts)]


def _all(store: SqlStore) -> Iterator[Any]:
    """The rows of all groups, but for their bodies."""
    columns = [column for column in schema.groups.columns if column.name not in ("body", "id")]
    last = 0
    while page := _page(store, columns, last):
        yield from page
        last = page[-1].number


def _page(store: SqlStore, columns: Sequence[Any], last: int) -> Sequence[Any]:
    query = select(*columns).where(_groups.run == store.run, _groups.number > last)
    return store.select(query.order_by(_groups.number).limit(_PAGE))


def _listed(row: Any) -> dict[str, Any]:
    return {
        "number": row.number,
        "id": row.id,
        "shelf": row.shelf,
        "state": group_state(row),
        "task": row.task_id,
        "experiences": row.size,
        "reward": row.reward,
        "version": row.oldest_version if row.oldest_version >= 0 else None,
        "step": row.taken,
        "priority": row.priority,
        "writer": row.writer,
        "author": row.author,
        "created_at": row.created_at,
        "bytes": row.bytes,
    }
