"""A group in memory with what became of it, as JSON for checkpoints."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from rollmill.buffer.base import ExperienceKind, Group
from rollmill.files import to_jsonable
from rollmill.serialization import decode_experience, encode_experience
from rollmill.types import Experience


@dataclass(slots=True)
class GroupUse:
    """A step that learned from a group."""

    step: int
    position: int  # among those of the step
    first: bool  # handed out by `take`, not by `replay`
    priority: float | None = None


@dataclass(slots=True)
class BufferEntry:
    """A group and what became of it."""

    group: Group
    uses: list[GroupUse] = field(default_factory=list)  # by step
    expired: int | None = None  # the step for which it was too old
    removed_by: str | None = None
    _encoded: list[dict[str, Any]] | None = None  # the experiences, which never change

    def experiences(self) -> list[dict[str, Any]]:
        """The group's experiences as JSON; made once, for marks are taken at every step."""
        if self._encoded is None:
            self._encoded = [encode_experience(experience, routing=True) for experience in self.group.experiences]
        return self._encoded

    @property
    def taken(self) -> int | None:
        """The step it was first handed out for."""
        return self.uses[0].step if self.uses else None

    @property
    def waits(self) -> bool:
        """Whether it may be handed out for the first time."""
        return not self.uses and self.expired is None and self.removed_by is None

    def undo(self, step: int) -> None:
        """Forget what happened for later steps."""
        self.uses = [use for use in self.uses if use.step <= step]
        if self.expired is not None and self.expired > step:
            self.expired = None

    def handed(self) -> Group:
        """A copy of the group, with the priority after its last use: who gets it may change it."""
        noted = [use.priority for use in self.uses if use.priority is not None]
        made = copy_group(self.group)
        return replace(made, priority=noted[-1]) if noted else made


def copy_group(group: Group) -> Group:
    """A copy whose experiences may be changed; arrays are shared, and replaced rather than written to."""
    return replace(group, experiences=[_own(each) for each in group.experiences], info=dict(group.info))


def _own(experience: Experience) -> Experience:
    made = copy.copy(experience)
    made.reward_parts, made.timings = dict(experience.reward_parts), dict(experience.timings)
    made.info, made.turns = dict(experience.info), list(experience.turns)
    return made


def encode_entry(number: int, entry: BufferEntry) -> dict[str, Any]:
    """An entry as JSON can hold it."""
    group = entry.group
    return {
        "number": number,
        "id": group.id,
        "experiences": entry.experiences(),
        "shelf": str(group.shelf),
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
    """The number and entry that `encode_entry` made `row` from."""
    group = Group(
        id=row["id"],
        experiences=[decode_experience(each) for each in row["experiences"]],
        shelf=ExperienceKind(row["shelf"]),
        priority=row["priority"],
        writer=row["writer"],
        author=row["author"],
        created_at=row["created_at"],
        info=row["info"],
    )
    uses = [GroupUse(*use) for use in row["uses"]]
    return row["number"], BufferEntry(group, uses, row["expired"], row["removed_by"])
