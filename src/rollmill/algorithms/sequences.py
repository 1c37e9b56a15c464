"""Sums and means over the tokens of each sequence, from flat tensors [tokens], and back.

`sequence` int64 [tokens] says which sequence a token belongs to. The tokens of a sequence need not stand together, and
sequences may have no tokens. Everything carries gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor


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

    A loss per sequence, spread, is its mean over sequences under the aggregation `sequence-mean`.
    """
    return values[sequence]


def token_sequence_sum(values: Tensor, sequence: Tensor) -> Tensor:
    """[tokens] -> [tokens]: the sum over the token's sequence, on every token."""
    return expand_to_tokens(sum_by_sequence(values, sequence), sequence)


def token_sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """[tokens] -> [tokens]: the mean over the token's sequence, on every token."""
    return expand_to_tokens(mean_by_sequence(values, sequence), sequence)
