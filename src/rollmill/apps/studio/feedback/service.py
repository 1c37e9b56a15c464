"""Feedback service: requests become groups in the run's store, once each, and can be undone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, Connection, func, select

import rollmill.apps.studio.feedback.group_builder as groups
from rollmill.apps.studio.feedback.requests import (
    CompareRequest,
    DemonstrateRequest,
    EditRequest,
    FeedbackError,
    FeedbackKind,
    FeedbackRequest,
    GradeRequest,
    PreferRequest,
    Prompt,
    RateRequest,
)
from rollmill.apps.studio.feedback.rollout_index import RolloutIndex
from rollmill.buffer import ExperienceKind, Group
from rollmill.buffer.base import FEEDBACK
from rollmill.buffer.schema import groups as table
from rollmill.buffer.sql import SqlStore
from rollmill.errors import TasksetError
from rollmill.models.run_tokenizer import RunTokenizer, load_run_fingerprint, load_run_tokenizer
from rollmill.types import Message, Task

# Feedback records: a view of the run's store, undone ones included

FEEDBACK_KINDS = (ExperienceKind.RATED, ExperienceKind.EXPERT, ExperienceKind.PREFERENCE)


@dataclass(frozen=True, slots=True)
class FeedbackRecord:
    """One piece of feedback, without tokens."""

    id: str  #: the group's
    kind: FeedbackKind
    author: str
    at: float  #: seconds since the epoch
    of: list[str] = field(default_factory=list)  #: ids of stored completions; of a comparison the better one first
    step: int | None = None  #: step that stores them
    group: str = ""  #: their group
    task: str = ""
    rating: float | None = None
    texts: list[str] = field(default_factory=list)  #: answers given in the request
    slot: str = ""  #: a later record of the same author and slot replaces an earlier one
    replaces: list[str] = field(default_factory=list)  #: ids
    late: list[str] = field(default_factory=list)  #: ids of newer records that were imported before
    digest: str = ""  #: of the request
    undone_by: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the record as it is shown to programs."""
        shown: dict[str, Any] = {"id": self.id, "act": str(self.kind), "author": self.author, "at": self.at}
        optional = {"of": self.of, "step": self.step, "task": self.task, "rating": self.rating, "texts": self.texts}
        shown |= {key: value for key, value in optional.items() if value not in (None, "", [])}
        return shown | {"undone_by": self.undone_by}


