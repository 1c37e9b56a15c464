"""Maintenance of a buffer's database: deletes groups that nothing needs, lists groups and computes statistics."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, select, update

import rollmill.buffer.schema as schema
from rollmill.buffer.base import ExperienceKind
from rollmill.buffer.row_codec import escape_for_database
from rollmill.buffer.sql import SqlStore
from rollmill.buffer.transaction import CHUNK, RunTransaction
from rollmill.errors import ConfigError

_groups, _uses, _runs = schema.groups.c, schema.uses.c, schema.runs.c


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Number of deleted groups by reason, and their size."""

    learned: int = 0  #: trained on, long ago
    continued: int = 0  #: unfinished, and continued since
    expired: int = 0
    removed: int = 0
    bytes: int = 0

    @property
    def groups(self) -> int:
        """Number of all deleted groups."""
        return self.learned + self.continued + self.expired + self.removed


def prune(store: SqlStore, *, oldest_step: int, older_than: int, capacity: int, dry_run: bool = False) -> PruneReport:
    """Delete groups that are no longer needed, in short transactions, so that a run may continue meanwhile.

    Args:
        oldest_step: step of the oldest checkpoint (0 without one). Groups used in later steps are kept, because a run
            that resumes from it needs them again.
        older_than: keep groups used in the last `older_than` steps.
        capacity: of replay; keep that many of the newest groups that were trained on.
        dry_run: count only.
    """
    kinds = _kinds(store, oldest_step, older_than, capacity)
    counts = {name: _count(store, condition) for name, condition in kinds.items()}
    found = PruneReport(
        **{name: groups for name, (groups, _) in counts.items()}, bytes=sum(size for _, size in counts.values())
    )
    if not dry_run:
        for name, condition in kinds.items():
            while _delete_some(store, condition, expired=name == "expired"):
                pass
        store.database.vacuum()
    return found


def _kinds(store: SqlStore, oldest_step: int, older_than: int, capacity: int) -> dict[str, ColumnElement[bool]]:
    mine, there, used = _groups.run == store.run, schema.not_removed, _uses.run == store.run
    newest = store.select(select(func.max(_uses.step)).where(used))[0][0] or 0
    limit = min(oldest_step, newest - older_than)
    rollouts = mine & (_groups.shelf == str(ExperienceKind.ROLLOUT)) & there
    replayed = select(_groups.number).where(rollouts, _groups.taken <= limit).order_by(_groups.number.desc())
    first_kept = store.select(replayed.limit(1).offset(capacity))
    old = _groups.number <= (first_kept[0][0] if first_kept else 0)
    later = select(_uses.number).where(used, _uses.step > limit)
    partial = mine & (_groups.shelf == str(ExperienceKind.PARTIAL)) & there & (_groups.taken <= limit)
    return {
        "learned": rollouts & (_groups.taken <= limit) & old & _groups.number.not_in(later),
        "continued": partial,
        "expired": mine & there & (_groups.expired <= oldest_step),
        "removed": mine & ~there,
    }


def _count(store: SqlStore, condition: ColumnElement[bool]) -> tuple[int, int]:
    query = select(func.count(), func.coalesce(func.sum(_groups.bytes), 0)).where(condition)
    groups, size = store.select(query)[0]
    return int(groups), int(size)


def _delete_some(store: SqlStore, condition: ColumnElement[bool], *, expired: bool) -> int:
    def work(rows: RunTransaction, _: int) -> int:
        numbers = list(rows.connection.execute(select(_groups.number).where(condition).limit(CHUNK)).scalars())
        rows.delete(numbers)
        if expired:
            more = {"forgotten": _runs.forgotten + len(numbers)}
            rows.connection.execute(update(schema.runs).where(_runs.run == store.run).values(more))
        return len(numbers)

    deleted: Any = store.change(work)
    return int(deleted)


# Listing and statistics, which read no experiences

_PAGE = 5000
_BINS = 10


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """Filter of groups; a field that is None does not filter. Rewards are means of a group."""

    kind: ExperienceKind | None = None
    task: str | None = None
    author: str | None = None
    reward_at_least: float | None = None
    reward_at_most: float | None = None

    def condition(self, run: int) -> ColumnElement[bool]:
        found: ColumnElement[bool] = _groups.run == run
        if self.kind is not None:
            found &= _groups.shelf == str(self.kind)
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
    """The newest groups in descending order, each as a row of plain values."""
    query = select(schema.groups).where(which.condition(store.run)).order_by(_groups.number.desc()).limit(limit)
    return [_listed(row) for row in store.select(query)]


def find_group(store: SqlStore, name: str) -> dict[str, Any]:
    """Find a group by its id or number, or by the id of one of its experiences.

    Raises:
        ConfigError: there is no such group.
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
    """Counts of all groups by kind, state, writer, author and version, and a histogram of their rewards."""
    counts: dict[str, Counter[Any]] = {key: Counter() for key in ("kind", "state", "writer", "author", "version")}
    rewards: Counter[float] = Counter()
    totals: Counter[str] = Counter()
    for row in _all(store):
        counts["kind"][row.shelf] += 1
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
    """State of a group: removed, expired, taken, waiting or kept."""
    if row.removed_at is not None:
        return "removed"
    if row.expired is not None:
        return "expired"
    if row.taken is not None:
        return "taken"
    return "waiting" if row.shelf in (ExperienceKind.ROLLOUT, ExperienceKind.PARTIAL) else "kept"


def reward_histogram(rewards: Counter[float]) -> list[dict[str, float]]:
    """Up to ten bins from the lowest to the highest reward; single values if there are few. Leaves out NaN."""
    values = sorted(reward for reward in rewards if math.isfinite(reward))
    if len(values) <= _BINS:
        return [{"from": value, "to": value, "count": rewards[value]} for value in values]
    low, width = values[0], (values[-1] - values[0]) / _BINS
    counts = [0] * _BINS
    for value in values:
        counts[min(_BINS - 1, int((value - low) / width))] += rewards[value]
    return [{"from": low + i * width, "to": low + (i + 1) * width, "count": count} for i, count in enumerate(counts)]


def _all(store: SqlStore) -> Iterator[Any]:
    """The rows of all groups, without their bodies."""
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
        "kind": row.shelf,
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
