"""Kernels that a GPU has other than a CPU: copies between host and device, flash attention, grouped products."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from support.simulated_cuda.trace import (
    finish_copies,
    note_launches,
    note_sync,
    receive_later,
    refuse_in_capture,
    send_later,
)

_FLASH_TYPES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256
_PAGE = 256  # tokens, or a multiple
_device = torch.ops.simulated_cuda
_inside = threading.local()
_library = torch.library.Library("aten", "IMPL")


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a kernel of the simulation: its own copies are none of the program's."""

    @wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        before, _inside.on = getattr(_inside, "on", False), True
        try:
            return function(*args, **kwargs)
        finally:
            _inside.on = before

    return kernel


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not getattr(_inside, "on", False) and to.is_cuda != source.is_cuda and source.numel():
        if to.is_cuda:
            finish_copies()  # of the source, in the order of the stream
            kind = "h2d pageable" if not source.is_pinned() else "h2d pinned" if non_blocking else "h2d waiting"
        else:
            kind = "d2h async" if non_blocking and to.is_pinned() else "d2h"
        if kind not in ("d2h async", "h2d pinned"):
            refuse_in_capture(kind)
        note_sync(kind)
        if kind == "h2d pinned":
            send_later(source)
        elif kind == "d2h async":
            values = torch.empty_like(to)
            _device.copy_(values, source)
            receive_later(to, values)
            return to
    if source.is_conj() != to.is_conj():  # without the flags, which would be resolved by another copy
        plain = to.conj() if to.is_conj() else to
        _device.copy_(plain, source.conj() if source.is_conj() else source)
        torch.view_as_real(plain).select(-1, 1).neg_()
        return to
    _device.copy_(to, source)
    return to


def _local_scalar(tensor: Tensor) -> Any:
    refuse_in_capture("item")
    note_sync("item")
    return _device.local_scalar(tensor)


@_quietly
def _on_host(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation whose CPU kernel is chosen by the device of its arguments, as convolutions are."""
    device = next(each.device for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor) and each.is_cuda)
    args, kwargs = tree_map(lambda each: each.cpu() if isinstance(each, Tensor) else each, (args, kwargs))
    return tree_map(lambda each: each.to(device) if isinstance(each, Tensor) else each, op(*args, **kwargs))


@_quietly
def _histc(values: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    return torch.histc(values.cpu().double(), bins, min, max).to(values.device, values.dtype)  # CPUs: floats only


# Flash attention with segments, by the limits of FlashAttention 2 on this GPU.


def _whole_sequences(
    key: Tensor, value: Tensor, table: Tensor, starts_q: Tensor, used: Tensor | None, max_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of each row, gathered from its pages, one row after the other, and where each row starts."""
    for name, each in (("block_table", table), ("seqused_k", used)):
        if each is None or each.dtype != torch.int32 or not each.is_cuda or each.stride(-1) != 1:
            raise RuntimeError(f"{name} must be int32 on the GPU, with contiguous last dimension")
    assert used is not None
    rows, width = table.shape
    if key.dim() != 4 or key.shape != value.shape or key.shape[1] % _PAGE:
        raise RuntimeError(f"Paged KV cache block size must be divisible by {_PAGE}; the pages are {tuple(key.shape)}")
    if rows != len(starts_q) - 1 or used.shape != (rows,):
        raise RuntimeError("block_table and seqused_k need one row for each sequence")
    lengths = used.cpu().long()
    if int(lengths.max()) > min(max_k, width * key.shape[1]) or int(lengths.min()) < 0:
        raise RuntimeError("CUDA error: an illegal memory access was encountered (seqused_k is beyond the pages)")
    at = torch.cat([torch.arange(int(n)) for n in lengths])
    row = torch.repeat_interleave(torch.arange(rows), lengths)
    pages = table.cpu().long()[row, at // key.shape[1]]
    if len(pages) and (int(pages.min()) < 0 or int(pages.max()) >= len(key)):
        raise RuntimeError("CUDA error: an illegal memory access was encountered (a page that is not there)")
    places = (pages * key.shape[1] + at % key.shape[1]).to(key.device)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).to(starts_q.device, torch.int32)
    return key.flatten(0, 1)[places], value.flatten(0, 1)[places], starts


@_quietly
def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    if torch.cuda.get_device_capability(query.device) < (8, 0):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if cum_seq_q is None or cum_seq_k is None:
        raise NotImplementedError("the simulated GPU has no flash attention without segments")
    if block_table is not None:
        key, value, cum_seq_k = _whole_sequences(key, value, block_table, cum_seq_q, seqused_k, max_k)
    elif seqused_k is not None:
        raise NotImplementedError("the simulated GPU has no flash attention with seqused_k alone")
    window = (window_size_left, window_size_right)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (each.detach().cpu().float() for each in (query, key, value))
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
    for at, to, hidden in _segments(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window):
        keys, values = _for_each_head(q, k[to]), _for_each_head(q, v[to])
        scores_hqk = (torch.einsum("qhd,khd->hqk", q[at], keys) * scale).masked_fill(hidden, -torch.inf)
        out[at] = torch.einsum("hqk,khd->qhd", torch.softmax(scores_hqk, -1).nan_to_num(0.0), values)
        lse[:, at] = torch.logsumexp(scores_hqk, -1)
    nothing = torch.empty(0, device=query.device)
    return out.to(query.device, query.dtype), lse.to(query.device), nothing, nothing, nothing


@_quietly
def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    window = (window_size_left, window_size_right)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, grad = (each.detach().cpu().float() for each in (query, key, value, grad_out))
    grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    of_q, of_k, of_v = grads
    repeats = q.shape[1] // k.shape[1]
    for at, to, hidden in _segments(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window):
        keys, values = _for_each_head(q, k[to]), _for_each_head(q, v[to])
        scores_hqk = (torch.einsum("qhd,khd->hqk", q[at], keys) * scale).masked_fill(hidden, -torch.inf)
        p_hqk = torch.softmax(scores_hqk, -1).nan_to_num(0.0)
        of_p = torch.einsum("qhd,khd->hqk", grad[at], values)
        of_s = p_hqk * (of_p - (of_p * p_hqk).sum(-1, keepdim=True)) * scale
        of_q[at] += torch.einsum("hqk,khd->qhd", of_s, keys)
        of_k[to] += torch.einsum("hqk,qhd->khd", of_s, q[at]).unflatten(1, (-1, repeats)).sum(2)
        of_v[to] += torch.einsum("hqk,qhd->khd", p_hqk, grad[at]).unflatten(1, (-1, repeats)).sum(2)
    return tuple(each.to(query.device, query.dtype) for each in grads)


def _for_each_head(query: Tensor, shared: Tensor) -> Tensor:
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], 1)


