"""KV cache: what all layouts of it offer, and the layout in buckets by capacity.

An entry is a run of tokens with stored keys and values: a prompt (shared by the completions of its group), or the
tokens that one completion has generated so far (its parent is the prompt's entry). A token attends to its own entry and
to its ancestors. Here, entries of similar size share a bucket, without holes, so that attention runs over few dense
tensors; an entry that outgrows its bucket moves to the next one, which costs each token at most two extra copies on
average. `paged_cache` has the other layout.

Shapes: E entries of a bucket, K key-value heads, C capacity, D head size, n tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from rollmill.models.recurrent import RecurrentState

MIN_CAPACITY = 32


class CacheFull(Exception):  # noqa: N818  not an error
    """The cache's limit leaves no room."""


@dataclass(slots=True, eq=False, kw_only=True)
class CacheEntry:
    """A run of cached tokens. `length` tokens are valid; the first is at position `offset`."""

    parent: CacheEntry | None = None
    length: int = 0
    states: dict[int, RecurrentState] = field(default_factory=dict)  # of recurrent layers, after the last token

    @property
    def offset(self) -> int:
        """Position of the entry's first token: the tokens of all ancestors come before it."""
        return self.parent.offset + self.parent.length if self.parent else 0


class KVCache(ABC):
    """Keys and values of prompts and completions.

    Methods that take memory raise CacheFull, and change nothing, where that would exceed the limit.

    Args:
        limit: bytes that entries may take; None: any.

    Attributes:
        used, peak: bytes that entries take, and the most that they have taken; 0 where the size of a token is unknown.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.used = self.peak = 0

    @abstractmethod
    def prompt(self, length: int) -> CacheEntry:
        """Add an entry for a prompt of `length` tokens."""

    @abstractmethod
    def completions(self, parents: Sequence[CacheEntry]) -> Sequence[CacheEntry]:
        """Add one entry below each parent, whose tokens are all there."""

    @abstractmethod
    def reserve(self, entries: Sequence[CacheEntry], tokens: Sequence[int]) -> None:
        """Make room for so many more tokens in each entry of a completion."""

    @abstractmethod
    def remove(self, entries: Iterable[CacheEntry]) -> None:
        """Drop entries; what they share with others stays."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all entries but keep the memory for the next ones: fresh pages cost more than copies."""

    @abstractmethod
    def destroy(self) -> None:
        """Drop all entries and the memory."""

    @abstractmethod
    def entries(self) -> int:
        """Count the entries of prompts and completions."""

    @abstractmethod
    def bytes(self) -> int:
        """Bytes of the memory, used or not, and of the states of recurrent layers."""

    @abstractmethod
    def keep(self, entry: CacheEntry, length: int) -> tuple[Any, int]:
        """Keep the entry's first `length` tokens and its ancestors', also when it is removed; also their bytes."""

    @abstractmethod
    def adopt(self, kept: Any, entry: CacheEntry, *, last: bool) -> None:
        """Begin the empty entry of a prompt with tokens that were kept. `last`: none else will adopt them."""

    @abstractmethod
    def release(self, kept: Any) -> None:
        """Give up tokens that were kept."""

    def fitting(self, parents: Sequence[CacheEntry], tokens: Sequence[int]) -> int:
        """Count the new completions, from the first on, that fit with so many tokens each."""
        if self.limit is None:
            return len(parents)
        room = self.limit - self.used
        for number, size in enumerate(self._sizes(parents, tokens)):
            room -= size
            if room < 0:
                return number
        return len(parents)

    @abstractmethod
    def _sizes(self, parents: Sequence[CacheEntry], tokens: Sequence[int]) -> Iterator[int]:
        """Bytes of new completions with so many tokens each, one after the other."""

    def _take(self, size: int) -> None:
        """Count bytes as used, if the limit allows it."""
        if self.limit is not None and self.used + size > self.limit:
            raise CacheFull
        self.used += size
        self.peak = max(self.peak, self.used)


@dataclass(slots=True, eq=False, kw_only=True)
class BucketEntry(CacheEntry):
    """The entry at an index of a bucket."""

    bucket: CacheBucket
    index: int


