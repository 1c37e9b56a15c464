"""Deleting what neither the run nor a checkpoint can ask for, and giving the space back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, select, update

import rollmill.buffer.schema as schema
from rollmill.buffer.base import ExperienceKind
from rollmill.buffer.sql import SqlStore
from rollmill.buffer.transaction import CHUNK, RunTransaction

_groups, _uses, _runs = schema.groups.c, schema.uses.c, schema.runs.c


@dataclass(frozen=True, slots=True)
class PruneReport:
    """How many groups go, by why they may."""

    learned: int = 0  #: learned from, long ago
    continued: int = 0  #: unfinished, and handed out to be continued
    expired: int = 0
    removed: int = 0
    bytes: int = 0

    @property
    def groups(self) -> int:
        """All of them."""
        return self.learned + self.continued + self.expired + self.removed


def prune(store: SqlStore, *, oldest_step: int, older_than: int, capacity: int, dry_run: bool = False) -> PruneReport:
    """Delete groups that are not needed, in short transactions: a run may go on meanwhile.

    Args:
        oldest_step: of the oldest checkpoint; what was used for later steps is kept, since a run that goes back to it
            asks for it again. 0 where there is none.
        older_than: keep what was used in the last so many steps.
        capacity: of replay; so many of the newest groups that were learned from are kept.
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
    usual = mine & (_groups.shelf == str(ExperienceKind.ROLLOUT)) & there
    replayed = select(_groups.number).where(usual, _groups.taken <= limit).order_by(_groups.number.desc())
    first_kept = store.select(replayed.limit(1).offset(capacity))
    old = _groups.number <= (first_kept[0][0] if first_kept else 0)
    later = select(_uses.number).where(used, _uses.step > limit)
    partial = mine & (_groups.shelf == str(ExperienceKind.PARTIAL)) & there & (_groups.taken <= limit)
    return {
        "learned": usual & (_groups.taken <= limit) & old & _groups.number.not_in(later),
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
