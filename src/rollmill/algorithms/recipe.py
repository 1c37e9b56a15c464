"""A recipe: everything the trainer needs to know about an algorithm, as data.

The trainer computes log-probs and sums terms; it never asks for an algorithm's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from rollmill.core.types import Source


class RewardInputs(NamedTuple):
    """What an advantage function sees: one entry per usual experience, [N]."""

    rewards: Tensor  #: float64, NaN where missing
    groups: Tensor  #: int64 group ids
    lengths: Tensor  #: int64, action tokens


class Advantages(NamedTuple):
    """What an advantage function returns, [N] each."""

    values: Tensor  #: advantage of every action token of the experience
    counted: Tensor  #: bool: whether the experience enters the denominators


class TermInputs(NamedTuple):
    """What a loss term sees: the action tokens of one source in one micro-batch, [tokens] each.

    Experiences are never cut, so per-sequence quantities can be formed with `sequence`.
    """

    logprob: Tensor  #: of the policy being trained, with gradient
    old_logprob: Tensor  #: of the policy the update is proximal to
    rollout_logprob: Tensor  #: as recorded by the rollout engine
    advantage: Tensor
    entropy: Tensor  #: of the policy's next-token distribution; with gradient only if a term asks for it
    reference_logprob: Tensor | None  #: of the frozen initial policy, if a term asks for it
    sequence: Tensor  #: int64, which experience of the micro-batch the token belongs to


@dataclass(frozen=True)
class LossTerm:
    """One summand of the loss: weight * sum_t aggregate_t * fn(inputs)_t over the tokens of one source."""

    name: str
    fn: Callable[[TermInputs], Tensor]
    aggregate: Callable[[Tensor], Tensor]  #: token counts [N] -> weight of each token of the experience [N]
    source: Source = Source.USUAL
    weight: float = 1.0
    uses_advantage: bool = False  #: the term is 0, and so is its gradient, where the advantage is 0
    uses_reference: bool = False
    uses_entropy: bool = False


@dataclass(frozen=True)
class Recipe:
    """An algorithm: advantage function, loss terms and off-policy correction."""

    name: str
    terms: tuple[LossTerm, ...]
    advantage: Callable[[RewardInputs], Advantages] | None = None  #: None: nothing is compared (SFT)
    importance_cap: float | None = None  #: cap of the token-level truncated importance weights; None: off
    clip_low: float = float("inf")  #: bounds of the ratio, for the clip-fraction metric
    clip_high: float = float("inf")

    @property
    def uses_reference(self) -> bool:
        """Whether a frozen reference model is needed."""
        return any(term.uses_reference for term in self.terms)

    @property
    def uses_entropy(self) -> bool:
        """Whether the entropy needs a gradient."""
        return any(term.uses_entropy for term in self.terms)