def _segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    window: tuple[int | None, int | None],
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the tokens of each segment in queries and in keys, and which pairs of them are hidden.

    Raises what the real kernel raises for arguments that it does not take.
    """
    for name, each in (("q", query), ("k", key), ("v", value)):
        if each.dtype not in _FLASH_TYPES or each.dtype != query.dtype:
            raise RuntimeError(f"FlashAttention only supports fp16 and bf16 data type ({name} is {each.dtype})")
        if each.stride(-1) != 1:
            raise RuntimeError("Input tensor must have contiguous last dimension")
        if each.shape[-1] % 8 or each.shape[-1] > _LARGEST_HEAD:
            text = f"head size of {name} is {each.shape[-1]}: must be a multiple of 8, at most {_LARGEST_HEAD}"
            raise RuntimeError(f"FlashAttention: {text}")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        shapes = f"v has {tuple(value.shape)}, k {tuple(key.shape)}, q {tuple(query.shape)}"
        raise RuntimeError(f"FlashAttention: v must have the shape of k, and all the same head size; {shapes}")
    for each in (starts_q, starts_k):
        if each.dtype != torch.int32 or not each.is_cuda or not each.is_contiguous():
            raise RuntimeError("cu_seqlens must be int32 on the GPU")
    at, to = starts_q.cpu().tolist(), starts_k.cpu().tolist()
    if at[-1] != len(query) or not to[-1] == len(key) == len(value):
        raise RuntimeError("cu_seqlens do not cover the tokens")
    left, right = window
    for a, b, c, d in zip(at, at[1:], to, to[1:], strict=False):
        if b - a > max_q or d - c > max_k:
            raise RuntimeError("a segment is longer than the stated maximum")
        of_q = torch.arange(b - a)[:, None] + (d - c) - (b - a)
        of_k = torch.arange(d - c)[None]
        hidden = torch.zeros(b - a, d - c, dtype=torch.bool)
        if causal or (right is not None and right >= 0):
            hidden |= of_k > of_q + (0 if causal else right or 0)
        if left is not None and left >= 0:
            hidden |= of_k < of_q - left
        yield slice(a, b), slice(c, d), hidden


@_quietly
def _product_by_group(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, out_dtype: Any) -> Tensor:
    ends = None if offs is None else offs.cpu()
    return torch._grouped_mm(a.cpu(), b.cpu(), offs=ends, bias=bias, out_dtype=out_dtype).to(a.device)


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    bf16 = a.dtype == b.dtype == torch.bfloat16 and out_dtype in (None, torch.bfloat16)
    if not bf16 and offs is not None:
        offs.cpu()  # other types: a loop over the groups, whose sizes the host reads
        note_launches("grouped_mm: one product per expert", len(offs))
    return _product_by_group(a, b, offs, bias, out_dtype)  # type: ignore[no-any-return]


@_quietly
def _mm_into(a: Tensor, b: Tensor, out_dtype: Any) -> Tensor:
    return torch.mm(a.cpu().float(), b.cpu().float()).to(a.device, out_dtype)  # CPUs have no product with another type


@_quietly
def _rms_norm_backward(
    grad: Tensor, given: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Of one normalised dimension; CPUs have the forward kernel only."""
    [_] = shape
    g, x, scale = (each.cpu().float() for each in (grad, given, rstd))
    x = x * scale
    of_weight = (g * x).flatten(0, -2).sum(0)
    g = g if weight is None else g * weight.cpu().float()
    of_given = scale * (g - x * (g * x).mean(-1, keepdim=True))
    return (
        of_given.to(given.device, given.dtype) if mask[0] else None,
        of_weight.to(weight.device, weight.dtype) if mask[1] and weight is not None else None,
    )


_KERNELS: dict[str, Callable[..., Any]] = {
    "mm.dtype": _mm_into,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "copy_": _copy,
    "_local_scalar_dense": _local_scalar,
    "histc": _histc,
    "_grouped_mm": _grouped_mm,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
}
for _name, _kernel in _KERNELS.items():
    _library.impl(_name, _kernel, "CUDA")
# convolutions choose their kernel by device; the norm is one kernel on a GPU, and several on a CPU
for _name in ("convolution", "convolution_backward", "_fused_rms_norm"):
    _op = getattr(torch.ops.aten, _name).default
    _library.impl(_name, lambda *args, _op=_op, **kwargs: _on_host(_op, *args, **kwargs), "CUDA")
