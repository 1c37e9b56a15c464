"""Attention over a packed row of segments, without padding outside attention and without crossing segments.

Shapes: T tokens of the row, H query heads, K key heads, D head size, n segments of a block, S their longest length,
P the longest parent, m distinct parents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rollmill.data.picture_prompts import Block
from rollmill.models.attention import (
    AttentionOptions,
    AttentionWindow,
    VarlenAttention,
    fits_window,
    varlen_available,
)
from rollmill.models.attention_after_prefixes import Family, attend_after_prefixes
from rollmill.models.recurrent import RecurrentCall, RecurrentState
from rollmill.trainer.attention_blocks import (
    AttentionBlock,
    QueryPiece,
    attend_block,
    attend_piece,
    block_mask,
    needs_no_mask,
    prefers_products,
    split_queries,
)

_PADDING = 0.75  # segments share a block while the shortest is at least this fraction of the longest


@dataclass(frozen=True)
class SegmentLayout:
    """Segments of a flat row, in row order without gaps: first all roots, then all children.

    A child continues its parent, which is a root: its tokens attend to the parent's tokens and to their own
    predecessors.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]  #: index of the parent segment, -1 for roots


class PackedAttention:
    """AttentionContext of one packed row (see `rollmill.models.attention`).

    Args:
        both_ways: by number of a segment, runs of its tokens that attend to each other in both directions.
    """

    def __init__(
        self,
        layout: SegmentLayout,
        device: torch.device,
        both_ways: Mapping[int, Sequence[Block]] | None = None,
    ) -> None:
        self._layout, self._both_ways = layout, {i: runs for i, runs in (both_ways or {}).items() if runs}
        self._device = device
        self._masks: dict[tuple[int, AttentionWindow, torch.dtype], Tensor | None] = {}
        self._sequences: dict[bool, list[_RecurrentBatch]] = {}
        self._varlen: VarlenAttention | None = None

    @cached_property
    def _blocks(self) -> list[AttentionBlock]:
        """The blocks, whose tensors go to the device when a layer needs them: the GPU's own kernel does not."""
        return _blocks(self._layout, self._device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Attention of one layer: query [1, H, T, D], key [1, K, T, D] and value [1, K, T, V] -> [1, T, H, V]."""
        dtype = value.dtype
        q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
        plain = options.softcap is None and options.sinks is None and options.chunk is None and not self._both_ways
        if plain and varlen_available(q, v):
            self._varlen = self._varlen or VarlenAttention(self._layout.lengths, self._layout.parents, self._device)
            return self._varlen.attend(q, k, v, options.scaling, options.sliding_window)[None]
        sizes = [block.tokens for block in self._blocks]
        outputs = []
        for i, (block, q_block, k_block, v_block) in enumerate(
            zip(self._blocks, *(torch.split(x, sizes) for x in (q, k, v)), strict=True)
        ):
            q_pad, k_pad, v_pad = (_pad(x, block) for x in (q_block, k_block, v_block))
            runs = self._runs(i)
            by_products = options.softcap is not None or prefers_products(q_pad, block.parent_longest + block.longest)
            if not by_products and runs == [] and needs_no_mask(q_pad, v_pad, block, options):
                parent_k, parent_v = _distinct_parents(k, block), _distinct_parents(v, block)
                padded = attend_after_prefixes(q_pad, k_pad, v_pad, parent_k, parent_v, block.families, options.scaling)
                outputs.append(_unpad(padded, block))
                continue
            if block.parents is not None:
                k_pad = torch.cat([_parents(k, block), k_pad], dim=1)
                v_pad = torch.cat([_parents(v, block), v_pad], dim=1)
            always = by_products or options.sinks is not None or runs != []
            pieces = split_queries(block, options, q_pad.shape[2], runs, masked=always)
            if pieces is None:
                mask = self._mask(i, options.window, dtype, always=always)
                padded = attend_block(q_pad, k_pad, v_pad, mask, options, by_products)
            else:
                attended = [attend_piece(q_pad, k_pad, v_pad, block, each, options, runs) for each in pieces]
                padded = torch.cat(attended, dim=1)
            outputs.append(_unpad(padded, block))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]

    def recur(self, hidden: Tensor, call: RecurrentCall) -> Tensor:
        """Runs a recurrent layer over every sequence of the row.

        Children continue from their parent's final state. If the layer cannot continue from a state, they read their
        parent's tokens again.
        """
        if call.continues not in self._sequences:
            self._sequences[call.continues] = _sequences(self._layout, self._device, call.continues)
        sequences = self._sequences[call.continues]
        states: list[RecurrentState] = []
        pieces = []
        for each in sequences:
            before = None if each.parent is None else {k: s[each.parent_rows] for k, s in states[each.parent].items()}
            output, after = call(each.places, before)
            states.append(after)
            pieces.append(
                output.flatten(0, 1) if each.real is None else output.flatten(0, 1).index_select(0, each.real)
            )
        order = torch.cat([each.tokens for each in sequences])
        row: Tensor = _ScatterRows.apply(torch.cat(pieces), None, order, hidden.shape[1])  # type: ignore[no-untyped-call]
        return row[None]

    def _runs(self, i: int) -> list[tuple[int, Block]]:
        """Runs of a block's tokens that attend in both directions, each with the number of the sequence."""
        before = sum(block.n for block in self._blocks[:i])
        return [
            (segment - before, run)
            for segment, runs in self._both_ways.items()
            if before <= segment < before + self._blocks[i].n
            for run in runs
        ]

    def _mask(self, i: int, reach: AttentionWindow, dtype: torch.dtype, *, always: bool) -> Tensor | None:
        """Additive mask [n or 1, 1, S, P + S] of a block; None if plain causal attention is correct."""
        block = self._blocks[i]
        if fits_window(block.longest + block.parent_longest, reach):
            reach = None, None
        if block.parents is None and reach == (None, None) and not always:
            return None
        if (i, reach, dtype) not in self._masks:
            whole = QueryPiece(range(block.longest), range(block.parent_longest), range(block.longest))
            self._masks[i, reach, dtype] = block_mask(block, whole, reach, self._device, dtype, self._runs(i))
        return self._masks[i, reach, dtype]


@dataclass(frozen=True)
class _RecurrentBatch:
    """Segments that a recurrent layer processes in one call, all of the same length if others continue from them."""

    places: Tensor  #: [n, S] indices into the row, padded at the end
    tokens: Tensor  #: [tokens] row indices of the segments' own tokens (without re-read parents)
    real: Tensor | None  #: [tokens] positions of `tokens` in the flat [n * S]; None: all
    parent: int | None = None  #: index of the call whose final states these segments continue from
    parent_rows: Tensor | None = None  #: [n] row of that call's states


class _ScatterRows(torch.autograd.Function):
    """Computes out[to] = x[source] in zeros of `size` rows.

    Neither index list has duplicates. None stands for 0, 1, 2, ...
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor | None, to: Tensor | None, size: int) -> Tensor:
        ctx.source, ctx.to, ctx.size = source, to, x.shape[0]
        return _scatter_rows(x, source, to, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _scatter_rows(grads[0], ctx.to, ctx.source, ctx.size), None, None, None


def _scatter_rows(x: Tensor, source: Tensor | None, to: Tensor | None, size: int) -> Tensor:
    rows = x if source is None else x.index_select(0, source)
    return rows if to is None else x.new_zeros(size, *x.shape[1:]).index_copy_(0, to, rows)


def _pad(x: Tensor, block: AttentionBlock) -> Tensor:
    """[tokens, h, D] -> [n, S, h, D]."""
    if block.slots is not None:
        x = _ScatterRows.apply(x, None, block.slots, block.n * block.longest)  # type: ignore[no-untyped-call]
    return x.reshape(block.n, block.longest, *x.shape[1:])


def _unpad(x: Tensor, block: AttentionBlock) -> Tensor:
    """[n, S, h, D] -> [tokens, h, D]."""
    flat = x.reshape(block.n * block.longest, *x.shape[2:])
    if block.slots is None:
        return flat
    output: Tensor = _ScatterRows.apply(flat, block.slots, None, block.tokens)  # type: ignore[no-untyped-call]
    return output


def _distinct_parents(x: Tensor, block: AttentionBlock) -> Tensor:
    """Keys or values of the distinct parents, one after the other: [T, K, D] -> [parents' tokens, K, D]."""
    assert block.parent_rows is not None
    output: Tensor = _ScatterRows.apply(x, block.parent_rows, None, len(block.parent_rows))  # type: ignore[no-untyped-call]
    return output


def _parents(x: Tensor, block: AttentionBlock) -> Tensor:
    """Keys or values of each child's parent: [T, K, D] -> [n, P, K, D]."""
    placed = _ScatterRows.apply(x, block.parent_rows, block.parent_slots, block.m * block.parent_longest)  # type: ignore[no-untyped-call]
    assert block.parents is not None
    distinct: Tensor = placed.reshape(block.m, block.parent_longest, *x.shape[1:])
    return distinct.index_select(0, block.parents) if block.m > 1 else distinct.expand(block.n, -1, -1, -1)


def _sequences(layout: SegmentLayout, device: torch.device, continues: bool) -> list[_RecurrentBatch]:
    """Groups the segments into the calls of a recurrent layer.

    Padding must not enter a state that others continue from, so parents share a call only with parents of the same
    length. Other segments share a call while the shorter ones have at least half the longest length.

    Args:
        continues: children continue from their parent's state; otherwise they start at their parent's first token.
    """
    starts = torch.tensor((0, *layout.lengths)).cumsum(0).tolist()
    read = [torch.arange(start, start + n) for start, n in zip(starts, layout.lengths, strict=False)]
    parents = {parent for parent in layout.parents if parent >= 0} if continues else set()
    calls: dict[tuple[int, int], list[int]] = {}  # number of the parents' call and length -> segments
    where: dict[int, tuple[int, int]] = {}  # parent -> its call and row
    for i, parent in enumerate(layout.parents):
        if parent >= 0 and not continues:
            read[i] = torch.cat([read[parent], read[i]])
        length = len(read[i])
        key = (where[parent][0] if parent in where else -1, length if i in parents else -length.bit_length())
        own = calls.setdefault(key, [])
        if i in parents:
            where[i] = list(calls).index(key), len(own)
        own.append(i)
    found = []
    for (call, _), segments in calls.items():
        places = pad_sequence([read[i] for i in segments], batch_first=True, padding_value=starts[segments[0]])
        own_tokens = torch.zeros_like(places, dtype=torch.bool)
        for row, i in enumerate(segments):
            own_tokens[row, len(read[i]) - layout.lengths[i] : len(read[i])] = True
        rows = torch.tensor([where[layout.parents[i]][1] for i in segments]).to(device) if call >= 0 else None
        found.append(
            _RecurrentBatch(
                places.to(device),
                places[own_tokens].to(device),
                None if bool(own_tokens.all()) else own_tokens.flatten().nonzero()[:, 0].to(device),
                None if rows is None else call,
                rows,
            )
        )
    return found


def _blocks(layout: SegmentLayout, device: torch.device) -> list[AttentionBlock]:
    starts = torch.tensor((0, *layout.lengths)).cumsum(0).tolist()
    blocks, first = [], 0
    for last in range(1, len(layout.lengths) + 1):
        end = last == len(layout.lengths)
        if not end and (layout.parents[last] < 0) == (layout.parents[first] < 0):
            low, high = sorted((layout.lengths[first], layout.lengths[last]))
            if low >= _PADDING * high:
                continue
        blocks.append(_block(layout, starts, range(first, last), device))
        first = last
    return blocks


def _block(layout: SegmentLayout, starts: list[int], segments: range, device: torch.device) -> AttentionBlock:
    lengths = [layout.lengths[i] for i in segments]
    longest = max(lengths)
    slots = (
        None
        if min(lengths) == longest
        else _concatenated_ranges([i * longest for i in range(len(lengths))], lengths, device)
    )
    if layout.parents[segments.start] < 0:
        return AttentionBlock(sum(lengths), len(lengths), longest, slots)
    own_parents = [layout.parents[i] for i in segments]
    distinct = sorted(set(own_parents))
    parent_lengths = [layout.lengths[p] for p in distinct]
    longest_parent = max(parent_lengths)
    return AttentionBlock(
        sum(lengths),
        len(lengths),
        longest,
        slots,
        parents=torch.tensor([distinct.index(p) for p in own_parents], device=device),
        parent_rows=_concatenated_ranges([starts[p] for p in distinct], parent_lengths, device),
        parent_slots=_concatenated_ranges([i * longest_parent for i in range(len(distinct))], parent_lengths, device),
        parent_lengths=torch.tensor([layout.lengths[p] for p in own_parents], device=device),
        m=len(distinct),
        parent_longest=longest_parent,
        families=tuple(
            _family(layout.lengths[p], [i for i, own in enumerate(own_parents) if own == p]) for p in distinct
        ),
    )


def _family(length: int, children: list[int]) -> Family:
    first, last = children[0], children[-1] + 1
    return Family(length, slice(first, last) if len(children) == last - first else children)


def _concatenated_ranges(starts: list[int], lengths: list[int], device: torch.device) -> Tensor:
    """start_0, start_0 + 1, ..., then start_1, ...: `lengths[i]` numbers each."""
    pieces = [torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
    return torch.cat(pieces).to(device)
