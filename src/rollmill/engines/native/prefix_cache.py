"""Prefix caching: keys and values of finished turns, from which the next turn of the same conversation starts.

A conversation's next prompt begins with the tokens of the last one and of its completion. Only what follows them has to
pass through the model. A kept turn belongs to the weights that computed it, and each conversation takes it once.

Shapes: n tokens of a turn, K key-value heads, D head size.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollmill.engines.base import GenerationRequest
from rollmill.engines.native.kv_cache import CacheEntry
from rollmill.engines.native.sequence import SequenceState
from rollmill.models.recurrent import RecurrentState
from rollmill.types import RoutingArray

_Key = tuple[bytes, str]


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """A turn: its prompt and its completion but for the last token, which no pass has seen."""

    length: int  #: n
    layers: dict[int, tuple[Tensor, Tensor]]  #: keys and values [K, n, D]
    states: dict[int, RecurrentState]  #: of recurrent layers, after the last token
    routing: list[RoutingArray]  #: experts of the tokens, if recorded

    @property
    def size(self) -> int:
        """Bytes of keys, values and states."""
        states = sum(each.nbytes for layer in self.states.values() for each in layer.values())
        return states + sum(each.nbytes for pair in self.layers.values() for each in pair)

    def copy_into(self, entry: CacheEntry) -> None:
        """Fill an empty entry of a prompt that begins with this turn."""
        for layer, (keys, values) in self.layers.items():
            stored_k, stored_v = entry.bucket.layer(layer, keys[None], values[None])
            stored_k[entry.index, :, : self.length] = keys
            stored_v[entry.index, :, : self.length] = values
        entry.length, entry.states = self.length, dict(self.states)


class PrefixCache:
    """The turns kept last, in at most `capacity` bytes.

    Attributes:
        hits, queries: prompt tokens that were found, and all of prompts that were looked up.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[_Key, CachedPrefix] = OrderedDict()
        self._uses: dict[_Key, int] = {}  # conversations that may go on from a turn: equal ones share it
        self._lengths: Counter[int] = Counter()
        self.size = self.hits = self.queries = 0

    def keep(self, row: SequenceState) -> None:
        """Copy what the cache holds of a finished completion and its prompt."""
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
        spans = [(entry.parent, len(prompt)), (entry, own)]
        found = CachedPrefix(
            len(prompt) + own,
            {layer: _joined(layer, spans) for layer in entry.parent.bucket.keys},
            dict(entry.states or entry.parent.states),
            [*(row.prompt_routing or ()), *row.routing[:own]],
        )
        if found.size > self._capacity or (found.routing and len(found.routing) != found.length):
            return
        self._kept[key], self._uses[key] = found, 1
        self._lengths[found.length] += 1
        self.size += found.size
        while self.size > self._capacity:
            self._drop(next(iter(self._kept)))

    def take(self, request: GenerationRequest) -> CachedPrefix | None:
        """Return the longest kept turn that a prompt begins with and goes on from."""
        self.queries += len(request.prompt_ids)
        for length in sorted(self._lengths, reverse=True):
            if length < len(request.prompt_ids):
                key = _key(request.prompt_ids[:length], request)
                if (found := self._kept.get(key)) is not None:
                    self._uses[key] -= 1
                    if not self._uses[key]:
                        self._drop(key)
                    self.hits += length
                    return found
        return None

    def clear(self) -> None:
        """Drop all: the weights have changed, or the memory is needed."""
        self._kept.clear()
        self._uses.clear()
        self._lengths.clear()
        self.size = 0

    def _drop(self, key: _Key) -> None:
        found = self._kept.pop(key)
        del self._uses[key]
        self.size -= found.size
        self._lengths[found.length] -= 1
        if not self._lengths[found.length]:
            del self._lengths[found.length]


def _joined(layer: int, spans: list[tuple[CacheEntry, int]]) -> tuple[Tensor, Tensor]:
    """Copy keys and values of entries, the first `length` tokens of each, one after the other."""
    stores = [(entry, length, entry.bucket) for entry, length in spans if length]
    keys = [bucket.keys[layer][entry.index, :, :length] for entry, length, bucket in stores]
    values = [bucket.values[layer][entry.index, :, :length] for entry, length, bucket in stores]
    return torch.cat(keys, dim=1), torch.cat(values, dim=1)


def _key(tokens: Sequence[int], request: GenerationRequest) -> _Key:
    """Identify tokens with the pictures among them."""
    pictures = "" if request.pictures is None else request.pictures.key_before(len(tokens))
    return np.asarray(tokens, np.int32).tobytes(), pictures