class CacheBucket:
    """Entries of up to `capacity` tokens; entry i is at index i of every layer's tensors."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: list[BucketEntry] = []
        self.keys: dict[int, Tensor] = {}  # layer -> [E, K, C, D]
        self.values: dict[int, Tensor] = {}
        self.moves = 0  #: how often entries or storage have moved
        self.reserved = 0  #: entries that there is memory for

    def add(self, parent: CacheEntry | None) -> BucketEntry:
        """Add an entry, for which there is memory."""
        entry = BucketEntry(bucket=self, index=len(self.entries), parent=parent)
        self.entries.append(entry)
        return entry

    def resize(self, entries: int) -> None:
        """Have memory for `entries` entries: as many as there are, or more."""
        if entries == self.reserved:
            return
        self.moves += 1
        kept = min(entries, self.reserved)
        for store in (self.keys, self.values):
            for layer, old in store.items():
                new = old.new_zeros(entries, *old.shape[1:])
                new[:kept] = old[:kept]
                store[layer] = new
        self.reserved = entries

    def layer(self, layer: int, like_k: Tensor, like_v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [E, K, C, D] of a layer; allocated at first use, with head sizes of [1, K, T, D] tensors."""
        if layer not in self.keys:
            for store, like in ((self.keys, like_k), (self.values, like_v)):
                # zeros: masked positions must not hold NaN, which would survive a multiplication by zero
                store[layer] = like.new_zeros(self.reserved, like.shape[1], self.capacity, like.shape[3])
        return self.keys[layer], self.values[layer]

    def remove(self, entries: Iterable[BucketEntry]) -> None:
        """Drop entries; the last ones move into the holes."""
        self.moves += 1
        gone = {entry.index for entry in entries}
        left = len(self.entries) - len(gone)
        holes = sorted(i for i in gone if i < left)
        movers = [i for i in range(left, len(self.entries)) if i not in gone]
        if holes:
            for store in (self.keys, self.values):
                for tensor in store.values():
                    tensor[holes] = tensor[movers]
            for hole, mover in zip(holes, movers, strict=True):
                self.entries[hole] = self.entries[mover]
                self.entries[hole].index = hole
        del self.entries[left:]


