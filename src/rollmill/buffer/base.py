"""What a buffer holds and does: groups of experiences on shelves, handed out once, or again on request."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np

from rollmill.config.buffer import ReplayConfig
from rollmill.errors import DeadlineError, StoreError
from rollmill.types import Experience, ExperienceSource, Task


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


# From what a pipeline left to groups on their shelves.


def split_by_kind(experiences: Sequence[Experience], group: str, tokenizer: str) -> list[Group]:
    """What a pipeline left of one group, and made from it, as groups on their shelves.

    Args:
        tokenizer: fingerprint of the one that made the tokens; what is made may be learned from by other runs.
    """
    usual = [e for e in experiences if e.source is ExperienceSource.ROLLOUT]
    made: dict[str, list[Experience]] = {}
    for experience in experiences:
        if experience.source is not ExperienceSource.ROLLOUT:
            paired = experience.source is ExperienceSource.PREFERENCE
            made.setdefault(experience.group if paired else experience.id, []).append(experience)
    found = [Group(group, usual, priority=_mean_priority(usual))] if usual else []
    shelves = {ExperienceSource.EXPERT: ExperienceKind.EXPERT, ExperienceSource.PREFERENCE: ExperienceKind.PREFERENCE}
    info = {"tokenizer": tokenizer}
    made_groups = [
        Group(name, own, shelves[own[0].source], writer=PIPELINE, info=dict(info)) for name, own in made.items()
    ]
    return found + made_groups


def _mean_priority(experiences: Sequence[Experience]) -> float:
    return float(np.mean([e.info.get("priority", 1.0) for e in experiences]))


# Which stretches of an experience were produced by which weights: partial rollouts are stitched from several.


@dataclass(frozen=True, slots=True)
class VersionSegment:
    """Tokens `start` to `end` (exclusive) of an experience, all produced by the weights of `version`."""

    start: int
    end: int
    version: int


def version_segments(experience: Experience) -> list[VersionSegment]:
    """The stretches of policy tokens of one version, in order; tokens of others (prompt, tools) belong to none.

    With log-probs per token, they have one valid behaviour policy together (AReaL, arXiv:2505.24298, Prop. 1).
    """
    versions = np.where(experience.action_mask, experience.versions, -1)
    if not len(versions):
        return []
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [VersionSegment(start, end, int(versions[start])) for start, end in pairwise(edges) if versions[start] >= 0]


# Waiting for groups, with a deadline that names who should have written them.

Result = TypeVar("Result")

_FIRST_S, _LONGEST_S = 0.005, 0.5


def poll_until(attempt: Callable[[], Result | None], deadline_s: float) -> Result | None:
    """What `attempt` gives once it is not None; None after `deadline_s`. Waits longer and longer in between."""
    end, pause = time.monotonic() + deadline_s, _FIRST_S
    while True:
        found = attempt()
        left = end - time.monotonic()
        if found is not None or left <= 0:
            return found
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_S)


def writer_identity(kind: str) -> dict[str, Any]:
    """What tells this writer from others."""
    return {"kind": kind, "host": socket.gethostname(), "pid": os.getpid()}


def too_few_groups_error(
    wanted: int, there: int, seconds: float, writers: Sequence[Mapping[str, Any]]
) -> DeadlineError:
    """The error of a reader that got too few groups; `writers` are rows of the table, the one last seen first."""
    advice = (
        f"{there} of {wanted} groups are there. Look at that process and its log: start it again if it has ended, "
        "raise rollout.deadline_s if it is only slow, or loosen what the pipeline drops."
    )
    return DeadlineError("the trainer", _named(writers), seconds, advice)


def _named(writers: Sequence[Mapping[str, Any]]) -> str:
    if not writers:
        return "a writer of groups (none has ever opened this buffer)"
    newest = writers[0]
    here = newest["host"] == socket.gethostname()
    place = f"process {newest['pid']} on {newest['host']}"
    if here and not _alive(newest["pid"]):
        place += ", which no longer runs"
    if newest["wrote_at"] is None:
        return f"the {newest['kind']} ({place}; it has written nothing yet)"
    ago = max(0.0, time.time() - newest["wrote_at"])
    return f"the {newest['kind']} ({place}; it last wrote {ago:.0f} s ago, {newest['written']} groups in all)"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
