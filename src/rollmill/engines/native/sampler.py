"""Samples one token per row, with exact log-probs of the distribution sampled from.

Shapes: B rows, V vocabulary, N blocks of 128 tokens.

A draw is the inverse CDF at one uniform number, on two levels: block sums first, then inside one block, so that a large
vocabulary costs one softmax and one pass of sums instead of V random numbers per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmill.models.transfers import to_device, to_host
from rollmill.types import FloatArray, IntArray

TopTokens = tuple[IntArray, FloatArray]
"""The most probable tokens at one position, and their probabilities; [K] each."""

BLOCK = 128
#: Elements processed at a time (four rows at least), so that the passes over a slice stay in cache.
SLICE_ELEMENTS = 1 << 18
#: Candidates that top-p tries first, before it sorts more of the vocabulary.
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
    largest_k: int
    """The largest `top_k` of the rows."""
    cuts_mass: bool
    """Some row has `top_p` below 1."""

    @classmethod
    def of(cls, rows: list[tuple[float, float, int, float]], device: torch.device) -> SamplingTensors:
        """Build from (temperature, top_p, top_k, min_p) per row."""
        temperature, top_p, top_k, min_p = zip(*rows, strict=True)
        shares = [np.array(each, np.float32) for each in (temperature, top_p, min_p)]
        temperature_B, top_p_B, min_p_B, top_k_B = to_device([*shares, np.array(top_k, np.int64)], device)
        return cls(
            temperature_B,
            top_p_B,
            top_k_B,
            min_p_B,
            plain=all(row == (1.0, 1.0, 0, 0.0) for row in rows),
            truncated=any(row[1:] != (1.0, 0, 0.0) for row in rows),
            greedy=any(row[0] == 0 for row in rows),
            largest_k=max(top_k),
            cuts_mass=min(top_p) < 1,
        )

    def part(self, rows: slice) -> SamplingTensors:
        return SamplingTensors(
            self.temperature_B[rows], self.top_p_B[rows], self.top_k_B[rows], self.min_p_B[rows],
            self.plain, self.truncated, self.greedy, self.largest_k, self.cuts_mass,
        )  # fmt: skip


class SamplerOutput(NamedTuple):
    """One token per row.

    Log-probs are under the distribution sampled from, after temperature and truncation (greedy rows report the log-prob
    at temperature 1); `kept` is the log of the probability mass that truncation kept. `top` are the K most probable
    tokens of that distribution: ids and probabilities.
    """

    token_B: Tensor
    logprob_B: Tensor
    kept_B: Tensor
    top_BK: Tensor
    top_probs_BK: Tensor


@dataclass(frozen=True, slots=True)
class HostSamplerOutput:
    """Sampled tokens and their log-probs on the CPU; one entry per position."""

    tokens: list[int]
    logprobs: list[float]
    kept: list[float]
    top_ids: IntArray
    top_probs: FloatArray

    @classmethod
    def of(
        cls, token_P: Tensor, logprob_P: Tensor, kept_P: Tensor, top_PK: Tensor, probs_PK: Tensor
    ) -> HostSamplerOutput:
        """Copy from the device, in one transfer."""
        token_P, logprob_P, kept_P, top_PK, probs_PK = to_host([token_P, logprob_P, kept_P, top_PK.int(), probs_PK])
        return cls(token_P.tolist(), logprob_P.tolist(), kept_P.tolist(), top_PK.numpy(), probs_PK.numpy())

    def at(self, position: int) -> tuple[int, float, float]:
        """Token, log-prob and log of the kept mass."""
        return self.tokens[position], self.logprobs[position], self.kept[position]

    def top(self, position: int) -> TopTokens | None:
        """The most probable tokens, if recorded."""
        return (self.top_ids[position], self.top_probs[position]) if self.top_ids.shape[1] else None


def sample_tokens(logits_BV: Tensor, params: SamplingTensors, uniform_B: Tensor, top: int = 0) -> SamplerOutput:
    """Draw one token per row.

    Args:
        logits_BV: unnormalised, any floating type.
        params: per-row parameters.
        uniform_B: float64 in [0, 1).
        top: K, the number of most probable tokens to return.
    """
    parts = []
    for cut in row_slices(logits_BV):
        logits, own = logits_BV[cut], params.part(cut)
        probs, kept = truncated_probs(logits, own)
        tokens = sample_inverse_cdf(probs, uniform_B[cut])
        if params.greedy:
            tokens = torch.where(own.temperature_B > 0, tokens, logits.argmax(-1))
        picked = probs.gather(1, tokens[:, None])[:, 0]
        strongest = select_top_tokens(normalized_probs(probs, kept, logits, own), top) if top else _none(tokens)
        parts.append((tokens, torch.log(picked / kept), torch.log(kept), *strongest))
    return SamplerOutput(*(torch.cat(each) for each in zip(*parts, strict=True)))


def select_top_tokens(probs_BV: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Ids and probabilities [B, K] of the most probable tokens; K is `top`, or V if that is less."""
    found = probs_BV.topk(min(top, probs_BV.shape[1]), dim=-1)
    return found.indices, found.values


