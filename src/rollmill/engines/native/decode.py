"""Attention of a decode step: every row adds one token to its cache entry, and attends to it and to its prompt's entry.

Rows are ordered like the entries of the completion buckets, so a bucket's rows are one slice. The queries of all rows
that share a prompt are multiplied with the prompt's keys together. The two partial softmaxes are merged by their maxima
and sums (as in flash attention, arXiv:2205.14135).

Shapes: B rows, n rows of a segment, K key-value heads, R query heads per key-value head, D head size, L cached tokens,
P prompts of a bucket, G rows per prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from rollmill.engines.native.kv_cache import BucketEntry, CacheBucket, stack_states
from rollmill.models.attention import AttentionOptions, AttentionWindow, fits_window, window_mask
from rollmill.models.recurrent import RecurrentCall, RecurrentState

MASKED_SCORE = -1e30  # finite, so that fully masked rows stay free of NaN


@dataclass(slots=True)
class CompletionSegment:
    """Batch rows start..end, which own the entries of one completion bucket."""

    bucket: CacheBucket
    start: int
    end: int
    lengths_n: Tensor  # tokens before this step
    even: bool  # all lengths are equal
    longest: int


@dataclass(slots=True)
class PromptSegment:
    """Prompts of one bucket, and the batch rows that share each of them."""

    bucket: CacheBucket
    index_P: Tensor  # entries
    rows_PG: Tensor  # batch rows, padded with row 0
    lengths_P: Tensor
    even: bool
    longest: int
    all_entries: bool  # index_P is 0..P-1
    in_order: bool  # rows_PG is the whole batch, row by row


@dataclass(slots=True)
class PartialAttention:
    """Attention to part of the tokens: largest score, sum of exponentials [.., 1], weighted mean of values [.., D]."""

    top: Tensor
    total: Tensor
    output: Tensor


class DecodeContext:
    """Attention context of decode steps over a fixed set of rows.

    `exact` cuts every product to the longest entry and skips masks that would mask nothing: best where shapes may
    change freely. Without it all shapes stay the same from step to step, as a captured graph needs.
    """

    def __init__(
        self, entries: list[BucketEntry], device: torch.device, last_position: int, exact: bool = True
    ) -> None:
        self.device, self.exact = device, exact
        self._last_position = last_position  # of the model; only finished rows still in the batch reach it
        self._entries = entries
        self._longest = max(entry.offset + entry.length for entry in entries)
        self.own = _own_pieces(entries, device)
        self.prompts, self.order_B = _prompt_pieces(entries, device)
        self.positions_B = torch.tensor([entry.offset + entry.length for entry in entries], device=device)
        self.prompt_lengths_B = torch.tensor([entry.offset for entry in entries], device=device)
        self._masks: dict[tuple[int, AttentionWindow], Tensor | None] = {}
        self._states: dict[int, RecurrentState] = {}  # of recurrent layers, row by row
        self._layers = 0  # called so far in this pass

    def begin(self) -> None:
        """Start a forward pass: layers are numbered in the order of their calls, and masks follow the lengths."""
        self._layers = 0
        self._masks.clear()

    def advance(self) -> None:
        """Record that every row has gained one token."""
        self.positions_B.add_(1).clamp_(max=self._last_position)
        self._longest += 1
        for piece in self.own:
            piece.lengths_n += 1
            piece.longest += 1

    def follow(self) -> None:
        """Read the entries' changed lengths. Updates tensors in place, as a captured graph reads the same tensors."""
        lengths = [entry.length for entry in self._entries]
        lengths_B = torch.tensor(lengths, device=self.device)
        self._longest = max(entry.offset + entry.length for entry in self._entries)
        torch.add(self.prompt_lengths_B, lengths_B, out=self.positions_B)
        self.positions_B.clamp_(max=self._last_position)
        for piece in self.own:
            own = lengths[piece.start : piece.end]
            piece.lengths_n.copy_(lengths_B[piece.start : piece.end])
            piece.even, piece.longest = min(own) == max(own), max(own)

    def full(self) -> bool:
        """True if some bucket has no room for another token."""
        return any(piece.longest >= piece.bucket.capacity for piece in self.own)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        layer, self._layers = self._layers, self._layers + 1
        kv_heads = key.shape[1]
        q_BKRD = (query[0].transpose(0, 1) * options.scaling).reshape(query.shape[2], kv_heads, -1, query.shape[3])
        k_BKD, v_BKD = key[0].transpose(0, 1), value[0].transpose(0, 1)
        own = [self._own(i, layer, q_BKRD, k_BKD, v_BKD, options) for i in range(len(self.own))]
        shared = [self._prompt(i, layer, q_BKRD, key, value, options) for i in range(len(self.prompts))]
        output = _merge(_concatenate(own), _reorder(shared, self.order_B), options.sinks)
        return output.flatten(1, 2)[None].to(query.dtype)

    def recur(self, hidden: Tensor, call: RecurrentCall) -> Tensor:
        """Every row continues from its own state."""
        layer, self._layers = self._layers, self._layers + 1
        rows = len(self._entries)
        if layer not in self._states:
            self._states[layer] = stack_states([entry.states[layer] for entry in self._entries])
        output, after = call(torch.arange(rows, device=self.device)[:, None], self._states[layer])
        self._states[layer] = after
        return output.transpose(0, 1)

    def write_back_states(self) -> None:
        """Store the updated recurrent states in the rows' entries."""
        for layer, states in self._states.items():
            for i, entry in enumerate(self._entries):
                entry.states[layer] = {name: state[i] for name, state in states.items()}
        self._states = {}

    def _own(
        self, i: int, layer: int, q_BKRD: Tensor, k_BKD: Tensor, v_BKD: Tensor, options: AttentionOptions
    ) -> PartialAttention:
        piece = self.own[i]
        n, rows = piece.end - piece.start, slice(piece.start, piece.end)
        store_k, store_v = piece.bucket.layer(layer, k_BKD.transpose(0, 1)[None], v_BKD.transpose(0, 1)[None])
        if piece.even and self.exact:
            store_k[:n, :, piece.longest] = k_BKD[rows]
            store_v[:n, :, piece.longest] = v_BKD[rows]
        else:
            at = torch.arange(n, device=self.device)
            store_k[at, :, piece.lengths_n] = k_BKD[rows]
            store_v[at, :, piece.lengths_n] = v_BKD[rows]
        length = piece.longest + 1 if self.exact and not _dense(store_k) else piece.bucket.capacity
        mask = self._own_mask(i, length, options.window)
        partial = _attend(
            q_BKRD[rows].flatten(0, 1),
            store_k[:n].flatten(0, 1)[:, :length],
            store_v[:n].flatten(0, 1)[:, :length],
            None if mask is None else mask[:, None].expand(-1, q_BKRD.shape[1], -1).reshape(-1, 1, length),
            options.softcap,
        )
        return _map(partial, lambda x: x.unflatten(0, (n, -1)))

    def _prompt(
        self, i: int, layer: int, q_BKRD: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> PartialAttention:
        piece = self.prompts[i]
        kv_heads, repeats = q_BKRD.shape[1:3]
        prompts, rows = piece.rows_PG.shape
        store_k, store_v = piece.bucket.layer(layer, key, value)
        if piece.all_entries:
            store_k, store_v = store_k[:prompts], store_v[:prompts]
        else:
            store_k, store_v = store_k[piece.index_P], store_v[piece.index_P]
        length = piece.longest if self.exact else piece.bucket.capacity
        q_PGKRD = q_BKRD.unflatten(0, (prompts, rows)) if piece.in_order else q_BKRD[piece.rows_PG]
        q = q_PGKRD.transpose(1, 2).reshape(prompts * kv_heads, rows * repeats, -1)
        mask = self._prompt_mask(i, length, options.window)
        if mask is not None:  # [P, G, L] -> [P*K, G*R, L]
            mask = mask[:, None, :, None].expand(-1, kv_heads, -1, repeats, -1).reshape(q.shape[0], -1, length)
        keys, values = store_k.flatten(0, 1)[:, :length], store_v.flatten(0, 1)[:, :length]
        partial = _attend(q, keys, values, mask, options.softcap)
        shape = (prompts, kv_heads, rows, repeats)
        return _map(partial, lambda x: x.view(*shape, -1).transpose(1, 2).flatten(0, 1))

    def _own_mask(self, i: int, length: int, reach: AttentionWindow) -> Tensor | None:
        """Mask [n, L], True where hidden; None if nothing is."""
        piece = self.own[i]
        if self.exact and piece.even and length == piece.longest + 1 and self._sees_all(reach):
            return None
        if (2 * i, reach) not in self._masks:
            at = torch.arange(length, device=self.device)
            hidden = at > piece.lengths_n[:, None]
            rows = slice(piece.start, piece.end)
            starts, ends = self.prompt_lengths_B[rows, None], self.positions_B[rows, None]
            far = window_mask(ends, starts + at, reach)
            self._masks[2 * i, reach] = hidden if far is None else hidden | far
        return self._masks[2 * i, reach]

    def _prompt_mask(self, i: int, length: int, reach: AttentionWindow) -> Tensor | None:
        """Mask [P, G, L], True where hidden; None if nothing is."""
        piece = self.prompts[i]
        if (2 * i + 1, reach) not in self._masks:
            at = torch.arange(length, device=self.device)
            hidden = (at >= piece.lengths_P[:, None])[:, None].expand(-1, piece.rows_PG.shape[1], -1)
            nothing = self.exact and piece.even
            if not (nothing and self._sees_all(reach)):
                far = window_mask(self.positions_B[piece.rows_PG][..., None], at, reach)
                hidden, nothing = (hidden, nothing) if far is None else (hidden | far, False)
            self._masks[2 * i + 1, reach] = None if nothing else hidden
        return self._masks[2 * i + 1, reach]

    def _sees_all(self, reach: AttentionWindow) -> bool:
        """True if no row is so long that a window or a chunk hides something from it."""
        return fits_window(self._longest + 1, reach)


def _dense(store: Tensor) -> bool:
    """True if products take only whole tensors: oneDNN, which computes them in half precision on a CPU, would copy the
    part of a bucket that is in use before every product, which costs more than multiplying all of it."""
    return store.device.type == "cpu" and store.dtype in (torch.bfloat16, torch.float16)


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, softcap: float | None) -> PartialAttention:
    """q [N, M, D], k and v [N, L, D], hidden [N, M or 1, L]; scores are summed in fp32.

    `softmax` and not `exp`, which takes ten times as long where the result underflows (all that is hidden, on a CPU).
    """
    scores = torch.bmm(q, k.transpose(1, 2)).float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if hidden is not None:
        scores.masked_fill_(hidden, MASKED_SCORE)
    top = scores.amax(-1, keepdim=True)
    weights = torch.softmax(scores, -1)
    total = weights.amax(-1, keepdim=True).reciprocal_()  # the largest weight is exp(0) / total
    return PartialAttention(top, total, torch.bmm(weights.to(v.dtype), v).float())


