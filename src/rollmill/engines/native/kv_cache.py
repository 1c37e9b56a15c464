"""KV cache: entries in buckets by capacity.

An entry is a run of tokens with stored keys and values: a prompt (shared by the completions of its group), or the
tokens that one completion has generated so far (its parent is the prompt's entry). A token attends to its own entry and
to its ancestors. Entries of similar size share a bucket, without holes, so that attention runs over few dense tensors;
an entry that outgrows its bucket moves to the next one, which costs each token at most two extra copies on average.

Shapes: E entries of a bucket, K key-value heads, C capacity, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollmill.models.recurrent import RecurrentState

MIN_CAPACITY = 32


@dataclass(slots=True, eq=False)
class CacheEntry:
    """A run of cached tokens. `length` tokens are valid; the first is at position `offset`."""

    bucket: CacheBucket
    index: int
    parent: CacheEntry | None = None
    length: int = 0
    states: dict[int, RecurrentState] = field(default_factory=dict)  # of recurrent layers, after the last token

    @property
    def offset(self) -> int:
        """Position of the entry's first token: the tokens of all ancestors come before it."""
        return self.parent.offset + self.parent.length if self.parent else 0


class CacheBucket:
    """Entries of up to `capacity` tokens; entry i is at index i of every layer's tensors."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: list[CacheEntry] = []
        self.keys: dict[int, Tensor] = {}  # layer -> [E, K, C, D]
        self.values: dict[int, Tensor] = {}
        self.moves = 0  #: how often entries or storage have moved
        self._reserved = 0

    def add(self, parent: CacheEntry | None) -> CacheEntry:
        entry = CacheEntry(self, len(self.entries), parent)
        self.entries.append(entry)
        if len(self.entries) > self._reserved:
            self._reserve(reserved_entries(len(self.entries), self.capacity))
        return entry

    def reserve(self, entries: int) -> None:
        """Reserve memory for `entries` entries at once."""
        if entries > self._reserved:
            self._reserve(entries)

    def _reserve(self, entries: int) -> None:
        self.moves += 1
        for store in (self.keys, self.values):
            for layer, old in store.items():
                new = old.new_zeros(entries, *old.shape[1:])
                new[: old.shape[0]] = old
                store[layer] = new
        self._reserved = entries

    def layer(self, layer: int, like_k: Tensor, like_v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [E, K, C, D] of a layer; allocated at first use, with head sizes of [1, K, T, D] tensors."""
        if layer not in self.keys:
            for store, like in ((self.keys, like_k), (self.values, like_v)):
                # zeros: masked positions must not hold NaN, which would survive a multiplication by zero
                store[layer] = like.new_zeros(self._reserved, like.shape[1], self.capacity, like.shape[3])
        return self.keys[layer], self.values[layer]

    def remove(self, entries: Iterable[CacheEntry]) -> None:
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


class KVCache:
    """Buckets by capacity, separate for prompts and completions."""

    def __init__(self) -> None:
        self._prompts: dict[int, CacheBucket] = {}
        self._completions: dict[int, CacheBucket] = {}

    def prompt(self, length: int) -> CacheEntry:
        """Add an entry for a prompt of `length` tokens."""
        return self._bucket(self._prompts, length).add(None)

    def completions(self, parents: list[CacheEntry]) -> list[CacheEntry]:
        """Add one entry below each parent."""
        bucket = self._bucket(self._completions, MIN_CAPACITY)
        bucket.reserve(len(bucket.entries) + len(parents))
        return [bucket.add(parent) for parent in parents]

    def grow(self, entries: list[CacheEntry]) -> None:
        """Move full entries of one bucket to the next larger one."""
        old = entries[0].bucket
        new = self._bucket(self._completions, old.capacity + 1)
        sources: list[int] | slice = [entry.index for entry in entries]
        start = len(new.entries)
        new.reserve(start + len(entries))
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

    def remove(self, entries: Iterable[CacheEntry]) -> None:
        """Drop entries of any bucket."""
        by_bucket: dict[int, list[CacheEntry]] = {}
        for entry in entries:
            by_bucket.setdefault(id(entry.bucket), []).append(entry)
        for group in by_bucket.values():
            group[0].bucket.remove(group)

    def completion_buckets(self) -> list[CacheBucket]:
        """Non-empty completion buckets, smallest first."""
        return [self._completions[c] for c in sorted(self._completions) if self._completions[c].entries]

    def prompt_buckets(self) -> list[CacheBucket]:
        """Non-empty prompt buckets, smallest first."""
        return [self._prompts[c] for c in sorted(self._prompts) if self._prompts[c].entries]

    def clear(self) -> None:
        """Drop all entries but keep the memory for the next ones: fresh pages cost more than copies."""
        for bucket in (*self._prompts.values(), *self._completions.values()):
            bucket.entries.clear()
            bucket.moves += 1

    def bytes(self) -> int:
        """Bytes of all buckets, used or not, and of the states of recurrent layers."""
        buckets = (*self._prompts.values(), *self._completions.values())
        states = [s for b in buckets for entry in b.entries for layer in entry.states.values() for s in layer.values()]
        stores = [each for b in buckets for store in (b.keys, b.values) for each in store.values()]
        return sum(each.nbytes for each in (*stores, *states))

    def moves(self) -> int:
        """Count of moves of entries or storage; a change invalidates remembered indices and storage."""
        return sum(bucket.moves for bucket in (*self._prompts.values(), *self._completions.values()))

    def entries(self) -> int:
        return sum(len(bucket.entries) for bucket in (*self._prompts.values(), *self._completions.values()))

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


def bucket_indices(entries: list[CacheEntry], device: torch.device) -> Tensor:
    """Bucket indices of entries [n]."""
    return torch.tensor([entry.index for entry in entries], device=device)


def stack_states(states: list[RecurrentState]) -> RecurrentState:
    """Stack the states of several sequences for one call: a copy, so that each can be continued from again."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}
