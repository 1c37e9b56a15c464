"""Prefix caching: keys and values of finished turns, from which the next turn of the same conversation starts.

A conversation's next prompt begins with the tokens of the last one and of its completion. Only what follows them has to
pass through the model. A kept turn belongs to the weights that computed it, and each conversation takes it once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollmill.engines.base import GenerationRequest
from rollmill.engines.native.kv_cache import CacheEntry, CacheFull, KVCache
from rollmill.engines.native.sequence import SequenceState
from rollmill.models.recurrent import RecurrentState
from rollmill.types import RoutingArray

_Key = tuple[bytes, str]


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """A turn: its prompt and its completion but for the last token, which no pass has seen."""

    length: int
    kept: Any  #: what the cache keeps of it
    size: int  #: bytes of that, and of the states
    states: dict[int, RecurrentState]  #: of recurrent layers, after the last token
    routing: list[RoutingArray]  #: experts of the tokens, if recorded


class PrefixCache:
    """The turns of a cache that were kept last, in at most `capacity` bytes.

    Attributes:
        hits, queries: prompt tokens that were found, and all of prompts that were looked up.
    """

    def __init__(self, cache: KVCache, capacity: int) -> None:
        self._cache, self._capacity = cache, capacity
        self._kept: OrderedDict[_Key, CachedPrefix] = OrderedDict()
        self._uses: dict[_Key, int] = {}  # conversations that may go on from a turn: equal ones share it
        self._lengths: Counter[int] = Counter()
        self.size = self.hits = self.queries = 0

    def keep(self, row: SequenceState) -> None:
        """Keep what the cache holds of a finished completion and its prompt."""
        entry, prompt = row.entry, row.group.request.prompt_ids
        if entry is None or entry.parent is None or entry.parent.length != len(prompt) or not self._capacity:
            return
        own = min(entry.length, len(row.tokens) - 1)
        if entry.states and own != entry.length:
            return  # a recurrent state cannot go back
        key = _key([*prompt, *row.tokens[:own]], row.group.request)
        if key in self._kept:
            self._kept.move_to_end(key)
            self._uses[key] += 1
            return
        states = dict(entry.states or entry.parent.states)
        routing = [*(row.prompt_routing or ()), *row.routing[:own]]
        try:
            kept, size = self._cache.keep(entry, own)
        except CacheFull:
            return
        size += sum(each.nbytes for layer in states.values() for each in layer.values())
        found = CachedPrefix(len(prompt) + own, kept, size, states, routing)
        if found.size > self._capacity or (found.routing and len(found.routing) != found.length):
            self._cache.release(kept)
            return
        self._kept[key], self._uses[key] = found, 1
        self._lengths[found.length] += 1
        self.size += found.size
        while self.size > self._capacity:
            self.drop_oldest()

    def take(self, request: GenerationRequest, entry: CacheEntry) -> CachedPrefix | None:
        """Begin the empty entry of a prompt with the longest kept turn that the prompt goes on from."""
        self.queries += len(request.prompt_ids)
        for length in sorted(self._lengths, reverse=True):
            if length < len(request.prompt_ids):
                key = _key(request.prompt_ids[:length], request)
                if (found := self._kept.get(key)) is not None:
                    self._uses[key] -= 1
                    self._cache.adopt(found.kept, entry, last=not self._uses[key])
                    entry.length, entry.states = found.length, dict(found.states)
                    if not self._uses[key]:
                        self._drop(key)
                    self.hits += length
                    return found
        return None

    def drop_oldest(self) -> bool:
        """Drop the turn that was kept first; False if there is none."""
        if not self._kept:
            return False
        self._drop(next(iter(self._kept)))
        return True

    def clear(self) -> None:
        """Drop all: the weights have changed, or the memory is needed."""
        while self.drop_oldest():
            pass

    def _drop(self, key: _Key) -> None:
        found = self._kept.pop(key)
        self._cache.release(found.kept)
        del self._uses[key]
        self.size -= found.size
        self._lengths[found.length] -= 1
        if not self._lengths[found.length]:
            del self._lengths[found.length]


def _key(tokens: Sequence[int], request: GenerationRequest) -> _Key:
    """Identify tokens with the pictures among them."""
    pictures = "" if request.pictures is None else request.pictures.key_before(len(tokens))
    return np.asarray(tokens, np.int32).tobytes(), pictures
