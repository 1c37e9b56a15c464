"""Buffer in a database: a SQLite file, or PostgreSQL. Other processes may read and write it at the same time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, func, select, update

import rollmill.buffer.schema as schema
from rollmill.buffer.base import (
    FEEDBACK,
    ExperienceKind,
    Group,
    Shares,
    kind_conflict_error,
    poll_until,
    too_few_groups_error,
    validate_groups,
)
from rollmill.buffer.database import Database
from rollmill.buffer.row_codec import (
    TableRow,
    decode_task,
    encode_experience_columns,
    encode_group,
    encode_task,
    to_json,
)
from rollmill.buffer.transaction import CHUNK, RunTransaction, find_run, is_older_than, is_waiting, make_run
from rollmill.config.buffer import ReplayConfig
from rollmill.errors import StoreError
from rollmill.types import Task

Result = TypeVar("Result")

SQL = "sql"
_PAGE_GROUPS, _PAGE_BYTES = 64, 32 << 20

_groups = schema.groups.c


class SqlStore:
    """An `ExperienceStore` of one run in a database that may hold several.

    Every change is one idempotent transaction, which first locks the run's row. All methods raise StoreError if the
    database fails or is unreachable for its `outage_s`.
    """

    kind = SQL

    def __init__(self, database: Database, run_id: str) -> None:
        """Raises StoreError if a read-only database does not have the run."""
        self.database = database
        if database.read_only:
            run = database.read(lambda connection: find_run(connection, run_id))
        else:
            run = database.write(lambda connection: make_run(connection, run_id))
        if run is None:
            raise StoreError(f"the buffer {database} holds nothing of this run (its id is {run_id})")
        self.run, self.run_id = run, run_id

    # -- writing -----------------------------------------------------------------------------------------------

    def put(self, groups: Sequence[Group]) -> int:
        """A retry after a lost connection may count its own groups as known."""
        now = time.time()
        packed: dict[str, tuple[TableRow, TableRow]] = {}
        for group in validate_groups(groups):
            inside = encode_experience_columns(group.experiences)
            packed.setdefault(group.id, (encode_group(group, inside) | {"created_at": group.created_at or now}, inside))

        def work(rows: RunTransaction, last: int) -> int:
            known = rows.kinds(list(packed))
            new: list[TableRow] = []
            experiences: list[TableRow] = []
            for id, (row, inside) in packed.items():
                if known.get(id, row["shelf"]) != row["shelf"]:
                    raise kind_conflict_error(id, known[id], row["shelf"])
                if id not in known:
                    key = {"run": self.run, "number": last + len(new) + 1}
                    new.append(row | key)
                    experiences.append(inside | key)
            rows.add(new, experiences, last + len(new))
            for kind, count in Counter(row["writer"] for row in new).items():
                rows.seen(kind, count)
            return len(new)

        return self.change(work) if packed else 0

    def announce(self, kind: str) -> None:
        """Register this process as a writer, so that timeout errors of readers can name it."""
        self.change(lambda rows, _: rows.seen(kind, 0))

    def put_tasks(self, tasks: Sequence[Task]) -> None:
        bodies = {to_json(task.id): encode_task(task) for task in tasks}
        self.change(lambda rows, _: rows.put_tasks(bodies))

    def remove(self, ids: Sequence[str], *, by: str) -> None:
        """Raises StoreError if an id is unknown; then nothing is changed."""

        def work(rows: RunTransaction, _: int) -> None:
            for number in self._numbers(rows, ids):
                one = (_groups.run == self.run) & (_groups.number == number) & schema.not_removed
                rows.connection.execute(update(schema.groups).where(one).values(removed_at=time.time(), removed_by=by))

        self.change(work)

    def restore(self, ids: Sequence[str]) -> None:
        """Raises StoreError if an id is unknown; then nothing is changed."""

        def work(rows: RunTransaction, last: int) -> None:
            for number in self._numbers(rows, ids):
                one = (_groups.run == self.run) & (_groups.number == number) & ~schema.not_removed
                back = update(schema.groups).where(one).values(removed_at=None, removed_by=None)
                if rows.connection.execute(back.returning(_groups.writer)).scalar() == FEEDBACK:
                    last += 1
                    rows.renumber(number, last)

        self.change(work)

    # -- handing out -------------------------------------------------------------------------------------------

    def take(self, count: int, *, step: int, deadline_s: float, min_version: int | None = None) -> list[Group]:
        def work(rows: RunTransaction, _: int) -> list[int] | None:
            if before := rows.handed_out(step, ExperienceKind.ROLLOUT, first=True):
                return before
            if min_version is not None:
                rows.expire(min_version, step)
            there = rows.connection.execute(_counted(is_waiting(self.run, ExperienceKind.ROLLOUT))).scalar_one()
            return rows.hand_out(ExperienceKind.ROLLOUT, count, step) if there >= count else None

        numbers = poll_until(lambda: self.change(work), deadline_s)
        if numbers is None:
            raise too_few_groups_error(count, self.waiting(), deadline_s, self.writers())
        return self.groups(numbers)

    def take_partial(self, count: int, *, step: int) -> list[Group]:
        def work(rows: RunTransaction, _: int) -> list[int]:
            before = rows.handed_out(step, ExperienceKind.PARTIAL, first=True)
            return before or rows.hand_out(ExperienceKind.PARTIAL, count, step)

        return self.groups(self.change(work))

    def replay(
        self, rule: ReplayConfig, *, step: int, version: int, seed: int, since: int = 0, shares: Shares | None = None
    ) -> list[Group]:
        def work(rows: RunTransaction, _: int) -> list[int]:
            return rows.replay(rule, step=step, version=version, seed=seed, since=since, shares=shares)

        return self.groups(self.change(work))

    def update_priorities(self, groups: Sequence[Group], *, step: int) -> None:
        priorities = {group.id: group.priority for group in validate_groups(groups)}

        def work(rows: RunTransaction, _: int) -> None:
            for id, number in rows.numbers(list(priorities)).items():
                rows.note_priority(number, step, priorities[id])

        self.change(work)

    # -- reading -----------------------------------------------------------------------------------------------

    def read(self, kind: ExperienceKind, *, after: int = 0) -> Iterator[tuple[int, Group]]:
        """Holds at most about 32 MiB of rows."""
        there = (_groups.run == self.run) & (_groups.shelf == str(kind)) & schema.not_removed
        while numbers := self._page(there & (_groups.number > after)):
            yield from self._found(numbers).items()
            after = numbers[-1]

    def get(self, ids: Sequence[str]) -> list[Group]:
        known = self.database.read(lambda connection: RunTransaction(connection, self.run).numbers(ids, there=True))
        return self.groups([known[id] for id in ids if id in known])

    def groups(self, numbers: Sequence[int]) -> list[Group]:
        """Whole groups by number, in this order; those deleted by another process are left out."""
        return list(self._found(numbers).values())

    def _found(self, numbers: Sequence[int]) -> dict[int, Group]:
        found: dict[int, Group] = {}
        for first in range(0, len(numbers), CHUNK):
            some = numbers[first : first + CHUNK]
            try:
                found |= self.database.read(lambda c: RunTransaction(c, self.run).groups(some))  # noqa: B023
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(
                    f"groups {some[0]} to {some[-1]} of the buffer {self.database} are damaged: {error}; put a copy of "
                    "the database back, or start a new run"
                ) from error
        return {number: found[number] for number in numbers if number in found}

    def tasks(self) -> Iterator[Task]:
        table, last = schema.tasks.c, 0
        page = select(table.position, table.body).where(table.run == self.run).order_by(table.position).limit(CHUNK)
        while rows := self.select(page.where(table.position > last)):
            yield from (decode_task(row.body) for row in rows)
            last = rows[-1].position

    def waiting(self, *, min_version: int | None = None) -> int:
        there = is_waiting(self.run, ExperienceKind.ROLLOUT)
        there = there if min_version is None else there & ~is_older_than(min_version)
        return int(self.select(_counted(there))[0][0])

    def expired(self) -> int:
        late = _counted((_groups.run == self.run) & _groups.expired.is_not(None)).scalar_subquery()
        return int(self.select(select(schema.runs.c.forgotten + late).where(schema.runs.c.run == self.run))[0][0])

    def writers(self) -> list[dict[str, Any]]:
        """Rows of the writers, the last seen one first."""
        table = schema.writers
        rows = self.select(select(table).where(table.c.run == self.run).order_by(table.c.seen_at.desc()))
        return [row._asdict() for row in rows]

    # -- checkpoints -------------------------------------------------------------------------------------------

    def mark(self) -> dict[str, Any]:
        """All groups up to the mark survive a power failure."""
        runs = schema.runs

        def work(rows: RunTransaction, last: int) -> int:
            rows.connection.execute(update(runs).where(runs.c.run == self.run).values(marked_at=time.time()))
            return last

        return {"store": SQL, "last": self.change(work, synced=True)}

    def rewind(self, mark: dict[str, Any] | None, *, step: int) -> None:
        """Raises StoreError if the mark is of another kind of store or newer than the database."""
        if mark is not None and mark["store"] != SQL:
            raise StoreError(f"the checkpoint holds the buffer itself; set buffer.store: {mark['store']}, as before")
        marked = 0 if mark is None else int(mark["last"])

        def work(rows: RunTransaction, last: int) -> None:
            if marked > last:
                raise StoreError(
                    f"the buffer {self.database} has seen {last} groups of this run, its checkpoint {marked}; put the "
                    "database back that belongs to the run, or start a new run"
                )
            rows.undo_uses(step)
            rows.drop_made_after(marked)

        self.change(work)

    def close(self) -> None:
        self.database.close()

    # -- transactions ------------------------------------------------------------------------------------------

    def change(self, work: Callable[[RunTransaction, int], Result], *, synced: bool = False) -> Result:
        """Call `work` with the run's rows, locked, and the newest group's number, in one transaction."""
        write = self.database.sync if synced else self.database.write

        def locked(connection: Any) -> Result:
            rows = RunTransaction(connection, self.run)
            return work(rows, rows.lock())

        return write(locked)

    def _numbers(self, rows: RunTransaction, ids: Sequence[str]) -> list[int]:
        numbers = rows.numbers(ids)
        if unknown := [id for id in ids if id not in numbers]:
            raise StoreError(f"the buffer {self.database} has no group {unknown[0]}; nothing was changed")
        return [numbers[id] for id in dict.fromkeys(ids)]

    def select(self, query: Any) -> Sequence[Any]:
        """Rows of a query."""
        return self.database.read(lambda connection: connection.execute(query).all())

    def _page(self, condition: ColumnElement[bool]) -> list[int]:
        """Numbers of the next groups: as many as fit in a page, at least one if there is any."""
        query = select(_groups.number, _groups.bytes).where(condition).order_by(_groups.number).limit(_PAGE_GROUPS)
        numbers, size = list[int](), 0
        for number, group_bytes in self.select(query):
            if numbers and size + group_bytes > _PAGE_BYTES:
                break
            numbers.append(number)
            size += group_bytes
        return numbers


def _counted(condition: ColumnElement[bool]) -> Any:
    return select(func.count()).select_from(schema.groups).where(condition)
