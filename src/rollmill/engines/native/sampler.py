"""Sampling one token per row, with exact log-probs of the distribution sampled from.

Shapes: B rows, V vocabulary, N blocks of 128 tokens.

A draw is the inverse CDF at one uniform number, on two levels: block sums first, then inside one block, so that a large
vocabulary costs one softmax and one pass of sums instead of V random numbers per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
#: Elements handled at a time (four rows at least): the passes over a slice stay in cache, its memory is not new.
SLICE = 1 << 18
#: Candidates that top-p looks at before it sorts the whole vocabulary.
TOP_P_CANDIDATES = 512


@dataclass(slots=True)
class SamplingTensors:
    """Sampling parameters of B rows: temperature [B] (0 is greedy), top_p [B], top_k [B] (0 keeps all), min_p [B]."""

    temperature_B: Tensor
    top_p_B: Tensor
    top_k_B: Tensor
    min_p_B: Tensor
    plain: bool
    """Every row has temperature 1 and no truncation."""
    truncated: bool
    """Some row truncates."""
    greedy: bool
    """Some row is greedy."""

    @classmethod
    def of(cls, rows: list[tuple[float, float, int, float]], device: torch.device) -> SamplingTensors:
        """From (temperature, top_p, top_k, min_p) per row."""
        temperature, top_p, top_k, min_p = zip(*rows, strict=True)
        return cls(
            torch.tensor(temperature, device=device),
            torch.tensor(top_p, device=device),
            torch.tensor(top_k, device=device),
            torch.tensor(min_p, device=device),
            plain=all(row == (1.0, 1.0, 0, 0.0) for row in rows),
            truncated=any(row[1:] != (1.0, 0, 0.0) for row in rows),
            greedy=any(row[0] == 0 for row in rows),
        )


def sample(logits_BV: Tensor, params: SamplingTensors, uniform_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits_BV: unnormalised, any floating type.
        params: per-row parameters.
        uniform_B: float64 in [0, 1).

    Returns:
        tokens [B] int64; log-probs [B] float32 under the distribution sampled from (after temperature and truncation;
        greedy rows report the log-prob at temperature 1); log of the probability mass kept by truncation [B] float32.
    """
    rows = max(4, SLICE // logits_BV.shape[1])
    if logits_BV.shape[0] <= rows or logits_BV.is_cuda:
        return _sample_slice(logits_BV, params, uniform_B)
    parts = []
    for start in range(0, logits_BV.shape[0], rows):
        cut = slice(start, start + rows)
        part = SamplingTensors(
            params.temperature_B[cut], params.top_p_B[cut], params.top_k_B[cut], params.min_p_B[cut],
            params.plain, params.truncated, params.greedy,
        )  # fmt: skip
        parts.append(_sample_slice(logits_BV[cut], part, uniform_B[cut]))
    tokens, logprobs, kept = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs), torch.cat(kept)


def _sample_slice(logits_BV: Tensor, params: SamplingTensors, uniform_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits_BV = logits_BV.float()
    if not params.plain:
        scale_B = torch.where(params.temperature_B > 0, params.temperature_B, 1.0)
        scaled_BV = logits_BV * scale_B.reciprocal()[:, None]
    else:
        scaled_BV = logits_BV
    probs_BV = torch.softmax(scaled_BV, dim=-1)
    kept_B = torch.ones_like(probs_BV[:, 0])
    if params.truncated:
        probs_BV = torch.where(_keep(probs_BV, params), probs_BV, 0.0)
        kept_B = probs_BV.sum(-1)
    tokens_B = inverse_cdf(probs_BV, uniform_B)
    if params.greedy:
        tokens_B = torch.where(params.temperature_B > 0, tokens_B, logits_BV.argmax(-1))
    picked_B = probs_BV.gather(1, tokens_B[:, None])[:, 0]
    return tokens_B, torch.log(picked_B / kept_B), torch.log(kept_B)


def inverse_cdf(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Index drawn in proportion to non-negative weights: the first whose cumulative weight exceeds uniform x total."""
    rows, vocab = weights_BV.shape
    pad = -vocab % BLOCK
    if pad:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, pad))
    blocks_BNK = weights_BV.view(rows, -1, BLOCK)
    cumulative_BN = blocks_BNK.sum(-1).double().cumsum(-1)
    target_B = uniform_B * cumulative_BN[:, -1]
    block_B = _first_above(cumulative_BN, target_B)
    before_B = cumulative_BN.gather(1, (block_B - 1).clamp(min=0)[:, None])[:, 0]
    inside_B = target_B - torch.where(block_B > 0, before_B, 0.0)
    index_B11 = block_B[:, None, None].expand(-1, 1, BLOCK)
    cumulative_BK = blocks_BNK.gather(1, index_B11)[:, 0].double().cumsum(-1)
    return (block_B * BLOCK + _first_above(cumulative_BK, inside_B)).clamp(max=vocab - 1)


def _first_above(cumulative_BN: Tensor, target_B: Tensor) -> Tensor:
    """First index whose cumulative weight exceeds the target; rounding never selects an entry of weight zero."""
    limit_B = torch.nextafter(cumulative_BN[:, -1], torch.zeros_like(target_B))
    target_B = torch.minimum(target_B.clamp(min=0), limit_B)
    found_B = torch.searchsorted(cumulative_BN, target_B[:, None], right=True)[:, 0]
    return found_B.clamp(max=cumulative_BN.shape[1] - 1)  # NaN finds nothing; the caller sees it in the log-prob


def _keep(probs_BV: Tensor, params: SamplingTensors) -> Tensor:
    """Which tokens survive top-k, then top-p on the renormalised rest, then min-p (ties at a threshold survive)."""
    floor_B = torch.zeros_like(params.min_p_B)
    if bool((params.top_k_B > 0).any()):
        largest = int(params.top_k_B.max().clamp(max=probs_BV.shape[1]))
        sorted_BK = probs_BV.topk(largest, dim=-1).values
        kth_B = sorted_BK.gather(1, (params.top_k_B.clamp(1, largest) - 1)[:, None])[:, 0]
        floor_B = torch.maximum(floor_B, torch.where(params.top_k_B > 0, kth_B, 0.0))
    needs_B = params.top_p_B < 1
    if bool(needs_B.any()):
        rows = needs_B.nonzero()[:, 0]
        allowed = torch.where(probs_BV[rows] >= floor_B[rows, None], probs_BV[rows], 0.0)
        floor_B[rows] = torch.maximum(floor_B[rows], _top_p_floor(allowed, params.top_p_B[rows]))
    floor_B = torch.maximum(floor_B, params.min_p_B * probs_BV.amax(-1))
    return probs_BV >= floor_B[:, None]


def _top_p_floor(weights_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Smallest weight of the smallest set of largest weights that holds top_p of the total."""
    target_B = top_p_B * weights_BV.sum(-1)
    candidates = min(TOP_P_CANDIDATES, weights_BV.shape[1])
    while True:
        sorted_BK = weights_BV.topk(candidates, dim=-1).values
        cumulative_BK = sorted_BK.cumsum(-1)
        if candidates == weights_BV.shape[1] or bool((cumulative_BK[:, -1] >= target_B).all()):
            break
        candidates = min(candidates * 8, weights_BV.shape[1])
    last_B = torch.searchsorted(cumulative_BK, target_B[:, None])[:, 0].clamp(max=candidates - 1)
    return sorted_BK.gather(1, last_B[:, None])[:, 0]