class FeedbackLog:
    """All feedback on a run, from any process that writes to its store. Thread-safe."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._acts: dict[str, FeedbackRecord] = {}
        self._state: tuple[Any, ...] | None = None
        self._lock = threading.Lock()

    def all(self) -> list[FeedbackRecord]:
        """Returns all records in the order they came, undone ones included."""
        return list(self._read().values())

    def get(self, id: str) -> FeedbackRecord | None:
        """Returns the record of this id."""
        return self._read().get(id)

    def add(self, groups: Sequence[Group]) -> None:
        """Writes feedback to the store, all or none."""
        self._store.put(groups)

    def undo(self, ids: Sequence[str], by: str) -> None:
        """Excludes records from training."""
        if ids:
            self._store.remove(ids, by=by)

    def redo(self, ids: Sequence[str]) -> None:
        if ids:
            self._store.restore(ids)

    def close(self) -> None:
        self._store.close()

    def _read(self) -> dict[str, FeedbackRecord]:
        """Returns records by id. They are only read again if the table has changed, and without tokens."""
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
        here = (table.c.run == self._store.run) & table.c.shelf.in_([str(kind) for kind in FEEDBACK_KINDS])
        return here & (table.c.writer == FEEDBACK)


def _act(row: Any) -> FeedbackRecord | None:
    """Returns the record of a row; None for groups that this module did not write."""
    body = json.loads(row.body)
    info = body["info"]
    if info.get("act") not in list(FeedbackKind):
        return None
    known = {name: info[name] for name in _IN_INFO if name in info}
    return FeedbackRecord(
        row.id, FeedbackKind(info["act"]), body["author"], row.created_at, undone_by=row.removed_by, **known
    )


_IN_INFO = ("of", "step", "group", "task", "rating", "texts", "slot", "replaces", "late", "digest")


@dataclass(frozen=True, slots=True)
class SubmittedRequest:
    """A request with its time and slot."""

    request: FeedbackRequest
    at: float | None = None  #: time of the request in seconds since the epoch; None: now
    slot: str = ""  #: an earlier record of the same author and slot is undone; ratings and comparisons set their own


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """Result of several requests, in their order."""

    ids: list[str]
    new: int  #: number of requests that were not applied before


class FeedbackService:
    """The feedback of one run. Thread-safe."""

    def __init__(self, run_dir: Path, store: SqlStore) -> None:
        """Raises ConfigError if `run_dir` holds no run, ModelError if it has no tokenizer."""
        self.stored = RolloutIndex(run_dir)
        self.acts = FeedbackLog(store)
        self._fingerprint = load_run_fingerprint(self.stored.run_dir)
        self._lock = threading.Lock()

    @cached_property
    def tokenizer(self) -> RunTokenizer:
        """The run's tokenizer, loaded on first use."""
        return load_run_tokenizer(self.stored.run_dir)

    def submit(self, requests: Sequence[FeedbackRequest]) -> SubmitResult:
        """Applies all requests or none. Raises FeedbackError if one cannot be applied, naming it if there are
        several."""
        return self.submit_all([SubmittedRequest(request) for request in requests])

    def submit_all(self, submitted: Sequence[SubmittedRequest]) -> SubmitResult:
        """Like `submit`, for requests with a time and slot."""
        with self._lock:
            made: dict[str, Group] = {}
            ids = []
            for number, each in enumerate(submitted, start=1):
                where = f"request {number} of {len(submitted)}: " if len(submitted) > 1 else ""
                id = _id(each.request)
                ids.append(id)
                try:
                    if not self._known(id, each.request, made):
                        made[id] = self._made(each, id)
                except (FeedbackError, TasksetError) as error:
                    status = error.status if isinstance(error, FeedbackError) else 422
                    raise FeedbackError(f"{where}{error}", status) from error
            new = list(made.values())
            self._mark_replaced(new, {_id(each.request) for each in submitted if each.at is not None})
            self.acts.add(new)
            self._undo_replaced(ids)
            return SubmitResult(ids, len(new))

    def undo(self, id: str, by: str) -> bool:
        """Undoes a record; the one it replaced is restored. Returns False if it was undone before.

        Raises FeedbackError if there is no such record.
        """
        with self._lock:
            act = self._act(id)
            if act.undone_by is not None:
                return False
            self.acts.undo([id], by)
            rivals = self._rivals(act)
            earlier = [old for old in (self.acts.get(known) for known in act.replaces) if old and old.undone_by]
            if earlier and not rivals:
                self.acts.redo([earlier[-1].id])
            return True

    def redo(self, id: str) -> bool:
        """Restores an undone record; those in its place are undone. Returns False if it was not undone.

        Raises FeedbackError if there is no such record.
        """
        with self._lock:
            act = self._act(id)
            if act.undone_by is None:
                return False
            rivals = self._rivals(act)
            self.acts.redo([id])
            if rivals:
                self.acts.undo([rival.id for rival in rivals], act.author)
            return True

    def close(self) -> None:
        self.acts.close()

    def _act(self, id: str) -> FeedbackRecord:
        act = self.acts.get(id)
        if act is None:
            raise FeedbackError(f"no feedback has the id {id!r}", status=404)
        return act

    def _rivals(self, act: FeedbackRecord) -> list[FeedbackRecord]:
        """Returns active records with the same author and slot."""
        return [
            other
            for other in self.acts.all()
            if act.slot and (other.author, other.slot) == (act.author, act.slot)
            if other.id != act.id and other.undone_by is None
        ]

    def _known(self, id: str, request: FeedbackRequest, made: dict[str, Group]) -> bool:
        """Returns whether the request was applied before. Raises FeedbackError if its key was used for another one."""
        act = self.acts.get(id)
        digest = act.digest if act else made[id].info["digest"] if id in made else None
        if digest is not None and digest != request.digest():
            raise FeedbackError(
                f"the key {request.key!r} of {request.author!r} was used for other feedback; use a new one", status=409
            )
        return digest is not None

    def _made(self, submitted: SubmittedRequest, id: str) -> Group:
        request = submitted.request
        group, about = self._build(request, id)
        group.author = request.author
        group.created_at = time.time() if submitted.at is None else submitted.at
        group.info = {"act": str(request.kind), "slot": submitted.slot, **about, "task": group.experiences[0].task_id}
        group.info |= {"tokenizer": self._fingerprint, "digest": request.digest()}
        return group

    def _build(self, request: FeedbackRequest, id: str) -> tuple[Group, dict[str, object]]:
        """Returns the group and the fields of its info that describe the request."""
        match request:
            case RateRequest():
                step, original = self.stored.find(request.completion, request.step)
                about = {"of": [original.id], "step": step, "group": original.group, "rating": request.rating}
                return groups.build_rated_group(original, request.rating, id), about | {"slot": f"rate {original.id}"}
            case EditRequest():
                step, original = self.stored.find(request.completion, request.step)
                encoded = groups.encode_answer(request.text, original, self.tokenizer)
                about = {"of": [original.id], "step": step, "group": original.group, "texts": [request.text]}
                return groups.build_edited_group(original, request.text, encoded, id), about
            case CompareRequest():
                step, better = self.stored.find(request.better, request.step)
                other, worse = self.stored.find(request.worse, request.step)
                pair = [better.id, worse.id]
                about = {"of": pair, "step": step, "group": better.group if step == other else ""}
                return groups.build_comparison_group(better, worse, id), about | {"slot": f"compare {sorted(pair)}"}
            case DemonstrateRequest():
                task = Task(request.task, _prompt(request.prompt), response=request.response)
                return groups.build_demonstration_group(task, self.tokenizer, id), {"texts": [request.response]}
            case PreferRequest():
                prompt = _prompt(request.prompt)
                task = Task(request.task, prompt, response=request.chosen, rejected=request.rejected)
                texts = [request.chosen, request.rejected]
                return groups.build_preference_group(task, self.tokenizer, id), {"texts": texts}
            case GradeRequest():
                task = Task(request.task, _prompt(request.prompt), response=request.response)
                about = {"rating": request.rating, "texts": [request.response]}
                return groups.build_graded_group(task, request.rating, self.tokenizer, id), about
        raise AssertionError(request)

    def _undo_replaced(self, ids: Sequence[str]) -> None:
        """Undoes records that these replace. This also completes a request repeated after an error."""
        acts = {act.id: act for act in self.acts.all() if act.undone_by is None}
        for act in (acts[id] for id in ids if id in acts):
            over = [act.id] if any(later in acts for later in act.late) else []
            self.acts.undo([old for old in act.replaces if old in acts] + over, act.author)

    def _mark_replaced(self, made: Sequence[Group], dated: set[str]) -> None:
        """Marks in each new group which record it replaces, or, if it is older, which one stays active.

        Args:
            dated: ids of groups with an explicit time; others are the newest.
        """
        acts = [act for act in self.acts.all() if act.slot and act.undone_by is None]
        standing = {(act.author, act.slot): (act.id, act.at) for act in acts}
        for group in made:
            place = group.author, group.info.get("slot", "")
            id, at = standing.get(place, ("", 0.0))
            if id and group.id in dated and group.created_at < at:
                group.info["late"] = [id]
                continue
            if id:
                group.info["replaces"] = [id]
            if place[1]:
                standing[place] = group.id, group.created_at


def _id(request: FeedbackRequest) -> str:
    if request.key is None:
        return f"feedback-{uuid4().hex[:16]}"
    return "feedback-" + sha256(f"{request.author}\0{request.key}".encode()).hexdigest()[:16]


def _prompt(prompt: Prompt) -> str | list[Message]:
    if isinstance(prompt, str):
        return prompt
    return [Message(role=message.role, content=message.content) for message in prompt]
