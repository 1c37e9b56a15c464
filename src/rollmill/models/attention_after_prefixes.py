"""Attention of long segments to a prefix and to themselves on a CPU, in two passes of PyTorch's fused kernel.

One pass with a mask would also compute the scores that the mask hides, and read and add the mask. Segments that share a
prefix read it together, without copies of it.

Shapes: n segments, S their length (padded at the end), P tokens of a prefix, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollmill.models.attention import AttentionOptions, fits_window


@dataclass(frozen=True)
class Family:
    """A prefix, and the segments that continue it."""

    length: int  #: of the prefix
    children: slice | list[int]  #: numbers of the segments


def handles(query: Tensor, value: Tensor, keys: int, options: AttentionOptions) -> bool:
    """True if `attend_after_prefixes` computes attention with these options over at most `keys` keys."""
    plain = options.softcap is None and options.sinks is None and fits_window(keys, options.window)
    return plain and query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def attend_after_prefixes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    families: tuple[Family, ...],
    scaling: float,
) -> Tensor:
    """Attention of segments to their prefixes and, causally, to themselves, [n, S, H, D].

    Args:
        q: [n, S, H, D].
        k: [n, S, K, D].
        v: [n, S, K, D].
        prefix_k: [prefixes' tokens, K, D], one distinct prefix after the other, without padding.
        prefix_v: likewise.
        families: the prefixes, in that order; every segment continues one of them.
    """
    output: Tensor = _AfterPrefixes.apply(q, k, v, prefix_k, prefix_v, families, scaling)  # type: ignore[no-untyped-call]
    return output


class _AfterPrefixes(torch.autograd.Function):
    """Two passes of the fused kernel without a mask, joined by the sums of their exponentials (as FlashDecoding does).

    The kernel's backward pass reads the output and those sums for the probabilities and the gradients' mean, so with
    the joined ones it gives the gradients of each part.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix_k: Tensor,
        prefix_v: Tensor,
        families: tuple[Family, ...],
        scaling: float,
    ) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # the public function hides the sums
        own, own_sum = (x.transpose(1, 2) for x in flash(*_heads_first(q, k, v), is_causal=True, scale=scaling))
        seen, seen_sum = torch.empty_like(own), torch.empty_like(own_sum)
        for family, keys, values in _by_prefix(families, prefix_k, prefix_v):
            queries = q[family.children]
            found = flash(*_heads_first(queries.flatten(0, 1)[None], keys, values), scale=scaling)
            for into, x in zip((seen, seen_sum), found, strict=True):
                into[family.children] = x.transpose(1, 2).reshape(*queries.shape[:2], *into.shape[2:])
        share = torch.sigmoid(own_sum - seen_sum)[..., None]
        output = torch.lerp(seen.to(share.dtype), own.to(share.dtype), share).to(v.dtype)
        ctx.save_for_backward(q, k, v, prefix_k, prefix_v, output, torch.logaddexp(own_sum, seen_sum))
        ctx.families, ctx.scaling = families, scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, prefix_k, prefix_v, output, total = ctx.saved_tensors
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        (grad,) = grads
        parts = _heads_first(grad, q, k, v, output, total)
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in backward(*parts, 0.0, True, scale=ctx.scaling))
        of_keys, of_values = [], []
        for family, keys, values in _by_prefix(ctx.families, prefix_k, prefix_v):
            g, queries, out, sums = (x[family.children].flatten(0, 1)[None] for x in (grad, q, output, total))
            parts = _heads_first(g, queries, keys, values, out, sums)
            of_q, of_k, of_v = (x.transpose(1, 2)[0] for x in backward(*parts, 0.0, False, scale=ctx.scaling))
            grad_q[family.children] += of_q.reshape(-1, *q.shape[1:])
            of_keys.append(of_k)
            of_values.append(of_v)
        return grad_q, grad_k, grad_v, torch.cat(of_keys), torch.cat(of_values), None, None


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _by_prefix(
    families: tuple[Family, ...], prefix_k: Tensor, prefix_v: Tensor
) -> Iterator[tuple[Family, Tensor, Tensor]]:
    """Each family with its prefix's keys and values, [1, P, K, D]."""
    lengths = [family.length for family in families]
    for family, keys, values in zip(families, prefix_k.split(lengths), prefix_v.split(lengths), strict=True):
        yield family, keys[None], values[None]