def _map(partial: PartialAttention, function: Callable[[Tensor], Tensor]) -> PartialAttention:
    return PartialAttention(function(partial.top), function(partial.total), function(partial.output))


def _concatenate(parts: list[PartialAttention]) -> PartialAttention:
    if len(parts) == 1:
        return parts[0]
    return PartialAttention(
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("top", "total", "output"))
    )


def _reorder(parts: list[PartialAttention], order_B: Tensor | None) -> PartialAttention:
    partial = _concatenate(parts)
    return partial if order_B is None else _map(partial, lambda x: x[order_B])


def _merge(a: PartialAttention, b: PartialAttention, sinks: Tensor | None) -> Tensor:
    """Attention over both parts, [B, K, R, V]; sinks [K * R] take part in the softmax and have no value."""
    top = torch.maximum(a.top, b.top)
    weight_a, weight_b = a.total * torch.exp(a.top - top), b.total * torch.exp(b.top - top)
    share_a = weight_a / (weight_a + weight_b)
    output = torch.lerp(b.output, a.output, share_a)
    if sinks is None:
        return output
    logsumexp = top + torch.log(weight_a + weight_b)
    return output * torch.sigmoid(logsumexp - sinks.float().view(*top.shape[1:]))


def _own_pieces(entries: list[BucketEntry], device: torch.device) -> list[CompletionSegment]:
    pieces, start = [], 0
    while start < len(entries):
        bucket = entries[start].bucket
        end = start + len(bucket.entries)
        lengths = [entry.length for entry in entries[start:end]]
        tensor = torch.tensor(lengths, device=device)
        pieces.append(CompletionSegment(bucket, start, end, tensor, min(lengths) == max(lengths), max(lengths)))
        start = end
    return pieces