class BucketCache(KVCache):
    """Buckets by capacity, separate for prompts and completions.

    Args:
        token_bytes: of the keys and values of a token; needed with a limit.
    """

    def __init__(self, limit: int | None = None, token_bytes: int = 0) -> None:
        super().__init__(limit)
        self._token_bytes = token_bytes
        self._prompts: dict[int, CacheBucket] = {}
        self._completions: dict[int, CacheBucket] = {}
        self._kept = 0  # bytes of copies

    def prompt(self, length: int) -> BucketEntry:
        bucket = self._bucket(self._prompts, length)
        self._take(bucket.capacity * self._token_bytes)
        count = len(bucket.entries) + 1
        if count > bucket.reserved:
            self._reserve(bucket, count, reserved_entries(count, bucket.capacity))
        return bucket.add(None)

    def completions(self, parents: Sequence[CacheEntry]) -> list[BucketEntry]:
        bucket = self._bucket(self._completions, MIN_CAPACITY)
        self._take(len(parents) * MIN_CAPACITY * self._token_bytes)
        count = len(bucket.entries) + len(parents)
        self._reserve(bucket, count, count)
        return [bucket.add(parent) for parent in parents]

    def reserve(self, entries: Sequence[CacheEntry], tokens: Sequence[int]) -> None:
        """Move entries that would outgrow their bucket to larger ones."""
        lengths = {
            entry: entry.length + more
            for entry, more in zip(cast("Sequence[BucketEntry]", entries), tokens, strict=True)
            if entry.bucket.capacity < entry.length + more
        }
        growth = sum(bucket_capacity_for(length) - entry.bucket.capacity for entry, length in lengths.items())
        if self.limit is not None and self.used + growth * self._token_bytes > self.limit:
            raise CacheFull
        while lengths:
            by_bucket: dict[int, list[BucketEntry]] = {}
            for entry in lengths:
                by_bucket.setdefault(id(entry.bucket), []).append(entry)
            for group in by_bucket.values():
                self.grow(group)
            lengths = {entry: length for entry, length in lengths.items() if entry.bucket.capacity < length}

    def grow(self, entries: list[BucketEntry]) -> None:
        """Move full entries of one bucket to the next larger one."""
        old = entries[0].bucket
        new = self._bucket(self._completions, old.capacity + 1)
        self._take(len(entries) * (new.capacity - old.capacity) * self._token_bytes)
        sources: list[int] | slice = [entry.index for entry in entries]
        start = len(new.entries)
        self._reserve(new, start + len(entries), start + len(entries))
        length = max(entry.length for entry in entries)
        if sources == list(range(len(entries))):
            sources = slice(len(entries))  # a view instead of a gather
        for layer, keys in old.keys.items():
            new_k, new_v = new.layer(layer, keys, old.values[layer])
            new_k[start : start + len(entries), :, :length] = keys[sources, :, :length]
            new_v[start : start + len(entries), :, :length] = old.values[layer][sources, :, :length]
        old.remove(entries)
        for entry in entries:
            entry.bucket, entry.index = new, len(new.entries)
            new.entries.append(entry)
        self._trim()

    def remove(self, entries: Iterable[CacheEntry]) -> None:
        by_bucket: dict[int, list[BucketEntry]] = {}
        for entry in cast("Iterable[BucketEntry]", entries):
            by_bucket.setdefault(id(entry.bucket), []).append(entry)
        for group in by_bucket.values():
            self.used -= len(group) * group[0].bucket.capacity * self._token_bytes
            group[0].bucket.remove(group)

    def completion_buckets(self) -> list[CacheBucket]:
        """Non-empty completion buckets, smallest first."""
        return [self._completions[c] for c in sorted(self._completions) if self._completions[c].entries]

    def clear(self) -> None:
        for bucket in self._buckets():
            bucket.entries.clear()
            bucket.moves += 1
        self.used = 0 if self.limit is None else self._kept

    def destroy(self) -> None:
        self.clear()
        self._prompts, self._completions = {}, {}

    def bytes(self) -> int:
        states = [
            s for b in self._buckets() for entry in b.entries for layer in entry.states.values() for s in layer.values()
        ]
        stores = [each for b in self._buckets() for store in (b.keys, b.values) for each in store.values()]
        return sum(each.nbytes for each in (*stores, *states)) + self._kept

    def moves(self) -> int:
        """Count of moves of entries or storage; a change invalidates remembered indices and storage."""
        return sum(bucket.moves for bucket in self._buckets())

    def entries(self) -> int:
        return sum(len(bucket.entries) for bucket in self._buckets())

    def keep(self, entry: CacheEntry, length: int) -> tuple[dict[int, tuple[Tensor, Tensor]], int]:
        """Copy keys and values [K, n, D] of each layer."""
        assert entry.parent is not None
        runs = cast("list[tuple[BucketEntry, int]]", [(entry.parent, entry.parent.length), (entry, length)])
        stores = [(each.bucket, each.index, n) for each, n in runs if n]
        layers = {}
        for layer in stores[0][0].keys:
            keys = torch.cat([bucket.keys[layer][index, :, :n] for bucket, index, n in stores], dim=1)
            values = torch.cat([bucket.values[layer][index, :, :n] for bucket, index, n in stores], dim=1)
            layers[layer] = keys, values
        size = sum(each.nbytes for pair in layers.values() for each in pair)
        if self.limit is not None:
            self._take(size)
        self._kept += size
        self._trim()
        return layers, size

    def adopt(self, kept: dict[int, tuple[Tensor, Tensor]], entry: CacheEntry, *, last: bool) -> None:
        into = cast(BucketEntry, entry)
        for layer, (keys, values) in kept.items():
            stored_k, stored_v = into.bucket.layer(layer, keys[None], values[None])
            stored_k[into.index, :, : keys.shape[1]] = keys
            stored_v[into.index, :, : values.shape[1]] = values

    def release(self, kept: dict[int, tuple[Tensor, Tensor]]) -> None:
        size = sum(each.nbytes for pair in kept.values() for each in pair)
        self._kept -= size
        if self.limit is not None:
            self.used -= size

    def _sizes(self, parents: Sequence[CacheEntry], tokens: Sequence[int]) -> Iterator[int]:
        return (bucket_capacity_for(count) * self._token_bytes for count in tokens)

    def _reserve(self, bucket: CacheBucket, count: int, most: int) -> None:
        """Have memory for `count` entries of a bucket, which are counted as used; for `most` if the limit allows it.

        Memory of removed entries is freed where the limit asks for it.
        """
        if count <= bucket.reserved:
            return
        trimmed = self._trim((most - bucket.reserved) * bucket.capacity * self._token_bytes)
        bucket.resize(count if trimmed else most)

    def _trim(self, more: int = 0) -> bool:
        """Free the memory of entries that are not there, if all of it and `more` bytes would exceed the limit."""
        reserved = sum(each.reserved * each.capacity for each in self._buckets()) * self._token_bytes + self._kept
        if self.limit is None or reserved + more <= self.limit:
            return False
        for bucket in self._buckets():
            bucket.resize(len(bucket.entries))
        return True

    def _buckets(self) -> list[CacheBucket]:
        return [*self._prompts.values(), *self._completions.values()]

    @staticmethod
    def _bucket(buckets: dict[int, CacheBucket], length: int) -> CacheBucket:
        capacity = bucket_capacity_for(length)
        return buckets.setdefault(capacity, CacheBucket(capacity))


def bucket_capacity_for(length: int) -> int:
    """The smallest of 32, 64, 96, 128, 192, 256, 384, ... that holds `length` tokens."""
    capacity = MIN_CAPACITY
    while capacity < length:
        capacity += max(MIN_CAPACITY, (1 << capacity.bit_length()) // 4)
    return capacity


def reserved_entries(count: int, capacity: int) -> int:
    """Entries that a bucket has room for, once `count` have been added one by one: the room doubles when it is full.

    It begins with 8 short entries, or as many as 8192 tokens hold: a long prompt alone does not pay for eight.
    """
    room = max(1, min(8, 8192 // capacity))
    while room < count:
        room *= 2
    return room


def stack_states(states: list[RecurrentState]) -> RecurrentState:
    """Stack the states of several sequences for one call: a copy, so that each can be continued from again."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}
