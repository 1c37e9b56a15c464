"""What a buffer holds and does: groups of experiences on shelves, handed out once, or again on request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from rollmill.config.buffer import ReplayConfig
from rollmill.errors import StoreError
from rollmill.types import Experience, Task


class ExperienceKind(StrEnum):
    """Where a group stands."""

    ROLLOUT = "usual"  #: rolled out and verified, waiting to be learned from or kept for replay
    EXPERT = "expert"  #: demonstrations, one per group
    PREFERENCE = "preference"  #: pairs
    RATED = "rated"  #: completions with the reward that a person or an application gave them
    PARTIAL = "partial"  #: unfinished completions, to be continued


EXPLORER, PIPELINE, FEEDBACK, IMPORTED = "explorer", "pipeline", "feedback", "imported"
"""Who writes groups. What the first two wrote after a checkpoint is made again by a run that resumes from it."""
REMOTE_EXPLORER = "explorer of "
"""Begins what explorers in processes of their own write as, with the stage behind it. They make nothing again."""


def made_by_run(writer: str) -> bool:
    """Whether a run has made a group by itself: no person, no application, no other run."""
    return writer in (EXPLORER, PIPELINE) or writer.startswith(REMOTE_EXPLORER)


@dataclass(slots=True)
class Group:
    """What is handed out as one: completions compared with each other, a pair, or a single demonstration."""

    id: str  #: unique within a run
    experiences: list[Experience]
    shelf: ExperienceKind = ExperienceKind.ROLLOUT
    priority: float = 1.0
    writer: str = EXPLORER  #: what kind of process made it
    author: str = ""  #: of feedback: the person or application
    created_at: float = 0.0  #: seconds since the epoch; a store fills in 0
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest policy token; -1 where no policy produced any."""
        return oldest_version(self.experiences)


def oldest_version(experiences: Sequence[Experience]) -> int:
    """Version of the oldest policy token of several experiences; -1 where no policy produced any."""
    versions = [experience.oldest_version for experience in experiences]
    return min((version for version in versions if version >= 0), default=-1)


def kind_conflict_error(id: str, here: str, there: str) -> StoreError:
    """What to say of a group that is put on a second shelf."""
    return StoreError(f"group {id} is on the shelf {here} already; put it on the shelf {there} under an id of its own")


def validate_groups(groups: Sequence[Group]) -> Sequence[Group]:
    """The groups.

    Raises:
        StoreError: a priority is not a finite number of at least 0, or an id stands for groups on two shelves.
    """
    shelves: dict[str, ExperienceKind] = {}
    for group in groups:
        if not (math.isfinite(group.priority) and group.priority >= 0):
            raise StoreError(
                f"group {group.id} has priority {group.priority}; who sets it has to give a finite number of at least 0"
            )
        if (shelf := shelves.setdefault(group.id, group.shelf)) is not group.shelf:
            raise kind_conflict_error(group.id, shelf, group.shelf)
    return groups


class ExperienceStore(Protocol):
    """A buffer of one run. Methods that wait raise DeadlineError; those of a database raise StoreError."""

    kind: str  #: what its marks are told apart by

    def put(self, groups: Sequence[Group]) -> int:
        """Add groups, all or none. One whose id is known is left as it is, so a writer may repeat itself.

        Returns how many were new.

        Raises:
            StoreError: an id is known on another shelf; what becomes of a group needs an id of its own.
        """

    def take(self, count: int, *, step: int, deadline_s: float, min_version: int | None = None) -> list[Group]:
        """The oldest `count` usual groups that were never taken, for training step `step` (from 1).

        The same step gets the same groups again, whatever happened to the answer the first time. Groups whose oldest
        token is older than `min_version` are never handed out.

        Raises:
            DeadlineError: there are too few after `deadline_s`; names the writer, and when it last wrote.
        """

    def take_partial(self, count: int, *, step: int) -> list[Group]:
        """The oldest unfinished groups that were never taken, at most `count`, to be continued in `step`.

        Waits for nothing. Each is handed out once; a step that got some gets the same ones again. What is continued
        is put under an id of its own.
        """

    def replay(self, rule: ReplayConfig, *, step: int, version: int, seed: int, since: int = 0) -> list[Group]:
        """Groups taken for earlier steps, but after `since`, that join `step`; weights are at `version`. The same step
        gets the same.
        """

    def learned(self, groups: Sequence[Group], *, step: int) -> None:
        """Note the priorities that groups have after `step` learned from them."""

    def read(self, shelf: ExperienceKind, *, after: int = 0) -> Iterator[tuple[int, Group]]:
        """Groups of a shelf in the order they came, after number `after`, each with its number; takes nothing."""

    def get(self, ids: Sequence[str]) -> list[Group]:
        """Groups by id, in this order; those that are unknown or removed are left out."""

    def remove(self, ids: Sequence[str], *, by: str) -> None:
        """Groups are no longer read or handed out (undone feedback). A database keeps them, with who removed them."""

    def restore(self, ids: Sequence[str]) -> None:
        """Removed groups are there again. Feedback comes last on its shelf: who read that meanwhile finds it, too."""

    def put_tasks(self, tasks: Sequence[Task]) -> None:
        """Keep a taskset beside its experiences; tasks whose id is known are replaced."""

    def tasks(self) -> Iterator[Task]:
        """The tasks that were put, in order."""

    def waiting(self, *, min_version: int | None = None) -> int:
        """How many usual groups were never taken, and may be with this `min_version`."""

    def expired(self) -> int:
        """How many usual groups were dropped because they were older than a `min_version`."""

    def mark(self) -> dict[str, Any]:
        """Where the store is, as plain JSON for a checkpoint."""

    def rewind(self, mark: dict[str, Any] | None, *, step: int) -> None:
        """Back to a checkpoint after `step`: what was taken for later steps is there again, and what explorer and
        pipeline have put since the mark is gone; the run makes it again. Feedback and imports stay. None: the start.
        """

    def close(self) -> None:
        """Release files and connections."""
