"""Aggregations turn per-token terms into one number, as a weight per token; helpers sum and average over sequences.

Weights are computed once for a whole optimizer step, before it is split into micro-batches. The loss is sum_t weight_t
* term_t, so micro-batches are simply summed.

Shapes: `lengths` [N] is the number of tokens of each experience that count (0: it is left out); a weight [N] applies to
each of its tokens. `sequence` int64 [tokens] is the index of the sequence that a token belongs to. The tokens of a
sequence need not be contiguous, and sequences may have no tokens. The helpers propagate gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def token_mean(lengths: Tensor) -> Tensor:
    """1 / (all tokens): every token has the same weight (DAPO)."""
    return _weights(lengths, 1 / lengths.sum().double())


def sequence_mean(lengths: Tensor) -> Tensor:
    """1 / (N T_i): mean over experiences of the mean over tokens (GRPO as published)."""
    return _weights(lengths, 1 / ((lengths > 0).sum() * lengths.double()))


def sequence_sum_mean(lengths: Tensor) -> Tensor:
    """1 / N: mean over experiences of the sum over tokens (REINFORCE, RLOO as published)."""
    return _weights(lengths, 1 / (lengths > 0).sum().double())


def constant(lengths: Tensor, *, max_length: int) -> Tensor:
    """1 / (max_length N): a denominator that depends neither on lengths nor on padding (Dr. GRPO)."""
    return sequence_sum_mean(lengths) / max_length


def get_aggregation(name: str, *, max_length: int) -> Callable[[Tensor], Tensor]:
    """Returns the aggregation of this name; `max_length` is the maximum number of tokens of a completion."""
    named: dict[str, Callable[[Tensor], Tensor]] = {
        "token-mean": token_mean,
        "sequence-mean": sequence_mean,
        "sequence-sum-mean": sequence_sum_mean,
        "constant": partial(constant, max_length=max_length),
    }
    return named[name]


def _weights(lengths: Tensor, weight: Tensor) -> Tensor:
    return torch.where(lengths > 0, weight, 0).float()


def sum_by_sequence(values: Tensor, sequence: Tensor, count: int | None = None) -> Tensor:
    """[tokens] -> [N]: the sum over each sequence's tokens, 0 for a sequence without any.

    Args:
        count: N; None: the greatest number in `sequence`, plus 1.
    """
    if count is None:
        count = int(sequence.max()) + 1 if len(sequence) else 0
    return values.new_zeros(count).index_add(0, sequence, values)


def mean_by_sequence(values: Tensor, sequence: Tensor, count: int | None = None) -> Tensor:
    """[tokens] -> [N]: the mean over each sequence's tokens, 0 for a sequence without any. `count` as above."""
    total = sum_by_sequence(values, sequence, count)
    return total / sum_by_sequence(torch.ones_like(values), sequence, len(total)).clamp(min=1)


def expand_to_tokens(values: Tensor, sequence: Tensor) -> Tensor:
    """[N] -> [tokens]: each sequence's value on every one of its tokens.

    With the aggregation `sequence-mean`, the result is the mean over sequences.
    """
    return values[sequence]


def token_sequence_sum(values: Tensor, sequence: Tensor) -> Tensor:
    """[tokens] -> [tokens]: the sum over the token's sequence, on every token."""
    return expand_to_tokens(sum_by_sequence(values, sequence), sequence)


def token_sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """[tokens] -> [tokens]: the mean over the token's sequence, on every token."""
    return expand_to_tokens(mean_by_sequence(values, sequence), sequence)
