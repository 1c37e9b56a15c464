"""Attention over a packed row of segments, without padding outside attention and without crossing segments.

Shapes: T tokens of the row, H query heads, K key heads, D head size, n segments of a block, S their longest length,
P the longest parent, m distinct parents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from rollmill.models.attention import (
    AttentionOptions,
    AttentionWindow,
    VarlenAttention,
    append_sinks,
    fits_window,
    varlen_available,
    window_mask,
)
from rollmill.models.picture_prompts import Block
from rollmill.models.recurrent import RecurrentCall, RecurrentState

_SHORT = 6_000_000  # scores of a block (24 MB in fp32); larger blocks would allocate new memory at every call
_PADDING = 0.75  # segments share a block while the shortest is at least this fraction of the longest


@dataclass(frozen=True)
class SegmentLayout:
    """Segments of a flat row, in row order without gaps: first all roots, then all children.

    A child continues its parent, which is a root: its tokens attend to the parent's tokens and to their own
    predecessors.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]  #: index of the parent segment, -1 for roots


@dataclass(frozen=True)
class _Block:
    """Neighbouring segments of similar length, computed in one attention call."""

    tokens: int
    n: int
    longest: int
    slots: Tensor | None  #: [tokens] index of each token in [n * longest]; None: all lengths equal
    parents: Tensor | None = None  #: [n] index into the block's m distinct parents; None for roots
    parent_rows: Tensor | None = None  #: [parent tokens] index of the parents' tokens in the row
    parent_slots: Tensor | None = None  #: [parent tokens] their index in [m * P]
    parent_lengths: Tensor | None = None  #: [n]
    m: int = 0
    parent_longest: int = 0


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
        self._blocks = _blocks(layout, device)
        self._device = device
        self._masks: dict[tuple[int, AttentionWindow, torch.dtype], Tensor | None] = {}
        self._sequences: dict[bool, list[_RecurrentBatch]] = {}
        self._varlen = VarlenAttention(layout.lengths, layout.parents, device) if varlen_available(device) else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Attention of one layer: query [1, H, T, D], key [1, K, T, D] and value [1, K, T, V] -> [1, T, H, V]."""
        dtype = value.dtype
        q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
        plain = options.softcap is None and options.sinks is None and options.chunk is None and not self._both_ways
        if self._varlen is not None and plain and dtype in (torch.bfloat16, torch.float16):
            return self._varlen.attend(q, k, v, options.scaling, options.sliding_window)[None]
        sizes = [block.tokens for block in self._blocks]
        outputs = []
        for i, (block, q_block, k_block, v_block) in enumerate(
            zip(self._blocks, *(torch.split(x, sizes) for x in (q, k, v)), strict=True)
        ):
            q_pad, k_pad, v_pad = (_pad(x, block) for x in (q_block, k_block, v_block))
            if block.parents is not None:
                k_pad = torch.cat([_parents(k, block), k_pad], dim=1)
                v_pad = torch.cat([_parents(v, block), v_pad], dim=1)
            by_products = options.softcap is not None or _short(q_pad, k_pad)
            always = by_products or options.sinks is not None or self._runs(i) != []
            mask = self._mask(i, options.window, dtype, always=always)
            if options.sinks is not None:
                assert mask is not None
                heads_first = [x.transpose(1, 2) for x in (q_pad, k_pad, v_pad)]
                *heads_first, mask = append_sinks(heads_first[0], heads_first[1], heads_first[2], mask, options)
                q_pad, k_pad, v_pad = (x.transpose(1, 2) for x in heads_first)
            if by_products:
                assert mask is not None
                padded = _unfused_attention(q_pad, k_pad, v_pad, mask, options.scaling, options.softcap)
            else:
                padded = _fused_attention(q_pad, k_pad, v_pad, mask, options.scaling)
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
            self._masks[i, reach, dtype] = _block_mask(block, reach, self._device, dtype, self._runs(i))
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


def _pad(x: Tensor, block: _Block) -> Tensor:
    """[tokens, h, D] -> [n, S, h, D]."""
    if block.slots is not None:
        x = _ScatterRows.apply(x, None, block.slots, block.n * block.longest)  # type: ignore[no-untyped-call]
    return x.reshape(block.n, block.longest, *x.shape[1:])


def _unpad(x: Tensor, block: _Block) -> Tensor:
    """[n, S, h, D] -> [tokens, h, D]."""
    flat = x.reshape(block.n * block.longest, *x.shape[2:])
    if block.slots is None:
        return flat
    output: Tensor = _ScatterRows.apply(flat, block.slots, None, block.tokens)  # type: ignore[no-untyped-call]
    return output


def _parents(x: Tensor, block: _Block) -> Tensor:
    """Keys or values of each child's parent: [T, K, D] -> [n, P, K, D]."""
    placed = _ScatterRows.apply(x, block.parent_rows, block.parent_slots, block.m * block.parent_longest)  # type: ignore[no-untyped-call]
    assert block.parents is not None
    distinct: Tensor = placed.reshape(block.m, block.parent_longest, *x.shape[1:])
    return distinct.index_select(0, block.parents) if block.m > 1 else distinct.expand(block.n, -1, -1, -1)


