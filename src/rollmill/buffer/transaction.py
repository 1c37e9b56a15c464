"""Operations on one run's rows, which `SqlStore` combines into transactions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

import rollmill.buffer.schema as schema
from rollmill.buffer.base import EXPLORER, PIPELINE, ExperienceKind, Group, Shares, writer_identity
from rollmill.buffer.replay import ReplayCandidates, choose_replayed
from rollmill.buffer.row_codec import TableRow, decode_experience_columns, decode_group
from rollmill.config.buffer import ReplayConfig

CHUNK = 500
"""Maximum number of values in one statement."""

_groups, _experiences, _uses, _runs = schema.groups.c, schema.experiences.c, schema.uses.c, schema.runs.c


class RunTransaction:
    """Operations on the rows of one run, within the transaction of `connection`."""

    def __init__(self, connection: Connection, run: int) -> None:
        self.connection, self.run = connection, run
        self._execute = connection.execute

    def lock(self) -> int:
        """Lock this run's rows until the transaction ends. Returns the newest group's number."""
        last: int = self._execute(select(_runs.last).where(_runs.run == self.run).with_for_update()).scalar_one()
        return last

    def numbers(self, ids: Sequence[str], *, there: bool = False) -> dict[str, int]:
        """Numbers of known groups by id; with `there` only of those that were not removed."""
        return {row.id: row.number for row in self._known(ids) if not (there and row.removed)}

    def kinds(self, ids: Sequence[str]) -> dict[str, str]:
        """Kinds of known groups by id."""
        return {row.id: row.shelf for row in self._known(ids)}

    def _known(self, ids: Sequence[str]) -> list[Any]:
        removed = (~schema.not_removed).label("removed")
        columns = select(_groups.id, _groups.number, _groups.shelf, removed).where(_groups.run == self.run)
        chunks = [ids[first : first + CHUNK] for first in range(0, len(ids), CHUNK)]
        return [row for some in chunks for row in self._execute(columns.where(_groups.id.in_(some)))]

    def add(self, groups: Sequence[TableRow], experiences: Sequence[TableRow], last: int) -> None:
        """Insert rows of new groups, two per group; `last` is the newest one's number."""
        if groups:
            self._execute(insert(schema.groups), groups)
            self._execute(insert(schema.experiences), experiences)
            self._execute(update(schema.runs).where(_runs.run == self.run).values(last=last))

    def handed_out(self, step: int, kind: ExperienceKind, *, first: bool) -> list[int]:
        """Numbers of the groups that a step took (`first`) or replayed, in order."""
        same = (_groups.run == _uses.run) & (_groups.number == _uses.number)
        wanted = select(_uses.number).join(schema.groups, same).where(_uses.run == self.run, _uses.step == step)
        wanted = wanted.where(_uses.first == first, _groups.shelf == str(kind))
        return list(self._execute(wanted.order_by(_uses.position)).scalars())

    def hand_out(self, kind: ExperienceKind, count: int, step: int) -> list[int]:
        """Take the oldest `count` waiting groups, or fewer if there are not enough."""
        oldest = select(_groups.number).where(is_waiting(self.run, kind)).order_by(_groups.number).limit(count)
        numbers = list(self._execute(oldest).scalars())
        for first in range(0, len(numbers), CHUNK):
            some = (_groups.run == self.run) & _groups.number.in_(numbers[first : first + CHUNK])
            self._execute(update(schema.groups).where(some).values(taken=step))
        self.note(numbers, step, first=True)
        return numbers

    def renumber(self, number: int, new: int) -> None:
        """Make a group the newest one, so that readers past its old number find it."""
        for table in (schema.groups, schema.experiences, schema.uses):
            one = (table.c.run == self.run) & (table.c.number == number)
            self._execute(update(table).where(one).values(number=new))
        self._execute(update(schema.runs).where(_runs.run == self.run).values(last=new))

    def note(self, numbers: Sequence[int], step: int, *, first: bool) -> None:
        """Record that a step uses these groups."""
        rows = [
            {"run": self.run, "number": number, "step": step, "first": first, "position": position}
            for position, number in enumerate(numbers)
        ]
        if rows:
            self._execute(insert(schema.uses), rows)

    def note_priority(self, number: int, step: int, priority: float) -> None:
        """Record the priority of a group after `step`."""
        use = (_uses.run == self.run) & (_uses.number == number) & (_uses.step == step)
        self._execute(update(schema.uses).where(use).values(priority=float(priority)))

    def expire(self, min_version: int, step: int) -> None:
        """Expire waiting rollout groups with tokens older than `min_version`."""
        old = is_waiting(self.run, ExperienceKind.ROLLOUT) & is_older_than(min_version)
        self._execute(update(schema.groups).where(old).values(expired=step))

    def replay(
        self, rule: ReplayConfig, *, step: int, version: int, seed: int, since: int, shares: Shares | None
    ) -> list[int]:
        """Choose the groups that a step replays, and record it; the same ones if that was done before."""
        if before := self.handed_out(step, ExperienceKind.ROLLOUT, first=False):
            return before
        found = self.candidates(rule, step, since)
        numbers = choose_replayed(found, rule, step=step, version=version, seed=seed, shares=shares)
        self.note(numbers, step, first=False)
        return numbers

    def candidates(self, rule: ReplayConfig, step: int, since: int) -> ReplayCandidates:
        """Groups that replay may choose from, within the capacity."""
        mine = (_groups.run == self.run) & (_groups.shelf == str(ExperienceKind.ROLLOUT)) & schema.not_removed
        taken = mine & (_groups.taken > since) & (_groups.taken < step)
        columns = select(_groups.number, _groups.oldest_version, _groups.priority, _groups.task_id).where(taken)
        rows = self._execute(columns.order_by(_groups.number.desc()).limit(rule.capacity)).all()[::-1]
        since = rows[0].number if rows else 0
        earlier = (_uses.run == self.run) & (_uses.number >= since) & (_uses.step < step)
        history = self._execute(select(_uses.number, _uses.step, _uses.priority).where(earlier).order_by(_uses.step))
        return ReplayCandidates.of([tuple(row) for row in rows], [tuple(row) for row in history])

    def undo_uses(self, step: int) -> None:
        """Let groups that were taken or expired for later steps wait again."""
        mine, used = _groups.run == self.run, _uses.run == self.run
        later = select(_uses.number).where(used, _uses.step > step, _uses.first)
        self._execute(update(schema.groups).where(mine, _groups.number.in_(later)).values(taken=None))
        self._execute(delete(schema.uses).where(used, _uses.step > step))
        self._execute(update(schema.groups).where(mine, _groups.expired > step).values(expired=None))

    def drop_made_after(self, last: int) -> None:
        """Delete groups of explorer and pipeline after group number `last`."""
        made = (_groups.run == self.run) & (_groups.number > last) & _groups.writer.in_((EXPLORER, PIPELINE))
        self.delete(list(self._execute(select(_groups.number).where(made)).scalars()))

    def delete(self, numbers: Sequence[int]) -> None:
        """Delete groups with their experiences and uses."""
        for first in range(0, len(numbers), CHUNK):
            some = numbers[first : first + CHUNK]
            for table in (schema.experiences, schema.uses, schema.groups):
                self._execute(delete(table).where(table.c.run == self.run, table.c.number.in_(some)))

    def put_tasks(self, bodies: Mapping[str, str]) -> None:
        """Store tasks by key: known ones are replaced in place, others are appended."""
        table = schema.tasks
        mine = table.c.run == self.run
        known = set(self._execute(select(table.c.key).where(mine)).scalars())
        for key in bodies.keys() & known:
            self._execute(update(table).where(mine, table.c.key == key).values(body=bodies[key]))
        first = (self._execute(select(func.max(table.c.position)).where(mine)).scalar() or 0) + 1
        new = enumerate((key for key in bodies if key not in known), start=first)
        added = [{"run": self.run, "key": key, "position": place, "body": bodies[key]} for place, key in new]
        if added:
            self._execute(insert(table), added)

    def seen(self, kind: str, written: int) -> None:
        """Record that this process is alive, and has written `written` more groups."""
        table, now = schema.writers, time.time()
        me = {"run": self.run, **writer_identity(kind)}
        times: dict[str, Any] = {"seen_at": now} | ({"wrote_at": now} if written else {})
        mine = [table.c[name] == value for name, value in me.items()]
        known = self._execute(update(table).where(*mine).values(written=table.c.written + written, **times)).rowcount
        if not known:
            self._execute(insert(table).values(**me, **times, written=written))

    def groups(self, numbers: Sequence[int]) -> dict[int, Group]:
        """Whole groups by number, with the priority after their last use."""
        mine = (_experiences.run == self.run) & _experiences.number.in_(numbers)
        inside = {
            row.number: decode_experience_columns(row) for row in self._execute(select(schema.experiences).where(mine))
        }
        found = self._execute(select(schema.groups).where(_groups.run == self.run, _groups.number.in_(numbers)))
        groups = {row.number: decode_group(row, inside[row.number]) for row in found}
        noted = (_uses.run == self.run) & _uses.number.in_(numbers) & _uses.priority.is_not(None)
        history = select(_uses.number, _uses.priority).where(noted).order_by(_uses.step)
        for number, priority in self._execute(history):
            groups[number].priority = priority
        return groups


def is_waiting(run: int, kind: ExperienceKind) -> ColumnElement[bool]:
    """Condition: a group of this kind that may be handed out for the first time."""
    return (_groups.run == run) & (_groups.shelf == str(kind)) & schema.waiting


def is_older_than(min_version: int) -> ColumnElement[bool]:
    """Condition: a group with a token older than `min_version`."""
    return _groups.oldest_version.between(0, min_version - 1)


def find_run(connection: Connection, run_id: str) -> int | None:
    """The key of a run's rows; None if the database does not have the run."""
    found: int | None = connection.execute(select(_runs.run).where(_runs.run_id == run_id)).scalar()
    return found


def make_run(connection: Connection, run_id: str) -> int:
    """The key of a run's rows; creates the run if missing."""
    if connection.dialect.name == "postgresql":  # two processes may open a new run at once
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtext(run_id))))
    if (run := find_run(connection, run_id)) is not None:
        return run
    made = connection.execute(insert(schema.runs).values(run_id=run_id, last=0, forgotten=0)).inserted_primary_key
    assert made is not None
    return int(made[0])
