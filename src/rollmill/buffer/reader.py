"""A store whose shelves are looked at again and again while others write to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rollmill.buffer.base import ExperienceKind, ExperienceStore, Group

StoreOpener = Callable[[], ExperienceStore | None]
"""Opens a store that may not be there yet: feedback can begin while a run goes on."""


@dataclass(slots=True)
class StoreReader:
    """The shelves of one store. Closing it is the opener's affair."""

    name: str  #: for messages
    open: StoreOpener
    store: ExperienceStore | None = None
    _after: dict[ExperienceKind, int] = field(default_factory=dict)

    def new(self, shelf: ExperienceKind) -> Iterator[Group]:
        """Groups that came since the last call, or came back: what is restored comes last."""
        self.store = self.store or self.open()
        if self.store is not None:
            for number, group in self.store.read(shelf, after=self._after.get(shelf, 0)):
                self._after[shelf] = number
                yield group

    def get(self, ids: list[str]) -> list[Group]:
        """Groups by id, without those that were removed since."""
        return [] if self.store is None or not ids else self.store.get(ids)