def _short(q: Tensor, k: Tensor) -> bool:
    """True if unfused matrix products beat the fused kernel, whose backward pass is slow in half precision on a CPU."""
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1]
    return q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16) and scores <= _SHORT


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """[n, S, H, D], [n, L, K, D] -> [n, S, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    output = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
    )
    return output.transpose(1, 2)


def _unfused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """[n, S, H, D], [n, L, K, D] -> [n, S, H, D]; sums over scores use fp32."""
    n, longest, heads, _ = q.shape
    kv_heads, seen = k.shape[2], k.shape[1]
    queries = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).reshape(n * kv_heads, -1, q.shape[3])
    keys, values = (x.transpose(1, 2).reshape(n * kv_heads, seen, -1) for x in (k, v))
    scores = torch.bmm(queries, keys.transpose(1, 2)).view(n, kv_heads, -1, longest, seen)
    scores = scores.double() if scores.dtype == torch.float64 else scores.float()
    if softcap is not None:
        scores, scaling = torch.tanh(scores * (scaling / softcap)), softcap
    weights = torch.softmax(torch.add(mask[:, :, None], scores, alpha=scaling), dim=-1).to(v.dtype)
    output = torch.bmm(weights.view(n * kv_heads, -1, seen), values).view(n, kv_heads, -1, longest, v.shape[3])
    return output.permute(0, 3, 1, 2, 4).reshape(n, longest, heads, -1)


def _block_mask(
    block: _Block, reach: AttentionWindow, device: torch.device, dtype: torch.dtype, runs: list[tuple[int, Block]]
) -> Tensor:
    own = torch.arange(block.longest, device=device)
    if block.parents is None:
        query_depth, key_depth = own[None], own[None]
        real = torch.ones(1, block.longest, dtype=torch.bool, device=device)
    else:
        assert block.parent_lengths is not None
        lengths = block.parent_lengths[:, None]
        lengths = lengths[:1] if bool((lengths == lengths[0]).all()) else lengths
        before = torch.arange(block.parent_longest, device=device)[None]
        query_depth = lengths + own
        key_depth = torch.cat([before.expand(len(lengths), -1), query_depth], dim=1)
        real = torch.cat([before < lengths, torch.ones_like(query_depth, dtype=torch.bool)], dim=1)
    at_query, at_key = query_depth[:, :, None], key_depth[:, None, :]
    seen = (at_key <= at_query) & real[:, None, :]
    if runs:
        seen = seen.repeat(block.n // seen.shape[0], 1, 1)
        for sequence, (a, b, _) in runs:
            seen[sequence, a:b, block.parent_longest + a : block.parent_longest + b] = True
    hidden = window_mask(at_query, at_key, reach)
    if hidden is not None:
        seen &= ~hidden
        for sequence, (a, b, windowed) in runs:
            if not windowed:
                seen[sequence, a:b, block.parent_longest + a : block.parent_longest + b] = True
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)[:, None]


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


def _blocks(layout: SegmentLayout, device: torch.device) -> list[_Block]:
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


def _block(layout: SegmentLayout, starts: list[int], segments: range, device: torch.device) -> _Block:
    lengths = [layout.lengths[i] for i in segments]
    longest = max(lengths)
    slots = (
        None
        if min(lengths) == longest
        else _concatenated_ranges([i * longest for i in range(len(lengths))], lengths, device)
    )
    if layout.parents[segments.start] < 0:
        return _Block(sum(lengths), len(lengths), longest, slots)
    own_parents = [layout.parents[i] for i in segments]
    distinct = sorted(set(own_parents))
    parent_lengths = [layout.lengths[p] for p in distinct]
    longest_parent = max(parent_lengths)
    return _Block(
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
    )


def _concatenated_ranges(starts: list[int], lengths: list[int], device: torch.device) -> Tensor:
    """start_0, start_0 + 1, ..., then start_1, ...: `lengths[i]` numbers each."""
    pieces = [torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
    return torch.cat(pieces).to(device)
