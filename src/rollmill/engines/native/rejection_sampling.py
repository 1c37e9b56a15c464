"""Accepting or replacing drafted tokens so that what comes out follows the new distribution exactly.

A drafted token x was drawn from an old distribution of which the probabilities of some tokens are known. It is accepted
with probability min(1, new(x) / old(x)) if its own is known, else never; what is rejected is replaced by a draw from
max(new - old, 0), where tokens whose old probability is unknown count with old 0: nothing is ever accepted of them.
Then P(y) = old(y) min(1, new(y) / old(y)) + (new(y) - min(new(y), old(y))) = new(y) for known tokens, and new(y) for
all others. With every probability known this is speculative sampling (arXiv:2211.17192, Theorem 1). A token that was
guessed was drawn from a point mass. Drawing the replacement from new itself would be biased.

Shapes: B drafted tokens, V vocabulary, K tokens whose old probability is known.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DraftBatch(NamedTuple):
    """Drafted tokens and what is known of the distributions they were drawn from; unused places have probability 0."""

    token_B: Tensor
    known_BK: Tensor  #: token ids, each at most once in a row, unless with probability 0
    probs_BK: Tensor  #: their old probabilities

    def part(self, rows: slice | Tensor) -> DraftBatch:
        """Some of them."""
        return DraftBatch(self.token_B[rows], self.known_BK[rows], self.probs_BK[rows])


def acceptance_probability(new_B: Tensor, drafted: DraftBatch) -> Tensor:
    """Probability of accepting each token, [B]; `new_B` are the tokens' own new probabilities."""
    own = torch.where(drafted.known_BK == drafted.token_B[:, None], drafted.probs_BK, 0.0).sum(-1)
    return torch.where(own > 0, (new_B / own.clamp(min=torch.finfo(own.dtype).tiny)).clamp(max=1), 0.0)


def residual_weights(new_BV: Tensor, drafted: DraftBatch) -> Tensor:
    """Weights [B, V] of what replaces a rejected token: max(new - old, 0). They sum to less than 1.

    Where rounding leaves nothing (new and old are equal, so that a rejection has no probability), new itself.
    """
    common_BK = torch.minimum(new_BV.gather(1, drafted.known_BK), drafted.probs_BK)
    left_BV = new_BV.scatter_add(1, drafted.known_BK, -common_BK).clamp_(min=0)
    return torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, new_BV)