def _none(tokens_B: Tensor) -> tuple[Tensor, Tensor]:
    return tokens_B[:, None][:, :0], torch.empty(len(tokens_B), 0, device=tokens_B.device)


def row_slices(logits_BV: Tensor) -> list[slice]:
    """Slices of rows that are processed at a time."""
    rows = len(logits_BV) if logits_BV.is_cuda else max(4, SLICE_ELEMENTS // logits_BV.shape[1])
    return [slice(start, start + rows) for start in range(0, len(logits_BV), rows)]


def truncated_probs(logits_BV: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
    """Probabilities after temperature (1 for greedy rows), 0 where truncated; and the mass kept of each row, [B].

    Each row sums to its kept mass. Both float32.
    """
    scaled_BV = logits_BV.float()
    if not params.plain:
        scale_B = torch.where(params.temperature_B > 0, params.temperature_B, 1.0)
        scaled_BV = scaled_BV * scale_B.reciprocal()[:, None]
    probs_BV = torch.softmax(scaled_BV, dim=-1)
    if not params.truncated:
        return probs_BV, torch.ones_like(probs_BV[:, 0])
    probs_BV = torch.where(_truncation_mask(probs_BV, params), probs_BV, 0.0)
    return probs_BV, probs_BV.sum(-1)


def normalized_probs(probs_BV: Tensor, kept_B: Tensor, logits_BV: Tensor, params: SamplingTensors) -> Tensor:
    """The result of `truncated_probs`, normalised [B, V]; greedy rows have all mass on one token."""
    probs_BV = probs_BV / kept_B[:, None] if params.truncated else probs_BV
    if not params.greedy:
        return probs_BV
    best_BV = torch.zeros_like(probs_BV).scatter_(1, logits_BV.argmax(-1, keepdim=True), 1.0)
    return torch.where(params.temperature_B[:, None] > 0, probs_BV, best_BV)


def sample_inverse_cdf(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Draw an index in proportion to non-negative weights: the first with a cumulative weight above uniform x total."""
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


def _truncation_mask(probs_BV: Tensor, params: SamplingTensors) -> Tensor:
    """True for tokens kept by top-k, then top-p on the renormalised rest, then min-p (ties at a threshold are kept)."""
    floor_B = torch.zeros_like(params.min_p_B)
    if params.largest_k > 0:
        largest = min(params.largest_k, probs_BV.shape[1])
        sorted_BK = probs_BV.topk(largest, dim=-1).values
        kth_B = sorted_BK.gather(1, (params.top_k_B.clamp(1, largest) - 1)[:, None])[:, 0]
        floor_B = torch.maximum(floor_B, torch.where(params.top_k_B > 0, kth_B, 0.0))
    if params.cuts_mass:
        allowed_BV = torch.where(probs_BV >= floor_B[:, None], probs_BV, 0.0)
        least_B = _top_p_floor(allowed_BV, torch.where(params.top_p_B < 1, params.top_p_B, 0.0))
        floor_B = torch.where(params.top_p_B < 1, torch.maximum(floor_B, least_B), floor_B)
    floor_B = torch.maximum(floor_B, params.min_p_B * probs_BV.amax(-1))
    return probs_BV >= floor_B[:, None]


def _top_p_floor(weights_BV: Tensor, top_p_B: Tensor) -> Tensor:
    """Smallest weight of the smallest set of largest weights that holds top_p of the total; for 0, the largest."""
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
