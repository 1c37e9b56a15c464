"""Where feedback is taken: requests become groups in the run's store, once each, and can be undone."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import rollmill.feedback.group_builder as groups
from rollmill.buffer import Group
from rollmill.buffer.sql import SqlStore
from rollmill.errors import TasksetError
from rollmill.feedback.acts import FeedbackLog, FeedbackRecord
from rollmill.feedback.refused import FeedbackError
from rollmill.feedback.requests import (
    CompareRequest,
    DemonstrateRequest,
    EditRequest,
    FeedbackRequest,
    GradeRequest,
    PreferRequest,
    Prompt,
    RateRequest,
)
from rollmill.feedback.rollout_index import RolloutIndex
from rollmill.models.run_tokenizer import RunTokenizer, load_run_fingerprint, load_run_tokenizer
from rollmill.types import Message, Task


@dataclass(frozen=True, slots=True)
class SubmittedRequest:
    """A request to be done."""

    request: FeedbackRequest
    at: float | None = None  #: when it was made (seconds since the epoch); None: now
    slot: str = ""  #: an earlier act of the same author and slot is undone; ratings and comparisons have their own


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """What became of requests, in their order."""

    ids: list[str]
    new: int  #: how many were not done before


class FeedbackService:
    """The feedback of one run. May be used from several threads."""

    def __init__(self, run_dir: Path, store: SqlStore) -> None:
        """Raises ConfigError when `run_dir` holds no run, ModelError when it has no tokenizer."""
        self.stored = RolloutIndex(run_dir)
        self.acts = FeedbackLog(store)
        self._fingerprint = load_run_fingerprint(self.stored.run_dir)
        self._lock = threading.Lock()

    @cached_property
    def tokenizer(self) -> RunTokenizer:
        """The run's; read when text has to be encoded for the first time."""
        return load_run_tokenizer(self.stored.run_dir)

    def submit(self, requests: Sequence[FeedbackRequest]) -> SubmitResult:
        """Do all of them or none. Raises FeedbackError where one cannot be done; with several, says which."""
        return self.submit_all([SubmittedRequest(request) for request in requests])

    def submit_all(self, orders: Sequence[SubmittedRequest]) -> SubmitResult:
        """Like `perform`."""
        with self._lock:
            made: dict[str, Group] = {}
            ids = []
            for number, order in enumerate(orders, start=1):
                where = f"request {number} of {len(orders)}: " if len(orders) > 1 else ""
                id = _id(order.request)
                ids.append(id)
                try:
                    if not self._known(id, order.request, made):
                        made[id] = self._made(order, id)
                except (FeedbackError, TasksetError) as error:
                    status = error.status if isinstance(error, FeedbackError) else 422
                    raise FeedbackError(f"{where}{error}", status) from error
            new = list(made.values())
            self._mark_replaced(new, {_id(order.request) for order in orders if order.at is not None})
            self.acts.add(new)
            self._undo_replaced(ids)
            return SubmitResult(ids, len(new))

    def undo(self, id: str, by: str) -> bool:
        """Take an act back; those it replaced count again. False where it was undone before.

        Raises FeedbackError when there is no such act.
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
        """Let an undone act count again; those in its place are undone. False where it counts already.

        Raises FeedbackError when there is no such act.
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

    def _act(self, id: str) -> FeedbackRecord:
        act = self.acts.get(id)
        if act is None:
            raise FeedbackError(f"no feedback has the id {id!r}", status=404)
        return act

    def _rivals(self, act: FeedbackRecord) -> list[FeedbackRecord]:
        """Acts that count in the place of this one."""
        return [
            other
            for other in self.acts.all()
            if act.slot and (other.author, other.slot) == (act.author, act.slot)
            if other.id != act.id and other.undone_by is None
        ]

    def _known(self, id: str, request: FeedbackRequest, made: dict[str, Group]) -> bool:
        """Whether the request was done before. Raises FeedbackError where its key stands for another one."""
        act = self.acts.get(id)
        digest = act.digest if act else made[id].info["digest"] if id in made else None
        if digest is not None and digest != request.digest():
            raise FeedbackError(
                f"the key {request.key!r} of {request.author!r} was used for other feedback; use a new one", status=409
            )
        return digest is not None

    def _made(self, order: SubmittedRequest, id: str) -> Group:
        request = order.request
        group, about = self._build(request, id)
        group.author = request.author
        group.created_at = time.time() if order.at is None else order.at
        group.info = {"act": str(request.kind), "slot": order.slot, **about, "task": group.experiences[0].task_id}
        group.info |= {"tokenizer": self._fingerprint, "digest": request.digest()}
        return group

    def _build(self, request: FeedbackRequest, id: str) -> tuple[Group, dict[str, object]]:
        """The group, and what its info says of the request."""
        match request:
            case RateRequest():
                step, original = self.stored.find(request.completion, request.step)
                about = {"of": [original.id], "step": step, "group": original.group, "rating": request.rating}
                return groups.build_rated_group(original, request.rating, id), about | {"slot": f"rate {original.id}"}
            case EditRequest():
                step, original = self.stored.find(request.completion, request.step)
                encoded = groups.encode_answer(request.text, self.tokenizer)
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
        """Those in whose place these acts stand. A request repeated after an error in between comes by here, too."""
        acts = {act.id: act for act in self.acts.all() if act.undone_by is None}
        for act in (acts[id] for id in ids if id in acts):
            over = [act.id] if any(later in acts for later in act.late) else []
            self.acts.undo([old for old in act.replaces if old in acts] + over, act.author)

    def _mark_replaced(self, made: Sequence[Group], dated: set[str]) -> None:
        """Note in each new group which act it takes the place of, or, if it was made earlier, which one stands.

        Args:
            dated: ids of groups that say when they were made; others are the newest.
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
