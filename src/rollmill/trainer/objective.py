"""The loss of a recipe: terms summed over micro-batches under denominators fixed for the whole optimizer step.

Shapes: N experiences of the batch, M action tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollmill.algorithms.recipe import Advantages, LossTerm, Recipe, RewardInputs, TermInputs
from rollmill.core.types import Experience, Source
from rollmill.trainer.batch import MicroBatch, TokenTable


@dataclass(frozen=True)
class Judgement:
    """Advantages of a batch, [N] each."""

    advantage: Tensor  #: float32; 0 for experts
    counted: Tensor  #: bool: enters the denominators
    expert: Tensor  #: bool


@dataclass(frozen=True)
class Scores:
    """Log-probs of all action tokens of the batch under other policies than the trained one; None: not needed."""

    old: Tensor | None = None  #: None: the policy's own, detached
    reference: Tensor | None = None


def judge(experiences: Sequence[Experience], table: TokenTable, recipe: Recipe) -> Judgement:
    """Advantages by the recipe's rule, and each experience's `advantage` array filled in."""
    device = table.target.device
    expert = torch.tensor([e.source is Source.EXPERT for e in experiences], dtype=torch.bool, device=device)
    values, counted = torch.zeros(len(experiences), device=device), expert.clone()
    usual = (~expert).nonzero()[:, 0]
    if recipe.advantage is not None and len(usual):
        chosen = [experiences[i] for i in usual.tolist()]
        names: dict[str, int] = {}
        result: Advantages = recipe.advantage(
            RewardInputs(
                torch.tensor([np.nan if e.reward is None else e.reward for e in chosen], dtype=torch.float64),
                torch.tensor([names.setdefault(e.group, len(names)) for e in chosen]),
                table.lengths[usual].cpu(),
            )
        )
        values[usual] = result.values.to(device, torch.float32)
        counted[usual] = result.counted.to(device)
    for experience, value in zip(experiences, values.tolist(), strict=True):
        experience.advantage = np.where(experience.action_mask, np.float32(value), np.float32(0))
    return Judgement(values, counted, expert)


class Objective:
    """The loss of one optimizer step over the experiences of `part`."""

    def __init__(self, recipe: Recipe, table: TokenTable, judgement: Judgement, scores: Scores, part: list[int]):
        self.recipe, self._table, self._judgement, self._scores = recipe, table, judgement, scores
        lengths = torch.zeros_like(table.lengths)
        lengths[part] = table.lengths[part]
        self._weights = [term.aggregate(lengths * self._members(term)) for term in recipe.terms]
        learned = torch.zeros(len(lengths), dtype=torch.bool, device=lengths.device)
        for term, weight in zip(recipe.terms, self._weights, strict=True):
            moves = (judgement.advantage != 0) if term.uses_advantage else torch.ones_like(learned)
            learned |= moves & (weight != 0) & (term.weight != 0)
        self.learned = learned.nonzero()[:, 0].tolist()  #: the experiences that have a gradient

    def inputs(self, micro: MicroBatch, logprob: Tensor, entropy: Tensor, source: Source) -> tuple[TermInputs, Tensor]:
        """What terms on `source` see of a micro-batch, and which of its M tokens these are (indices)."""
        table, tokens = self._table, micro.tokens
        chosen = (table.expert[tokens] == (source is Source.EXPERT)).nonzero()[:, 0]
        everything = len(chosen) == len(tokens)
        logprob, entropy = (x if everything else x[chosen] for x in (logprob, entropy))
        tokens = tokens[chosen]
        old, reference = self._scores.old, self._scores.reference
        inputs = TermInputs(
            logprob=logprob,
            old_logprob=logprob.detach() if old is None else old[tokens],
            rollout_logprob=table.rollout_logprob[tokens],
            advantage=self._judgement.advantage[table.experience[tokens]],
            entropy=entropy,
            reference_logprob=None if reference is None else reference[tokens],
            sequence=micro.sequence[chosen],
        )
        return inputs, tokens

    def terms(self, inputs: TermInputs, tokens: Tensor, source: Source) -> dict[str, tuple[float, Tensor]]:
        """Weight and value (this micro-batch's share of the term) of every term on `source`."""
        experience = self._table.experience[tokens]
        return {
            term.name: (term.weight, torch.dot(weight[experience].to(inputs.logprob.dtype), term.fn(inputs)))
            for term, weight in zip(self.recipe.terms, self._weights, strict=True)
            if term.source is source and len(tokens)
        }

    def _members(self, term: LossTerm) -> Tensor:
        return self._judgement.counted & (self._judgement.expert == (term.source is Source.EXPERT))
