"""Buffer in this process. Its content is part of each checkpoint."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollmill.buffer.base import (
    EXPLORER,
    FEEDBACK,
    PIPELINE,
    ExperienceKind,
    Group,
    Shares,
    kind_conflict_error,
    poll_until,
    too_few_groups_error,
    validate_groups,
    writer_identity,
)
from rollmill.buffer.replay import ReplayCandidates, choose_replayed
from rollmill.config.buffer import ReplayConfig
from rollmill.errors import StoreError
from rollmill.files import to_jsonable
from rollmill.trackers.rollout_log import decode_experience, encode_experience
from rollmill.types import Experience, Task


@dataclass(slots=True)
class GroupUse:
    """A training step that used a group."""

    step: int
    position: int  # among those of the step
    first: bool  # handed out by `take`, not by `replay`
    priority: float | None = None


@dataclass(slots=True)
class BufferEntry:
    """A group with its uses and its state."""

    group: Group
    uses: list[GroupUse] = field(default_factory=list)  # by step
    expired: int | None = None  # the step for which it was too old
    removed_by: str | None = None
    _encoded: list[dict[str, Any]] | None = None  # the experiences, which never change

    def experiences(self) -> list[dict[str, Any]]:
        """The group's experiences as JSON; cached, because marks are taken at every step."""
        if self._encoded is None:
            self._encoded = [encode_experience(experience, routing=True) for experience in self.group.experiences]
        return self._encoded

    @property
    def taken(self) -> int | None:
        """The step that it was first handed out for."""
        return self.uses[0].step if self.uses else None

    @property
    def waits(self) -> bool:
        """True if it may be handed out for the first time."""
        return not self.uses and self.expired is None and self.removed_by is None

    def undo(self, step: int) -> None:
        """Undo uses and expiry of later steps."""
        self.uses = [use for use in self.uses if use.step <= step]
        if self.expired is not None and self.expired > step:
            self.expired = None

    def handed(self) -> Group:
        """A copy of the group that the caller may change, with the priority after its last use."""
        noted = [use.priority for use in self.uses if use.priority is not None]
        made = copy_group(self.group)
        return replace(made, priority=noted[-1]) if noted else made


def copy_group(group: Group) -> Group:
    """Copy a group and its experiences. Arrays are shared: callers replace them and do not write to them."""
    return replace(group, experiences=[_copy_experience(each) for each in group.experiences], info=dict(group.info))


def _copy_experience(experience: Experience) -> Experience:
    made = copy.copy(experience)
    made.reward_parts, made.timings = dict(experience.reward_parts), dict(experience.timings)
    made.info, made.turns = dict(experience.info), list(experience.turns)
    return made


def encode_entry(number: int, entry: BufferEntry) -> dict[str, Any]:
    """Encode an entry as plain JSON."""
    group = entry.group
    return {
        "number": number,
        "id": group.id,
        "experiences": entry.experiences(),
        "shelf": str(group.kind),
        "priority": group.priority,
        "writer": group.writer,
        "author": group.author,
        "created_at": group.created_at,
        "info": to_jsonable(group.info, non_finite="name"),
        "uses": [[use.step, use.position, use.first, use.priority] for use in entry.uses],
        "expired": entry.expired,
        "removed_by": entry.removed_by,
    }


def decode_entry(row: dict[str, Any]) -> tuple[int, BufferEntry]:
    """Inverse of `encode_entry`: number and entry."""
    group = Group(
        id=row["id"],
        experiences=[decode_experience(each) for each in row["experiences"]],
        kind=ExperienceKind(row["shelf"]),
        priority=row["priority"],
        writer=row["writer"],
        author=row["author"],
        created_at=row["created_at"],
        info=row["info"],
    )
    uses = [GroupUse(*use) for use in row["uses"]]
    return row["number"], BufferEntry(group, uses, row["expired"], row["removed_by"])


MEMORY = "memory"