def _prompt_pieces(entries: list[BucketEntry], device: torch.device) -> tuple[list[PromptSegment], Tensor | None]:
    """The prompt segments, and for each batch row its index in their concatenated rows (None: in batch order)."""
    below: dict[BucketEntry, list[int]] = {}
    for row, entry in enumerate(entries):
        below.setdefault(cast(BucketEntry, entry.parent), []).append(row)
    by_bucket: dict[int, list[BucketEntry]] = {}
    for parent in below:
        by_bucket.setdefault(id(parent.bucket), []).append(parent)
    pieces, order, base = [], [0] * len(entries), 0
    for parents in by_bucket.values():
        most = max(len(below[parent]) for parent in parents)
        for i, parent in enumerate(parents):
            for j, row in enumerate(below[parent]):
                order[row] = base + i * most + j
        base += len(parents) * most
        lengths = [parent.length for parent in parents]
        rows = [below[parent] + [0] * (most - len(below[parent])) for parent in parents]
        pieces.append(
            PromptSegment(
                bucket=parents[0].bucket,
                index_P=torch.tensor([parent.index for parent in parents], device=device),
                rows_PG=torch.tensor(rows, device=device),
                lengths_P=torch.tensor(lengths, device=device),
                even=min(lengths) == max(lengths),
                longest=max(lengths),
                all_entries=[parent.index for parent in parents] == list(range(len(parents))),
                in_order=[row for group in rows for row in group] == list(range(len(entries))),
            )
        )
    in_order = base == len(entries) and order == list(range(base))
    return pieces, None if in_order else torch.tensor(order, device=device)
