"""The acts of a run: a view of the feedback on its store's shelves, with what was undone."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select

from rollmill.buffer import ExperienceKind, Group
from rollmill.buffer.base import FEEDBACK
from rollmill.buffer.schema import groups as table
from rollmill.buffer.sql import SqlStore
from rollmill.feedback.requests import FeedbackKind

FEEDBACK_SHELVES = (ExperienceKind.RATED, ExperienceKind.EXPERT, ExperienceKind.PREFERENCE)


@dataclass(frozen=True, slots=True)
class FeedbackRecord:
    """What somebody said, without tokens."""

    id: str  #: the group's
    kind: FeedbackKind
    author: str
    at: float  #: seconds since the epoch
    of: list[str] = field(default_factory=list)  #: ids of stored completions; of a comparison the better one first
    step: int | None = None  #: where they are stored
    group: str = ""  #: their group
    task: str = ""
    rating: float | None = None
    texts: list[str] = field(default_factory=list)  #: the answers of an edit or of what was not stored
    slot: str = ""  #: a later act of the same author and slot takes the place of an earlier one
    replaces: list[str] = field(default_factory=list)  #: ids
    late: list[str] = field(default_factory=list)  #: ids of what was said after it, but imported before
    digest: str = ""  #: of the request
    undone_by: str | None = None

    def as_json(self) -> dict[str, Any]:
        """As programs see it."""
        shown: dict[str, Any] = {"id": self.id, "act": str(self.kind), "author": self.author, "at": self.at}
        optional = {"of": self.of, "step": self.step, "task": self.task, "rating": self.rating, "texts": self.texts}
        shown |= {key: value for key, value in optional.items() if value not in (None, "", [])}
        return shown | {"undone_by": self.undone_by}


class FeedbackLog:
    """What has been said about a run, by whoever writes to its store. May be used from several threads."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._acts: dict[str, FeedbackRecord] = {}
        self._state: tuple[Any, ...] | None = None
        self._lock = threading.Lock()

    def all(self) -> list[FeedbackRecord]:
        """In the order they came, with those that were undone."""
        return list(self._read().values())

    def get(self, id: str) -> FeedbackRecord | None:
        """The act of this id."""
        return self._read().get(id)

    def add(self, groups: Sequence[Group]) -> None:
        """Put feedback into the store, all or none."""
        self._store.put(groups)

    def undo(self, ids: Sequence[str], by: str) -> None:
        """Acts are no longer learned from."""
        if ids:
            self._store.remove(ids, by=by)

    def redo(self, ids: Sequence[str]) -> None:
        """Undone acts count again."""
        if ids:
            self._store.restore(ids)

    def _read(self) -> dict[str, FeedbackRecord]:
        """Acts by id. They are read again only if the table has changed: tokens stay where they are."""
        with self._lock:
            state, acts = self._store.database.read(self._changed)
            if acts is not None:
                self._state, self._acts = state, acts
            return self._acts

    def _changed(self, connection: Connection) -> tuple[tuple[Any, ...], dict[str, FeedbackRecord] | None]:
        mine = self._mine()
        c = table.c
        counts = select(func.count(), func.max(c.number), func.count(c.removed_at), func.max(c.removed_at)).where(mine)
        state = tuple(connection.execute(counts).one())
        if state == self._state:
            return state, None
        columns = select(c.id, c.author, c.created_at, c.removed_by, c.body).where(mine).order_by(c.number)
        acts = (_act(row) for row in connection.execute(columns))
        return state, {act.id: act for act in acts if act is not None}

    def _mine(self) -> ColumnElement[bool]:
        here = (table.c.run == self._store.run) & table.c.shelf.in_([str(shelf) for shelf in FEEDBACK_SHELVES])
        return here & (table.c.writer == FEEDBACK)


def _act(row: Any) -> FeedbackRecord | None:
    """None for what others put there that this module did not make."""
    body = json.loads(row.body)
    info = body["info"]
    if info.get("act") not in list(FeedbackKind):
        return None
    known = {name: info[name] for name in _IN_INFO if name in info}
    return FeedbackRecord(
        row.id, FeedbackKind(info["act"]), body["author"], row.created_at, undone_by=row.removed_by, **known
    )


_IN_INFO = ("of", "step", "group", "task", "rating", "texts", "slot", "replaces", "late", "digest")
