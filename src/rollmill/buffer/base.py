"""What a buffer holds and does: groups of experiences on shelves, handed out once, or again on request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from rollmill.config.buffer import ReplayConfig
from rollmill.core.types import Experience


class Shelf(StrEnum):
    """Where a group stands."""

    USUAL = "usual"  #: rolled out and verified, waiting to be learned from or kept for replay
    EXPERT = "expert"  #: demonstrations, one per group
    PREFERENCE = "preference"  #: pairs
    PARTIAL = "partial"  #: unfinished completions, to be continued


@dataclass(slots=True)
class Group:
    """What is handed out as one: completions compared with each other, a pair, or a single demonstration."""

    id: str  #: unique within a run
    experiences: list[Experience]
    shelf: Shelf = Shelf.USUAL
    priority: float = 1.0
    writer: str = "explorer"  #: who made it; people's names for feedback
    created_at: float = 0.0  #: seconds since the epoch; 0: now
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest policy token; -1 where no policy produced any."""
        return min((e.oldest_version for e in self.experiences), default=-1)


class Store(Protocol):
    """A buffer of one run. Methods that wait raise DeadlineError; those of a database raise StoreError."""

    def put(self, groups: Sequence[Group]) -> int:
        """Add groups, all or none. One whose id is known is left as it is, so a writer may repeat itself.

        Returns how many were new.
        """

    def take(self, count: int, *, step: int, deadline_s: float, min_version: int | None = None) -> list[Group]:
        """The oldest `count` usual groups that were never taken, for training step `step` (from 1).

        The same step gets the same groups again, whatever happened to the answer the first time. Groups whose oldest
        token is older than `min_version` are never handed out.

        Raises:
            DeadlineError: there are too few after `deadline_s`; names the writer, and when it last wrote.
        """

    def replay(self, rule: ReplayConfig, *, step: int, version: int, seed: int) -> list[Group]:
        """Groups taken for earlier steps that join `step`; weights are at `version`. The same step gets the same."""

    def learned(self, groups: Sequence[Group], *, step: int) -> None:
        """Note the priorities that groups have after `step` learned from them."""

    def read(self, shelf: Shelf, *, after: int = 0) -> Iterator[tuple[int, Group]]:
        """Groups of a shelf in the order they came, after number `after`, each with its number; takes nothing."""

    def remove(self, ids: Sequence[str]) -> None:
        """Groups are gone, as if they had never been put (undone feedback)."""

    def waiting(self) -> int:
        """How many usual groups were never taken."""

    def mark(self) -> dict[str, Any]:
        """Where the store is, as plain JSON for a checkpoint."""

    def rewind(self, mark: dict[str, Any] | None, *, step: int) -> None:
        """Back to a checkpoint after `step`: what was taken for later steps is there again, and what this run's
        explorer has put since the mark is gone. Feedback stays. None: back to the start.
        """

    def close(self) -> None:
        """Release files and connections."""