class MemoryStore:
    """An `ExperienceStore` in this process; thread-safe.

    Args:
        keep: number of used groups to keep for replay. Older ones, and expired ones, are deleted after a step.
    """

    kind = MEMORY

    def __init__(self, keep: int = 0) -> None:
        self._keep = keep
        self._entries: dict[int, BufferEntry] = {}  # by number, in order
        self._ids: dict[str, tuple[int, ExperienceKind]] = {}  # of all groups ever put
        self._last = 0
        self._forgotten = 0  # expired groups that were deleted since
        self._tasks: dict[str, Task] = {}
        self._writer: dict[str, Any] | None = None
        self._lock = threading.RLock()

    # -- writing -----------------------------------------------------------------------------------------------

    def put(self, groups: Sequence[Group]) -> int:
        now = time.time()
        with self._lock:
            before = self._last
            for group in validate_groups(groups):
                _, kind = self._ids.get(group.id, (0, group.kind))
                if kind is not group.kind:
                    raise kind_conflict_error(group.id, kind, group.kind)
            for group in groups:
                if group.id not in self._ids:
                    self._last += 1
                    self._ids[group.id] = (self._last, group.kind)
                    kept = replace(copy_group(group), created_at=group.created_at or now)
                    self._entries[self._last] = BufferEntry(kept)
                    self._writer = writer_identity(group.writer) | {"wrote_at": now, "written": self._last}
            return self._last - before

    def put_tasks(self, tasks: Sequence[Task]) -> None:
        """Tasks are not part of checkpoints."""
        with self._lock:
            self._tasks |= {task.id: copy.deepcopy(task) for task in tasks}

    def remove(self, ids: Sequence[str], *, by: str) -> None:
        """Raises StoreError if an id is unknown; then nothing is changed."""
        with self._lock:
            for entry in self._named(ids):
                entry.removed_by = by if entry.removed_by is None else entry.removed_by

    def restore(self, ids: Sequence[str]) -> None:
        """Raises StoreError if an id is unknown; then nothing is changed."""
        with self._lock:
            for entry in self._named(list(dict.fromkeys(ids))):
                if entry.removed_by is not None and entry.group.writer == FEEDBACK:
                    del self._entries[self._number(entry.group.id)]
                    self._last += 1
                    self._entries[self._last] = entry
                    self._ids[entry.group.id] = (self._last, entry.group.kind)
                entry.removed_by = None

    # -- handing out -------------------------------------------------------------------------------------------

    def take(self, count: int, *, step: int, deadline_s: float, min_version: int | None = None) -> list[Group]:
        """Waits for other threads only."""

        def attempt() -> list[Group] | None:
            with self._lock:
                if before := self._handed_out(step, ExperienceKind.ROLLOUT, first=True):
                    return before
                self._forget(step - 1)
                waiting = self._waiting(ExperienceKind.ROLLOUT)
                for entry in waiting:
                    entry.expired = step if _older(entry.group, min_version) else None
                waiting = [entry for entry in waiting if entry.waits]
                return self._hand_out(waiting[:count], step, first=True) if len(waiting) >= count else None

        found = poll_until(attempt, deadline_s)
        if found is None:
            raise too_few_groups_error(count, self.waiting(), deadline_s, [self._writer] if self._writer else [])
        return found

    def take_partial(self, count: int, *, step: int) -> list[Group]:
        with self._lock:
            before = self._handed_out(step, ExperienceKind.PARTIAL, first=True)
            return before or self._hand_out(self._waiting(ExperienceKind.PARTIAL)[:count], step, first=True)

    def replay(
        self, rule: ReplayConfig, *, step: int, version: int, seed: int, since: int = 0, shares: Shares | None = None
    ) -> list[Group]:
        with self._lock:
            if before := self._handed_out(step, ExperienceKind.ROLLOUT, first=False):
                return before
            taken = self._taken(step, since)[-rule.capacity :]
            groups = [(number, *_choice(entry.group)) for number, entry in taken]
            uses = [(number, use.step, use.priority) for number, entry in taken for use in entry.uses]
            history = sorted((use for use in uses if use[1] < step), key=lambda use: use[1])
            found = ReplayCandidates.of(groups, history)
            numbers = choose_replayed(found, rule, step=step, version=version, seed=seed, shares=shares)
            return self._hand_out([self._entries[number] for number in numbers], step, first=False)

    def update_priorities(self, groups: Sequence[Group], *, step: int) -> None:
        with self._lock:
            for group in validate_groups(groups):
                entry = self._entries.get(self._number(group.id))
                for use in entry.uses if entry is not None else []:
                    if use.step == step:
                        use.priority = group.priority
            self._forget(step)

    # -- reading -----------------------------------------------------------------------------------------------

    def read(self, kind: ExperienceKind, *, after: int = 0) -> Iterator[tuple[int, Group]]:
        with self._lock:
            numbers = [number for number, entry in self._entries.items() if entry.group.kind is kind]
        for number in numbers:
            entry = self._entries.get(number)
            if number > after and entry is not None and entry.removed_by is None:
                yield number, entry.handed()

    def get(self, ids: Sequence[str]) -> list[Group]:
        with self._lock:
            found = [self._entries.get(self._ids[id][0]) for id in ids if id in self._ids]
            return [entry.handed() for entry in found if entry is not None and entry.removed_by is None]

    def tasks(self) -> Iterator[Task]:
        with self._lock:
            tasks = list(self._tasks.values())
        return (copy.deepcopy(task) for task in tasks)

    def waiting(self, *, min_version: int | None = None) -> int:
        with self._lock:
            return sum(not _older(entry.group, min_version) for entry in self._waiting(ExperienceKind.ROLLOUT))

    def expired(self) -> int:
        with self._lock:
            return self._forgotten + sum(entry.expired is not None for entry in self._entries.values())

    # -- checkpoints -------------------------------------------------------------------------------------------

    def mark(self) -> dict[str, Any]:
        """Holds all groups that were not deleted."""
        with self._lock:
            entries = [encode_entry(number, entry) for number, entry in self._entries.items()]
            return {"store": MEMORY, "last": self._last, "forgotten": self._forgotten, "groups": entries}

    def rewind(self, mark: dict[str, Any] | None, *, step: int) -> None:
        """Raises StoreError if the mark is of another kind of store."""
        if mark is not None and mark["store"] != MEMORY:
            raise StoreError(f"the checkpoint's buffer is in a database; set buffer.store: {mark['store']}, as before")
        state: dict[str, Any] = {"last": 0, "forgotten": 0, "groups": []} if mark is None else mark
        with self._lock:
            marked = (decode_entry(row) for row in state["groups"])
            entries = {number: entry for number, entry in marked if not self._moved(entry.group.id, number)}
            for number, entry in self._entries.items():
                if number in entries:
                    entries[number].removed_by = entry.removed_by
                elif number > state["last"] and entry.group.writer not in (EXPLORER, PIPELINE):
                    entries[number] = entry
            for entry in entries.values():
                entry.undo(step)
            last = state["last"]
            self._ids = {id: known for id, known in self._ids.items() if known[0] <= last or known[0] in entries}
            self._ids |= {entry.group.id: (number, entry.group.kind) for number, entry in entries.items()}
            self._entries, self._forgotten = entries, state["forgotten"]
            self._last = max(self._last, last)

    def close(self) -> None:
        """No-op: memory is freed with the store."""

    # -- parts -------------------------------------------------------------------------------------------------

    def _named(self, ids: Sequence[str]) -> list[BufferEntry]:
        if unknown := [id for id in ids if self._number(id) not in self._entries]:
            raise StoreError(f"the buffer has no group {unknown[0]}; nothing was changed")
        return [self._entries[self._number(id)] for id in ids]

    def _number(self, id: str) -> int:
        """A group's number, even if it was deleted; 0 if the id is unknown."""
        return self._ids.get(id, (0, None))[0]

    def _moved(self, id: str, number: int) -> bool:
        """True if a group has another number now because it was restored."""
        now = self._number(id)
        return now != number and now in self._entries and self._entries[now].group.writer == FEEDBACK

    def _waiting(self, kind: ExperienceKind) -> list[BufferEntry]:
        return [entry for entry in self._entries.values() if entry.group.kind is kind and entry.waits]

    def _taken(self, step: int, since: int = 0) -> list[tuple[int, BufferEntry]]:
        """Rollout groups that were first taken for steps before `step` and after `since`, by number."""
        rollouts = (
            (number, entry) for number, entry in self._entries.items() if entry.group.kind is ExperienceKind.ROLLOUT
        )
        return [
            (number, entry)
            for number, entry in rollouts
            if entry.taken is not None and since < entry.taken < step and entry.removed_by is None
        ]

    def _handed_out(self, step: int, kind: ExperienceKind, *, first: bool) -> list[Group]:
        mine = [entry for entry in self._entries.values() if entry.group.kind is kind]
        found = [(use, entry) for entry in mine for use in entry.uses if use.step == step and use.first == first]
        return [entry.handed() for _, entry in sorted(found, key=lambda pair: pair[0].position)]

    def _hand_out(self, entries: Sequence[BufferEntry], step: int, *, first: bool) -> list[Group]:
        for position, entry in enumerate(entries):
            entry.uses.append(GroupUse(step, position, first))
        return [entry.handed() for entry in entries]

    def _forget(self, step: int) -> None:
        """Delete groups that no step after `step` can request."""
        over = [number for number, _ in self._taken(step + 1)]
        partial = [number for number, entry in self._entries.items() if entry.group.kind is ExperienceKind.PARTIAL]
        done = [number for number in partial if (self._entries[number].taken or step + 1) <= step]
        expired = [number for number, entry in self._entries.items() if (entry.expired or step + 1) <= step]
        self._forgotten += len(expired)
        for number in (*over[: max(0, len(over) - self._keep)], *done, *expired):
            del self._entries[number]


def _older(group: Group, min_version: int | None) -> bool:
    return min_version is not None and 0 <= group.oldest_version < min_version


def _choice(group: Group) -> tuple[int, float, str]:
    """Oldest version, priority and task of a group: what replay chooses by."""
    return group.oldest_version, group.priority, group.experiences[0].task_id if group.experiences else ""
