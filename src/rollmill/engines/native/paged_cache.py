"""KV cache in pages, for GPUs: the kernel finds a row's pages by a table, so that a row grows without a copy.

An entry holds the numbers of the pages of all its positions, from 0 on: a completion shares the whole pages of its
prompt. The page in which the prompt ends goes to one completion, and the others get copies of it. Page 0 belongs to
nobody: rows that only fill up a batch write there.

Decode steps are made for numbers of rows that are powers of two, in tensors that stay where they are. So one captured
step serves whichever rows come and go.

Shapes: P pages, K key-value heads, D head size, N rows of a step, W pages of the longest row, T tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rollmill.engines.native.decoder import CAPTURE_AFTER, Decoder, Forward, GraphedStep
from rollmill.engines.native.kv_cache import BucketCache, CacheEntry, KVCache
from rollmill.engines.native.prefill import PrefillChunk, PrefillContext
from rollmill.engines.native.row_sampler import next_uniforms
from rollmill.engines.native.sequence import SequenceState
from rollmill.models.attention import (
    PAGE,
    AttentionOptions,
    CachedLayer,
    PagedRows,
    VarlenAttention,
    base_network,
    find_cached_layers,
    pages_available,
)
from rollmill.models.recurrent import RecurrentCall, recurrent_layers
from rollmill.models.storage import zeros_for_stored
from rollmill.models.transfers import StaticTensors, to_device
from rollmill.models.vision import picture_processor, text_model

FIRST_PAGES = 64  #: reserved at once; more are reserved by doubling
IntArray = npt.NDArray[np.signedinteger[Any]]
LEAST_ROWS = 8  #: of a step
MOST_PADDING = 4  #: a captured step for so many times the rows is better than one that is not captured


@dataclass(slots=True, eq=False, kw_only=True)
class PagedEntry(CacheEntry):
    """The pages of an entry and of its ancestors."""

    pages: list[int] = field(default_factory=list)
    last_page_shared: bool = False  #: a completion writes into the page in which this prompt ends


def page_count(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE)


class PagedCache(KVCache):
    """Pages of all layers; a page has the same number in each.

    Attributes:
        keys, values: of each layer, [P, PAGE, K, D].
        moves: how often these have moved.
    """

    def __init__(
        self, layers: Sequence[CachedLayer], dtype: torch.dtype, device: torch.device, limit: int | None = None
    ) -> None:
        super().__init__(limit)
        self._dtype, self._device = dtype, device
        self._shape = PAGE, layers[0].kv_heads, layers[0].key_size
        self._layers = len(layers)
        self.page_bytes = 2 * len(layers) * int(np.prod(self._shape)) * dtype.itemsize
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.moves = 0
        self._reserved = FIRST_PAGES  # pages, once they are needed
        self._entries = 0
        self.clear()

    def prompt(self, length: int) -> PagedEntry:
        pages = self._new_pages(page_count(length))
        self._entries += 1
        return PagedEntry(pages=pages)

    def completions(self, parents: Sequence[CacheEntry]) -> list[PagedEntry]:
        entries = [PagedEntry(parent=parent) for parent in parents]
        copied = sum(self._copies(cast("Sequence[PagedEntry]", parents)))
        new = iter(self._new_pages(copied))
        sources, targets = [], []
        for entry in entries:
            parent = cast(PagedEntry, entry.parent)
            whole, rest = divmod(parent.length, PAGE)
            entry.pages = parent.pages[:whole]
            if rest and not parent.last_page_shared:
                parent.last_page_shared = True
                entry.pages.append(parent.pages[whole])
            for page in entry.pages:
                self._uses[page] += 1
            if rest and len(entry.pages) == whole:
                entry.pages.append(next(new))
                sources.append(parent.pages[whole])
                targets.append(entry.pages[whole])
        self._copy(sources, targets)
        self._entries += len(entries)
        return entries

    def reserve(self, entries: Sequence[CacheEntry], tokens: Sequence[int]) -> None:
        growing = []
        for entry, more in zip(cast("Sequence[PagedEntry]", entries), tokens, strict=True):
            lacking = page_count(entry.offset + entry.length + more) - len(entry.pages)
            if lacking > 0:
                growing.append((entry, lacking))
        if growing:
            new = self._new_pages(sum(lacking for _, lacking in growing))
            for entry, lacking in growing:
                entry.pages += new[:lacking]
                del new[:lacking]

    def remove(self, entries: Iterable[CacheEntry]) -> None:
        for entry in cast("Iterable[PagedEntry]", entries):
            self.release(entry.pages)
            self._entries -= 1

    def clear(self) -> None:
        self._uses = [1] + [0] * (len(self.keys[0]) - 1 if self.keys else 0)  # page 0 is always in use
        self._free = list(range(len(self._uses) - 1, 0, -1))
        self._entries = self.used = 0

    def destroy(self) -> None:
        self._reserved = max(self._reserved, len(self._uses))
        self.keys, self.values = [], []
        self.clear()

    def entries(self) -> int:
        return self._entries

    def bytes(self) -> int:
        return len(self.keys[0]) * self.page_bytes if self.keys else 0

    def keep(self, entry: CacheEntry, length: int) -> tuple[list[int], int]:
        pages = cast(PagedEntry, entry).pages[: page_count(entry.offset + length)]
        for page in pages:
            self._uses[page] += 1
        return pages, len(pages) * self.page_bytes

    def adopt(self, kept: list[int], entry: CacheEntry, *, last: bool) -> None:
        """Share the kept pages. Tokens are written behind them, into a page that only one entry may write to."""
        into = cast(PagedEntry, entry)
        shared = kept if last else kept[:-1]
        for page in shared:
            self._uses[page] += 1
        self.release(into.pages[: len(shared)])
        into.pages[: len(shared)] = shared
        if not last:
            self._copy(kept[-1:], into.pages[len(shared) : len(kept)])

    def release(self, kept: list[int]) -> None:
        for page in kept:
            self._uses[page] -= 1
            if not self._uses[page]:
                self._free.append(page)
                self.used -= self.page_bytes

    def store(self, layer: int, places_T: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [1, K, T, D] to places of a layer (page x PAGE + position in it); all of its pages."""
        for pages, new in ((self.keys[layer], key), (self.values[layer], value)):
            pages.view(-1, *pages.shape[2:]).index_copy_(0, places_T, new[0].transpose(0, 1))
        return self.keys[layer], self.values[layer]

    def _sizes(self, parents: Sequence[CacheEntry], tokens: Sequence[int]) -> Iterator[int]:
        own = cast("Sequence[PagedEntry]", parents)
        for parent, count, copied in zip(own, tokens, self._copies(own), strict=True):
            yield (page_count(parent.length + count) - page_count(parent.length) + copied) * self.page_bytes

    @staticmethod
    def _copies(parents: Sequence[PagedEntry]) -> Iterator[bool]:
        """For new completions, whether each one needs a copy of the page in which its prompt ends."""
        shared = {parent for parent in parents if parent.last_page_shared}
        for parent in parents:
            yield parent in shared and parent.length % PAGE > 0
            shared.add(parent)

    def _new_pages(self, count: int) -> list[int]:
        self._take(count * self.page_bytes)
        if count > len(self._free):
            self._grow(len(self._uses) + count - len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._uses[page] = 1
        return pages

    def _grow(self, least: int) -> None:
        """Have memory for `least` pages or more, layer by layer, so that few bytes are there twice."""
        before = len(self._uses)
        pages = max(least, 2 * before if self.keys else self._reserved)
        if self.limit is not None:
            pages = max(least, min(pages, self.limit // self.page_bytes + 1))
        for store in (self.keys, self.values):
            store += [torch.empty(0, *self._shape, dtype=self._dtype, device=self._device)] * (
                self._layers - len(store)
            )
            for layer, old in enumerate(store):
                store[layer] = old.new_empty(pages, *self._shape)
                store[layer][: len(old)] = old
        self._uses += [0] * (pages - before)
        self._free = [*range(pages - 1, before - 1, -1), *self._free]
        self.moves += 1

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy pages of all layers."""
        if sources:
            from_, to = to_device([np.array(sources), np.array(targets)], self._device)
            for store in (self.keys, self.values):
                for pages in store:
                    pages.index_copy_(0, to, pages.index_select(0, from_))


class PagedPrefillContext(PrefillContext[PagedEntry]):
    """Attention context of a pass that appends tokens to entries in pages."""

    def __init__(self, cache: PagedCache, segments: list[PrefillChunk[PagedEntry]]) -> None:
        super().__init__(segments)
        self._cache = cache
        device = cache.keys[0].device
        starts = [segment.entry.offset + segment.start for segment in segments]
        lengths = [len(segment.tokens) for segment in segments]
        pages = [segment.entry.pages for segment in segments]
        places = [
            np.array(own)[at // PAGE] * PAGE + at % PAGE
            for own, at in zip(pages, (np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)), strict=True)
        ]
        [self._places_T] = to_device([np.concatenate(places)], device)
        self._new = VarlenAttention(lengths, [-1] * len(lengths), device) if not any(starts) else None
        if self._new is None:
            table = np.zeros((len(pages), max(map(len, pages))), np.int32)
            for row, own in zip(table, pages, strict=True):
                row[: len(own)] = own
            used = np.array(starts) + np.array(lengths)
            self._rows = PagedRows.of(table, used.astype(np.int32), np.array(lengths, np.int32), device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        layer, self._layers = self._layers, self._layers + 1
        keys, values = self._cache.store(layer, self._places_T, key, value)
        q = query[0].transpose(0, 1)
        if self._new is not None:
            k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
            return self._new.attend(q, k, v, options.scaling, options.sliding_window)[None]
        return self._rows.attend(q, keys, values, options.scaling, options.sliding_window)[None]


class PagedDecodeContext:
    """Attention context of decode steps of N rows. Its tensors stay where they are; the host writes them before a step.

    Rows beyond those of the batch write to page 0, and attend to their own token alone.
    """

    def __init__(self, cache: PagedCache, rows: int, width: int, device: torch.device) -> None:
        self._cache, self._layers = cache, 0
        numbers, table = np.zeros(rows, np.int64), np.zeros((rows, width), np.int32)
        columns: list[npt.NDArray[Any]] = [
            numbers[None],
            numbers,
            numbers,
            np.zeros(rows),
            np.ones(rows, np.int32),
            table,
        ]
        self._inputs = StaticTensors(columns, device)
        self.tokens_1N, self.positions_B, self._places_N, self.uniform_N, used_N, table_NW = self._inputs.tensors
        starts = np.arange(rows + 1, dtype=np.int32)
        self._rows = PagedRows(table_NW, used_N, 1, *to_device([starts, starts * (width * PAGE)], device))
        self._count, self._width = rows, width
        self._written = -1  # version of the table

    def write(
        self, tokens: IntArray, positions: IntArray, uniforms: npt.NDArray[np.float64], table: IntArray, version: int
    ) -> None:
        """Write a step's inputs, one for each row of the batch; the table only in a new version."""
        count = len(tokens)
        column = np.arange(count)
        places = table[column, positions // PAGE] * PAGE + positions % PAGE
        whole = np.zeros((3, self._count), np.int64)
        whole[:, :count] = tokens, positions, places
        drawn = np.zeros(self._count)
        drawn[:count] = uniforms
        columns = [whole[:1], whole[1], whole[2], drawn, (whole[1] + 1).astype(np.int32)]
        if version != self._written:
            self._written = version
            columns.append(np.zeros((self._count, self._width), np.int32))
            columns[-1][:count] = table
        self._inputs.write(columns)

    def begin(self) -> None:
        """Start a forward pass: layers are numbered in the order of their calls."""
        self._layers = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        layer, self._layers = self._layers, self._layers + 1
        keys, values = self._cache.store(layer, self._places_N, key, value)
        return self._rows.attend(query[0].transpose(0, 1), keys, values, options.scaling, options.sliding_window)[None]

    def recur(self, hidden: Tensor, call: RecurrentCall) -> Tensor:
        raise AssertionError("models with recurrent layers have a cache of buckets")


class PagedDecoder(Decoder):
    """Decode steps over pages. One captured step serves all rows of its number, and fewer.

    Args:
        context: tokens of the longest row.
    """

    def __init__(
        self, forward: Forward, model: str, cache: PagedCache, device: torch.device, *, captures: bool, context: int
    ) -> None:
        super().__init__(forward, model, device, captures)
        self._cache, self._width = cache, page_count(context)
        self._contexts: dict[int, PagedDecodeContext] = {}  # by number of rows
        self._graphs: dict[int, GraphedStep] = {}
        self._steps: Counter[int] = Counter()
        self._moves = cache.moves
        self._version = 0  # of the table
        self.invalidate()

    def invalidate(self) -> None:
        self._positions: IntArray | None = None

    def lengths_changed(self) -> None:
        self.invalidate()

    def drop_captured(self) -> None:
        self._graphs.clear()

    def step(self, rows: list[SequenceState]) -> tuple[Tensor, Tensor | None, Tensor]:
        entries = [cast(PagedEntry, row.entry) for row in rows]
        if self._cache.limit is None:  # else there was asked for room before
            self._cache.reserve(entries, [1] * len(rows))
        if self._moves != self._cache.moves:
            self._moves = self._cache.moves
            self.drop_captured()
        positions = self._read(entries)
        least = max(LEAST_ROWS, 1 << (len(rows) - 1).bit_length())
        larger = [least << more for more in range(MOST_PADDING.bit_length())]
        count = next((each for each in larger if each in self._graphs), least)
        if count not in self._contexts:
            self._contexts[count] = PagedDecodeContext(self._cache, count, self._width, self._device)
        context = self._contexts[count]
        tokens = np.fromiter((row.tokens[-1] for row in rows), np.int64, len(rows))
        context.write(tokens, positions, next_uniforms(rows), self._table, self._version)
        if self.captures and count not in self._graphs and self._steps[count] >= CAPTURE_AFTER:
            graph = self.capture(context, next(iter(self._graphs.values()), None))
            if graph is not None:
                self._graphs[count] = graph
        self._steps[count] += 1
        graph = self._graphs.get(count)
        logits, routing = self.run(context, graph, context.tokens_1N, context.positions_B[None])
        self._positions = positions + 1
        return logits[: len(rows)], None if routing is None else routing[: len(rows)], context.uniform_N[: len(rows)]

    def _read(self, entries: list[PagedEntry]) -> IntArray:
        """Positions of the next tokens; brings the table up to date."""
        held = [len(entry.pages) for entry in entries]
        if self._positions is None:
            self._positions = np.array([entry.offset + entry.length for entry in entries])
            self._table = np.zeros((len(entries), self._width), np.int32)
            self._held = [0] * len(entries)
        if held != self._held:
            for row, entry, before, now in zip(self._table, entries, self._held, held, strict=True):
                row[before:now] = entry.pages[before:now]
            self._held = held
            self._version += 1
        return self._positions


def build_cache(model: nn.Module, dtype: torch.dtype, cache_gb: float | None, device: torch.device) -> KVCache:
    """Build the cache of a model that computes in `dtype`: in pages if the GPU's kernel can read them, else in buckets.

    Args:
        model: may be on another device, or in files, as the weights of a sharded trainer are at first.
        cache_gb: its limit in GiB; None: it has none.
    """
    limit = None if cache_gb is None else int(cache_gb * 2**30)
    if limit is None and device.type != "cuda":
        return BucketCache()
    network = text_model(model)
    with zeros_for_stored(model):
        layers = find_cached_layers(base_network(model) if network is model else network)
    plain = not recurrent_layers(model) and picture_processor(model) is None
    if plain and pages_available(layers, dtype, device):
        return PagedCache(layers, dtype, device, limit)
    return BucketCache(limit, sum(layer.numbers for layer in layers) * dtype.itemsize)
