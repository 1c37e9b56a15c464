"""What operators remember about earlier groups: the latest so many entries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LRUCache(Generic[Value]):
    """A mapping from texts that holds at most `size` entries. What was not touched for longest goes first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: dict[str, Value] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, key: str) -> Value | None:
        """The value of a key, which is touched; None where it is not known."""
        if key not in self._entries:
            return None
        self._entries[key] = self._entries.pop(key)
        return self._entries[key]

    def peek(self, key: str) -> Value:
        """The value of a known key, which is not touched."""
        return self._entries[key]

    def put(self, key: str, value: Value) -> list[tuple[str, Value]]:
        """Set the value of a key, which is touched. Returns what had to be forgotten."""
        self._entries.pop(key, None)
        self._entries[key] = value
        too_many = len(self._entries) - self._size
        return [(old, self._entries.pop(old)) for old in list(self._entries)[: max(too_many, 0)]]

    def items(self) -> list[tuple[str, Value]]:
        """All entries, from the one that goes first."""
        return list(self._entries.items())
