"""Attention of a prefill pass, which extends cache entries by several tokens: whole or chunked prompts, recomputation.

Shapes: T tokens of the flat row, H query heads, K key-value heads, D head size, S segments, L longest segment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from rollmill.data.picture_prompts import Block, PicturePrompt
from rollmill.engines.native.kv_cache import BucketEntry, CacheEntry, stack_states
from rollmill.models.attention import (
    AttentionOptions,
    VarlenAttention,
    append_sinks,
    fits_window,
    varlen_available,
    window_mask,
)
from rollmill.models.attention_after_prefixes import Family, attend_after_prefixes, handles
from rollmill.models.recurrent import RecurrentCall
from rollmill.models.vision import PictureSpan

E = TypeVar("E", bound=CacheEntry)
MASK_ELEMENTS = 1 << 23  #: of a mask, beyond which queries are processed in pieces
LEAST_PIECE = 64  #: queries
LONG = 256  #: queries of one segment, from which `attend_after_prefixes` is faster than one pass with a mask


@dataclass(slots=True)
class PrefillChunk(Generic[E]):
    """Tokens to append to `entry` from its position `start` on (relative to the entry)."""

    entry: E
    start: int
    tokens: list[int]
    pictures: PicturePrompt | None = None  #: of the prompt that these tokens belong to or continue

    @property
    def blocks(self) -> list[Block]:
        """Runs of these tokens that attend in both directions, relative to the first one."""
        if self.pictures is None:
            return []
        return self.pictures.blocks_within(self.entry.offset + self.start, len(self.tokens))

    @property
    def fresh(self) -> bool:
        """True if nothing comes before these tokens."""
        return self.start == 0 and self.entry.parent is None


class _Batch:
    """Segments whose entries are in one bucket, so that they attend in one call.

    Args:
        members: their numbers among the segments of the pass.
    """

    def __init__(self, members: list[int], segments: list[PrefillChunk[BucketEntry]]) -> None:
        self.members, self._bucket = members, segments[0].entry.bucket
        self._lengths = [len(segment.tokens) for segment in segments]
        self._seen = max(segment.start + len(segment.tokens) for segment in segments)
        self._indices = [segment.entry.index for segment in segments]
        self._starts = [segment.start for segment in segments]
        self._mask: Tensor | None = None  # bool [S, 1, L, seen]

    @property
    def scores(self) -> int:
        """Pairs of a query and a key, each of which takes memory in the mask."""
        return len(self.members) * max(self._lengths) * self._seen

    @property
    def is_long_chunk(self) -> bool:
        """True for a single long segment after tokens of its own entry."""
        return len(self.members) == 1 and self._starts[0] > 0 and self._lengths[0] >= LONG

    def attend(
        self, layer: int, queries: Sequence[Tensor], key: Tensor, value: Tensor, options: AttentionOptions
    ) -> list[Tensor]:
        """Attention of each segment, [1, n, H, V]; `queries` are those of all segments of the pass, [1, H, n, D]."""
        longest = max(self._lengths)
        if self._mask is None:
            device = key.device
            starts = torch.tensor(self._starts, device=device)[:, None, None]
            at_query = starts + torch.arange(longest, device=device)[None, :, None]
            self._mask = (torch.arange(self._seen, device=device) <= at_query)[:, None]
        own = [queries[i][0] for i in self.members]
        query = torch.stack([pad(q, (0, 0, 0, longest - q.shape[1])) for q in own])
        stored_k, stored_v = self._bucket.layer(layer, key, value)
        output = scaled_dot_product_attention(
            query,
            stored_k[self._indices, :, : self._seen],
            stored_v[self._indices, :, : self._seen],
            attn_mask=self._mask,
            scale=options.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)
        return [output[row : row + 1, :n] for row, n in enumerate(self._lengths)]


class PrefillContext(ABC, Generic[E]):
    """Attention context of one forward pass over concatenated segments."""

    def __init__(self, segments: list[PrefillChunk[E]]) -> None:
        self.segments = segments
        self._layers = 0  # called so far

    def begin(self) -> None:
        """Start a forward pass: layers are numbered in the order of their calls."""
        self._layers = 0

    def positions(self) -> list[int]:
        """Position of each token of the flat row."""
        return [
            segment.entry.offset + segment.start + i for segment in self.segments for i in range(len(segment.tokens))
        ]

    def picture_spans(self) -> list[PictureSpan]:
        """The segments whose prompts have pictures."""
        spans, start = [], 0
        for segment in self.segments:
            if segment.pictures is not None:
                first = segment.entry.offset + segment.start
                spans.append(PictureSpan(segment.pictures, start, first, len(segment.tokens)))
            start += len(segment.tokens)
        return spans

    def last_rows(self) -> list[int]:
        """Row of each segment's last token."""
        rows, end = [], 0
        for segment in self.segments:
            end += len(segment.tokens)
            rows.append(end - 1)
        return rows

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Store the next layer's keys and values; attend to them and to the entries' earlier ones."""

    def recur(self, hidden: Tensor, call: RecurrentCall) -> Tensor:
        """Segments of equal length share a call; entries keep the states."""
        layer, self._layers = self._layers, self._layers + 1
        calls: dict[tuple[int, bool], list[tuple[int, PrefillChunk[E]]]] = {}
        start = 0
        for segment in self.segments:
            calls.setdefault((len(segment.tokens), segment.fresh), []).append((start, segment))
            start += len(segment.tokens)
        row = torch.empty_like(hidden[0])
        for (length, fresh), members in calls.items():
            firsts = torch.tensor([first for first, _ in members], device=hidden.device)
            places = firsts[:, None] + torch.arange(length, device=hidden.device)
            before = None if fresh else stack_states([segment.entry.states[layer] for _, segment in members])
            output, after = call(places, before)
            row[places.flatten()] = output.flatten(0, 1)
            for i, (_, segment) in enumerate(members):
                segment.entry.states[layer] = {name: state[i] for name, state in after.items()}
        return row[None]


class BucketPrefillContext(PrefillContext[BucketEntry]):
    """Attention context of a pass that appends tokens to entries of buckets."""

    def __init__(self, segments: list[PrefillChunk[BucketEntry]]) -> None:
        super().__init__(segments)
        self._varlen: VarlenAttention | None = None
        self._by_bucket: list[_Batch] | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        layer, self._layers = self._layers, self._layers + 1
        lengths = [len(segment.tokens) for segment in self.segments]
        keys, values, queries = (x.split(lengths, dim=2) for x in (key, value, query))
        for segment, k, v in zip(self.segments, keys, values, strict=True):
            store_k, store_v = segment.entry.bucket.layer(layer, k, v)
            span = slice(segment.start, segment.start + len(segment.tokens))
            store_k[segment.entry.index, :, span] = k[0]
            store_v[segment.entry.index, :, span] = v[0]
        plain = options.softcap is None and options.sinks is None and fits_window(self._longest, options.window)
        plain = plain and not any(segment.blocks for segment in self.segments)
        if plain and all(segment.fresh for segment in self.segments):
            if varlen_available(query, value):
                self._varlen = self._varlen or VarlenAttention(lengths, [-1] * len(lengths), value.device)
                q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
                return self._varlen.attend(q, k, v, options.scaling, None)[None]
            return _fresh(query, key, value, lengths, options.scaling)
        parts: list[Tensor | None] = [None] * len(self.segments)
        for batch in self._batches() if plain else ():
            for i, part in zip(batch.members, batch.attend(layer, queries, key, value, options), strict=True):
                parts[i] = part
        for i, (segment, q, k, v) in enumerate(zip(self.segments, queries, keys, values, strict=True)):
            if parts[i] is None:
                parts[i] = self._one(segment, layer, q, k, v, options)
        return torch.cat([part for part in parts if part is not None], dim=1)

    @property
    def _longest(self) -> int:
        """Largest number of tokens that a segment's last token attends to."""
        return max(segment.entry.offset + segment.start + len(segment.tokens) for segment in self.segments)

    def _batches(self) -> list[_Batch]:
        """Segments of entries without ancestors, by bucket: new prompts, and those that begin with cached tokens.

        A long chunk that continues its prompt alone is left out: it needs no mask.
        """
        if self._by_bucket is None:
            found: dict[tuple[int, bool], list[int]] = {}
            for i, segment in enumerate(self.segments):
                if segment.entry.parent is None:
                    found.setdefault((id(segment.entry.bucket), segment.start == 0), []).append(i)
            batches = [_Batch(members, [self.segments[i] for i in members]) for members in found.values()]
            self._by_bucket = [batch for batch in batches if batch.scores <= MASK_ELEMENTS and not batch.is_long_chunk]
        return self._by_bucket

    @staticmethod
    def _one(
        segment: PrefillChunk[BucketEntry],
        layer: int,
        query: Tensor,
        like_k: Tensor,
        like_v: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Attention of one segment to its entry and its ancestors; [1, n, H, V]."""
        n, end = len(segment.tokens), segment.start + len(segment.tokens)
        spans = [(segment.entry, end)]
        while (parent := spans[0][0].parent) is not None:
            spans.insert(0, (cast(BucketEntry, parent), parent.length))
        stores = [(entry, length, entry.bucket.layer(layer, like_k, like_v)) for entry, length in spans]
        key = torch.cat([k[entry.index, :, :length] for entry, length, (k, _) in stores], dim=1)[None]
        value = torch.cat([v[entry.index, :, :length] for entry, length, (_, v) in stores], dim=1)[None]
        before, blocks = key.shape[2] - n, segment.blocks
        if before and n >= LONG and not blocks and handles(query, value, before + n, options):
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            seen = k[0, :before], v[0, :before], (Family(before, slice(0, 1)),)
            return attend_after_prefixes(q, k[:, before:], v[:, before:], *seen, options.scaling)
        size = max(MASK_ELEMENTS // key.shape[2], LEAST_PIECE)
        parts = []
        for first in range(0, n, size):  # a mask of all queries would take gigabytes for a long prompt
            last = min(first + size, n)
            begin = min([_first_seen(before + first, options), *(before + a for a, b, _ in blocks if b > first)])
            end = before + max([last, *(b for a, b, _ in blocks if a < last)])
            at_query = torch.arange(before + first, before + last, device=key.device)[:, None]
            at_key = torch.arange(begin, end, device=key.device)[None]
            unseen = at_key > at_query
            _show_blocks(unseen, blocks, first, before - begin)
            hidden = window_mask(at_query, at_key, options.window)
            if hidden is not None:
                unseen |= hidden
                _show_blocks(unseen, [block for block in blocks if not block.windowed], first, before - begin)
            own = query[:, :, first:last], key[:, :, begin:end], value[:, :, begin:end]
            parts.append(masked_attention(*own, unseen, options))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _first_seen(query: int, options: AttentionOptions) -> int:
    """Index of the first key that a query sees through the window and the chunk."""
    window, chunk = options.window
    in_window = 0 if window is None else max(query - window + 1, 0)
    return in_window if chunk is None else max(in_window, query // chunk * chunk)


def _show_blocks(unseen: Tensor, blocks: list[Block], first: int, column: int) -> None:
    """Shows the tokens of a block to each other in a mask, whose rows begin with token `first` and in which token 0 has
    this column."""
    for a, b, _ in blocks:
        unseen[max(a - first, 0) : max(b - first, 0), max(column + a, 0) : max(column + b, 0)] = False


def _fresh(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float) -> Tensor:
    """Causal attention of whole prompts, right-padded where their lengths differ; [1, T, H, D]."""
    longest, count = max(lengths), len(lengths)
    even = min(lengths) == longest

    def rows(x: Tensor) -> Tensor:  # [1, H, T, D] -> [S, H, L, D]
        flat = x[0].transpose(0, 1)
        if even:
            return flat.reshape(count, longest, *flat.shape[1:]).transpose(1, 2)
        padded = [pad(part, (0, 0, 0, 0, 0, longest - part.shape[0])) for part in flat.split(lengths)]
        return torch.stack(padded).transpose(1, 2)

    output = scaled_dot_product_attention(
        rows(query), rows(key), rows(value), is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    ).transpose(1, 2)
    if even:
        return output.reshape(1, count * longest, *output.shape[2:])
    return torch.cat([output[i, :n] for i, n in enumerate(lengths)])[None]


def masked_attention(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of queries [1, H, n, D] that do not see the keys marked in hidden [n, total]; [1, n, H, V]."""
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)[
        None, None
    ]
    if options.sinks is not None:
        query, key, value, mask = append_sinks(query, key, value, mask, options)
    if options.softcap is None:
        gqa = query.shape[1] != key.shape[1]
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=options.scaling, enable_gqa=gqa)
        return output.transpose(1, 2)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = torch.tanh((query @ key.transpose(2, 3)) * (options.scaling / options.softcap)) * options.softcap
    probs = torch.softmax(scores + mask, dim=-1, dtype=torch.float32)
    return (probs.to(value.dtype) @ value).transpose(1, 2)
