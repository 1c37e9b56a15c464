"""Interface of experience stores: groups of experiences by kind, handed out once, or again for replay."""

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
from rollmill.files import is_running
from rollmill.types import Experience, ExperienceSource, Task

Shares = Mapping[str, float]
"""Shares of domains in the replayed groups, by name."""


class ExperienceKind(StrEnum):
    """Kind of the experiences of a group."""

    ROLLOUT = "usual"  #: rolled out and scored, waiting for the trainer or kept for replay
    EXPERT = "expert"  #: demonstrations, one per group
    PREFERENCE = "preference"  #: pairs
    RATED = "rated"  #: completions with a reward from a person or an application
    PARTIAL = "partial"  #: unfinished completions, and finished sessions whose group is incomplete


EXPLORER, PIPELINE, FEEDBACK, IMPORTED = "explorer", "pipeline", "feedback", "imported"
"""Writers of groups. A run that resumes from a checkpoint regenerates what the first two wrote after it."""


def made_by_run(writer: str) -> bool:
    """True if a group comes from a run itself, rather than from a person, an application or another run."""
    return writer in (EXPLORER, PIPELINE)


@dataclass(slots=True)
class Group:
    """Unit of a store: completions compared with each other, a preference pair, or a single demonstration."""

    id: str  #: unique within a run
    experiences: list[Experience]
    kind: ExperienceKind = ExperienceKind.ROLLOUT
    priority: float = 1.0
    writer: str = EXPLORER  #: kind of process that made it
    author: str = ""  #: of feedback: the person or application
    created_at: float = 0.0  #: seconds since the epoch; a store fills in 0
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest policy token; -1 if there is none."""
        return oldest_version(self.experiences)


def oldest_version(experiences: Sequence[Experience]) -> int:
    """Version of the oldest policy token of several experiences; -1 if there is none."""
    versions = [experience.oldest_version for experience in experiences]
    return min((version for version in versions if version >= 0), default=-1)


def kind_conflict_error(id: str, here: str, there: str) -> StoreError:
    """Build the StoreError for a group that is put under a second kind."""
    return StoreError(f"group {id} is already stored as kind {here}; give the group of kind {there} another id")


def validate_groups(groups: Sequence[Group]) -> Sequence[Group]:
    """Return the groups if they are valid.

    Raises:
        StoreError: a priority is not a finite number of at least 0, or groups of two kinds have the same id.
    """
    kinds: dict[str, ExperienceKind] = {}
    for group in groups:
        if not (math.isfinite(group.priority) and group.priority >= 0):
            raise StoreError(
                f"group {group.id} has priority {group.priority}; who sets it has to give a finite number of at least 0"
            )
        if (kind := kinds.setdefault(group.id, group.kind)) is not group.kind:
            raise kind_conflict_error(group.id, kind, group.kind)
    return groups


class ExperienceStore(Protocol):
    """Buffer of one run. Methods that wait raise DeadlineError; those of a database raise StoreError."""

    kind: str  #: identifies the store in its marks

    def put(self, groups: Sequence[Group]) -> int:
        """Add groups, all or none. Known ids are ignored, so a writer may retry.

        Returns the number of new groups.

        Raises:
            StoreError: an id is known under another kind.
        """

    def take(self, count: int, *, step: int, deadline_s: float, min_version: int | None = None) -> list[Group]:
        """Take the oldest `count` rollout groups that were never taken, for training step `step` (from 1).

        Repeating the call for a step returns the same groups. Groups with a token older than `min_version` expire.

        Raises:
            DeadlineError: there are too few after `deadline_s`; names the writer, and when it last wrote.
        """

    def take_partial(self, count: int, *, step: int) -> list[Group]:
        """Take the oldest unfinished groups that were never taken, at most `count`, to continue them in `step`.

        Does not wait. Repeating the call for a step returns the same groups. A continued group is put under a new id.
        """

    def replay(
        self, rule: ReplayConfig, *, step: int, version: int, seed: int, since: int = 0, shares: Shares | None = None
    ) -> list[Group]:
        """Choose groups to replay in `step` among those taken for earlier steps, but after step `since`.

        Weights are at `version`; `shares` are those of domains, see `replay_quotas`. Repeating the call for a step
        returns the same groups.
        """

    def update_priorities(self, groups: Sequence[Group], *, step: int) -> None:
        """Record the priorities of groups after training step `step`."""

    def read(self, kind: ExperienceKind, *, after: int = 0) -> Iterator[tuple[int, Group]]:
        """Groups of a kind in the order of arrival, after number `after`, each with its number; takes none."""

    def get(self, ids: Sequence[str]) -> list[Group]:
        """Groups by id, in this order; unknown and removed ones are left out."""

    def remove(self, ids: Sequence[str], *, by: str) -> None:
        """Stop reading and handing out groups (undone feedback). A database keeps them and records `by`."""

    def restore(self, ids: Sequence[str]) -> None:
        """Restore removed groups. Feedback gets a new number at the end, so that readers past the old one see it."""

    def put_tasks(self, tasks: Sequence[Task]) -> None:
        """Store a taskset beside its experiences; replaces tasks with known ids."""

    def tasks(self) -> Iterator[Task]:
        """The stored tasks, in order."""

    def waiting(self, *, min_version: int | None = None) -> int:
        """Number of rollout groups that were never taken and do not expire with this `min_version`."""

    def expired(self) -> int:
        """Number of rollout groups that expired because they were older than a `min_version`."""

    def mark(self) -> dict[str, Any]:
        """Position of the store for a checkpoint, as plain JSON."""

    def rewind(self, mark: dict[str, Any] | None, *, step: int) -> None:
        """Go back to a checkpoint after `step` (None: the start of the run).

        Groups taken for later steps become available again. Groups that explorer and pipeline have put since the mark
        are deleted, because the run regenerates them. Feedback and imports stay.
        """

    def close(self) -> None:
        """Release files and connections."""


def split_by_kind(experiences: Sequence[Experience], group: str, tokenizer: str) -> list[Group]:
    """Split a pipeline's output for one group into groups by kind.

    Args:
        tokenizer: fingerprint of the tokenizer, stored with new demonstrations and pairs, which other runs may use.
    """
    rollouts = [e for e in experiences if e.source is ExperienceSource.ROLLOUT]
    made: dict[str, list[Experience]] = {}
    for experience in experiences:
        if experience.source is not ExperienceSource.ROLLOUT:
            paired = experience.source is ExperienceSource.PREFERENCE
            made.setdefault(experience.group if paired else experience.id, []).append(experience)
    found = [Group(group, rollouts, priority=_mean_priority(rollouts))] if rollouts else []
    kinds = {ExperienceSource.EXPERT: ExperienceKind.EXPERT, ExperienceSource.PREFERENCE: ExperienceKind.PREFERENCE}
    info = {"tokenizer": tokenizer}
    made_groups = [
        Group(name, each, kinds[each[0].source], writer=PIPELINE, info=dict(info)) for name, each in made.items()
    ]
    return found + made_groups


def _mean_priority(experiences: Sequence[Experience]) -> float:
    return float(np.mean([e.info.get("priority", 1.0) for e in experiences]))


@dataclass(frozen=True, slots=True)
class VersionSegment:
    """Tokens `start` to `end` (exclusive) of an experience, all produced by the weights of `version`.

    A partial rollout has several segments.
    """

    start: int
    end: int
    version: int


def version_segments(experience: Experience) -> list[VersionSegment]:
    """Split policy tokens into segments of one version, in order; other tokens (prompt, tools) belong to none.

    With log-probs per token, together they have one valid behaviour policy (AReaL, arXiv:2505.24298, Prop. 1).
    """
    versions = np.where(experience.action_mask, experience.versions, -1)
    if not len(versions):
        return []
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [VersionSegment(start, end, int(versions[start])) for start, end in pairwise(edges) if versions[start] >= 0]


Result = TypeVar("Result")

_FIRST_S, _LONGEST_S = 0.005, 0.5


def poll_until(attempt: Callable[[], Result | None], deadline_s: float) -> Result | None:
    """Call `attempt` until its result is not None; None after `deadline_s`. Pauses grow exponentially."""
    end, pause = time.monotonic() + deadline_s, _FIRST_S
    while True:
        found = attempt()
        left = end - time.monotonic()
        if found is not None or left <= 0:
            return found
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_S)


def writer_identity(kind: str) -> dict[str, Any]:
    """Identity of this writer: kind, host and process."""
    return {"kind": kind, "host": socket.gethostname(), "pid": os.getpid()}


def too_few_groups_error(
    wanted: int, there: int, seconds: float, writers: Sequence[Mapping[str, Any]]
) -> DeadlineError:
    """Build the error of a reader that timed out; `writers` are rows of the table, the last seen one first."""
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
    if here and not is_running(newest["pid"]):
        place += ", which no longer runs"
    if newest["wrote_at"] is None:
        return f"the {newest['kind']} ({place}; it has written nothing yet)"
    ago = max(0.0, time.time() - newest["wrote_at"])
    return f"the {newest['kind']} ({place}; it last wrote {ago:.0f} s ago, {newest['written']} groups in all)"
