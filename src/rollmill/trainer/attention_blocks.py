"""Attention of one block of a packed row: masks, kernels, and queries in pieces where a mask would be large.

A mask of all queries and keys of a block grows with the square of its length, and so do the scores of a soft-cap.
Beyond a limit, queries are processed in pieces that leave out keys beyond the window, and the masks and scores of a
piece are made again in the backward pass. (Plain causal attention needs no mask, and its kernel keeps no scores.) On a
CPU long segments attend to their parent and to their own tokens one after the other, which needs no mask either.

Shapes: n segments of a block, S their longest length, P the longest parent, L = P + S keys, H query heads, K key heads,
D head size, V size of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from rollmill.data.picture_prompts import Block
from rollmill.models.attention import AttentionOptions, AttentionWindow, append_sinks, fits_window, window_mask
from rollmill.models.attention_after_prefixes import Family, handles

_SHORT = 6_000_000  # scores of a block (24 MB in fp32); larger blocks would allocate new memory at every call
MASK_ELEMENTS = 1 << 24  #: of a mask, beyond which queries are processed in pieces, with a mask each
SCORES = 1 << 26  #: of a soft-cap, likewise
LEAST_PIECE = 64  #: queries
LONG = 320_000  #: scores of a segment and head, from which `attend_after_prefixes` is faster than one pass with a mask


@dataclass(frozen=True)
class AttentionBlock:
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
    families: tuple[Family, ...] = ()  #: by distinct parent


@dataclass(frozen=True)
class QueryPiece:
    """Some queries of a block, and the keys that they may see."""

    queries: range
    parent_keys: range
    own_keys: range


def prefers_products(q: Tensor, keys: int) -> bool:
    """True if unfused matrix products beat the fused kernel, whose backward pass is slow in half precision on a CPU."""
    scores = q.shape[0] * q.shape[1] * q.shape[2] * keys
    return q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16) and scores <= _SHORT


def needs_no_mask(q: Tensor, v: Tensor, block: AttentionBlock, options: AttentionOptions) -> bool:
    """True if `attend_after_prefixes` computes the attention of a block, and is faster than one pass with a mask."""
    keys = block.parent_longest + block.longest
    return block.parents is not None and block.longest * keys >= LONG and handles(q, v, keys, options)


def split_queries(
    block: AttentionBlock,
    options: AttentionOptions,
    heads: int,
    runs: Sequence[tuple[int, Block]],
    *,
    masked: bool,
) -> list[QueryPiece] | None:
    """Splits a block's queries into pieces; None if its mask and its scores are small enough to exist at once.

    A piece has the keys from the first that one of its queries sees to the last.

    Args:
        heads: query heads.
        runs: tokens that attend in both directions, with the number of the sequence.
        masked: the block needs a mask even where causal attention is correct.
    """
    keys = block.parent_longest + block.longest
    depths = [0] if block.parent_lengths is None else sorted(set(block.parent_lengths.tolist()))
    most = block.longest
    if masked or block.parents is not None or not fits_window(keys, options.window):
        most = MASK_ELEMENTS // ((block.n if runs or len(depths) > 1 else 1) * keys)
    if options.softcap is not None:
        most = min(most, SCORES // (block.n * heads * keys))
    if most >= block.longest:
        return None
    size, (window, chunk) = max(most, LEAST_PIECE), options.window
    found = []
    for first in range(0, block.longest, size):
        last = min(first + size, block.longest)
        starts = []  # first depth that a query of the piece sees, by depth of the block's first one
        for depth in depths:
            in_window = 0 if window is None else max(depth + first - window + 1, 0)
            starts.append(in_window if chunk is None else max(in_window, (depth + first) // chunk * chunk))
        met = [run for _, run in runs if run.first < last]
        whole = [run.first for run in met if not run.windowed and run.last > first]
        own = max(min([*(start - depth for start, depth in zip(starts, depths, strict=True)), *whole]), 0)
        end = max([last, *(run.last for run in met)])
        parents = range(min(*starts, block.parent_longest), block.parent_longest)
        found.append(QueryPiece(range(first, last), parents, range(own, end)))
    return found


def attend_piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: AttentionBlock,
    piece: QueryPiece,
    options: AttentionOptions,
    runs: list[tuple[int, Block]],
) -> Tensor:
    """Attention of a piece's queries, [n, piece, H, V]. Masks and scores are made again in the backward pass."""

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        begin = block.parent_longest
        spans = (
            slice(piece.parent_keys.start, begin),
            slice(begin + piece.own_keys.start, begin + piece.own_keys.stop),
        )
        keys, values = (torch.cat([x[:, span] for span in spans], dim=1) for x in (k, v))
        mask = block_mask(block, piece, options.window, q.device, v.dtype, runs)
        queries = q[:, piece.queries.start : piece.queries.stop]
        return attend_block(queries, keys, values, mask, options, options.softcap is not None)

    output: Tensor = checkpoint(attended, q, k, v, use_reentrant=False, preserve_rng_state=False)
    return output


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: AttentionOptions, by_products: bool
) -> Tensor:
    """[n, S, H, D], [n, L, K, D] -> [n, S, H, D], with the options' sinks and soft-cap."""
    if options.sinks is not None:
        assert mask is not None
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        *heads_first, mask = append_sinks(heads_first[0], heads_first[1], heads_first[2], mask, options)
        q, k, v = (x.transpose(1, 2) for x in heads_first)
    if not by_products:
        return _fused_attention(q, k, v, mask, options.scaling)
    assert mask is not None
    return _unfused_attention(q, k, v, mask, options.scaling, options.softcap)


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


def block_mask(
    block: AttentionBlock,
    piece: QueryPiece,
    reach: AttentionWindow,
    device: torch.device,
    dtype: torch.dtype,
    runs: list[tuple[int, Block]],
) -> Tensor:
    queries, keys = (_indices(each, device) for each in (piece.queries, piece.own_keys))
    if block.parents is None:
        query_depth, key_depth = queries[None], keys[None]
        real = torch.ones(1, len(keys), dtype=torch.bool, device=device)
    else:
        assert block.parent_lengths is not None
        lengths = block.parent_lengths[:, None]
        lengths = lengths[:1] if bool((lengths == lengths[0]).all()) else lengths
        before = _indices(piece.parent_keys, device)[None]
        query_depth, own_depth = lengths + queries, lengths + keys
        key_depth = torch.cat([before.expand(len(lengths), -1), own_depth], dim=1)
        real = torch.cat([before < lengths, torch.ones_like(own_depth, dtype=torch.bool)], dim=1)
    q0, k0 = piece.queries.start, piece.own_keys.start - len(piece.parent_keys)
    at_query, at_key = query_depth[:, :, None], key_depth[:, None, :]
    seen = (at_key <= at_query) & real[:, None, :]
    if runs:
        seen = seen.repeat(block.n // seen.shape[0], 1, 1)
    hidden = window_mask(at_query, at_key, reach)
    if hidden is not None and runs:
        hidden = hidden.repeat(block.n // hidden.shape[0], 1, 1) if hidden.ndim == 3 else hidden.repeat(block.n, 1, 1)
    for sequence, (a, b, windowed) in runs:
        between = slice(max(a - q0, 0), max(b - q0, 0)), slice(max(a - k0, len(piece.parent_keys)), max(b - k0, 0))
        seen[sequence, *between] = True
        if hidden is not None and not windowed:
            hidden[sequence, *between] = False
    if hidden is not None:
        seen &= ~hidden
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)[:, None]


def _indices(span: range, device: torch.device) -> Tensor:
    return torch.arange(span.start, span.stop, device=device)
